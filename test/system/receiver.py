"""A web server on loopback that misbehaves on command, and keeps each request with the time of its arrival.

    with Receiver() as receiver:
        receiver.behave(lambda request: 503 if request.header("ce-type") == "order.created" else 204)
        … receiver.url … receiver.requests …

What `behave` is given decides the answer to each request: a status, an Answer, or one of the other classes below.
It speaks HTTP/1.1 by hand, since a library would refuse to send what the worker must survive.
"""
import itertools
import json
import socket
import ssl
import struct
import threading
import time
from dataclasses import dataclass, field


@dataclass
class Answer:
    status: int = 204
    headers: dict = field(default_factory=dict)
    body: bytes = b""
    delay: float = 0.0


@dataclass
class Hang:
    """These bytes and no more; the connection stays open until the receiver closes."""
    data: bytes = b""


class Reset:
    """The connection ends with a reset."""


class Close:
    """The connection is closed without an answer."""


@dataclass
class Raw:
    """These bytes and then the end of the connection, e.g. half an answer or no HTTP at all."""
    data: bytes


@dataclass
class Request:
    method: str
    path: str
    headers: list          # pairs as they came
    body: bytes
    at: float              # time.monotonic() when the whole request was there
    connection: int        # numbers the connections
    port: int              # of the sender's end of it

    def header(self, name):
        return next((value for key, value in self.headers if key.lower() == name.lower()), None)

    def json(self):
        return json.loads(self.body)

    @property
    def id(self):
        return self.header("ce-id") or self.json()["id"]


class Receiver:
    def __init__(self, host="127.0.0.1", port=0, tls=None, client_ca=None):
        """`tls`: the files of a certificate and its key. `client_ca`: file of what clients' certificates must be signed with."""
        self.host, self.port, self.tls, self.client_ca = host, port, tls, client_ca
        self._lock = threading.Lock()
        self._requests = []
        self._connections = set()
        self._numbers = itertools.count(1)
        self._behaviour = lambda request: 204
        self._listener = None
        self._closing = threading.Event()
        self.start()

    # -- what tests use --

    @property
    def url(self):
        return f"{'https' if self.tls else 'http'}://{self.host}:{self.port}/"

    @property
    def requests(self):
        with self._lock:
            return list(self._requests)

    @property
    def ids(self):
        return [request.id for request in self.requests]

    def behave(self, behaviour):
        """`behaviour`: called with each request, or the same answer to all."""
        self._behaviour = behaviour if callable(behaviour) and not isinstance(behaviour, type) else lambda _: behaviour

    def clear(self):
        with self._lock:
            self._requests.clear()

    def stop(self):
        """Refuses connections from now on, until start()."""
        self._closing.set()
        # Closing alone does not wake up accept() in the other thread.
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._acceptor.join()
        with self._lock:
            connections = list(self._connections)
        for connection in connections:
            try:
                connection.shutdown(socket.SHUT_RDWR)
            except OSError:
                pass

    def start(self):
        self._closing = threading.Event()
        listener = socket.socket(socket.AF_INET6 if ":" in self.host else socket.AF_INET)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((self.host, self.port))
        listener.listen(1024)
        self.port = listener.getsockname()[1]
        self._listener = listener
        self._acceptor = threading.Thread(target=self._accept, args=(listener, self._closing), daemon=True)
        self._acceptor.start()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        if not self._closing.is_set():
            self.stop()

    # -- how it works --

    def _accept(self, listener, closing):
        while not closing.is_set():
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            threading.Thread(target=self._serve, args=(connection, closing, next(self._numbers)), daemon=True).start()

    def _serve(self, connection, closing, number):
        try:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if self.tls:
                context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
                context.load_cert_chain(*self.tls)
                if self.client_ca:
                    context.verify_mode = ssl.CERT_REQUIRED
                    context.load_verify_locations(self.client_ca)
                connection = context.wrap_socket(connection, server_side=True)
            with self._lock:
                self._connections.add(connection)
            stream = connection.makefile("rb")
            port = connection.getpeername()[1]
            while not closing.is_set():
                request = self._read(stream, number, port)
                if request is None or not self._answer(connection, request, closing):
                    return
        except (OSError, ValueError):
            pass
        finally:
            with self._lock:
                self._connections.discard(connection)
            connection.close()

    def _read(self, stream, number, port):
        line = stream.readline()
        if not line:
            return None
        method, path, _ = line.decode("latin-1").split(" ", 2)
        headers = []
        while (line := stream.readline()) not in (b"\r\n", b"\n"):
            if not line:
                return None
            name, _, value = line.decode("latin-1").rstrip("\r\n").partition(":")
            headers.append((name, value.strip(" \t")))
        length = next((int(value) for name, value in headers if name.lower() == "content-length"), 0)
        body = stream.read(length)
        if len(body) < length:
            return None
        request = Request(method, path, headers, body, time.monotonic(), number, port)
        with self._lock:
            self._requests.append(request)
        return request

    def _answer(self, connection, request, closing):
        """True when the connection goes on."""
        answer = self._behaviour(request)
        if isinstance(answer, type):
            answer = answer()
        if isinstance(answer, int):
            answer = Answer(answer)
        if isinstance(answer, Hang):
            connection.sendall(answer.data)
            closing.wait()
            return False
        if isinstance(answer, Reset):
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            return False
        if isinstance(answer, Close):
            return False
        if isinstance(answer, Raw):
            connection.sendall(answer.data)
            return False
        if answer.delay and closing.wait(answer.delay):
            return False
        head = [f"HTTP/1.1 {answer.status} Status"]
        head += [f"{name}: {value}" for name, value in answer.headers.items()]
        if answer.status != 204:
            head.append(f"Content-Length: {len(answer.body)}")
        connection.sendall("\r\n".join(head).encode("latin-1") + b"\r\n\r\n" + answer.body)
        return True
