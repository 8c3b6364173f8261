"""A real NATS server with JetStream, and a reader of its own: the text protocol over a plain socket."""
import base64
import ctypes
import itertools
import json
import pathlib
import re
import secrets
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from urllib.parse import unquote

import ending
from brokers.broker import Broker, Message
from brokers.ports import free_port
from waiting import deadline

SERVER = "/usr/sbin/nats-server"
MAX_PAYLOAD = 512 * 1024
ONE_FOR_ALL = "events.of-any-type"  # the subject of options_for_any_type


class Error(Exception):
    pass


class Client:
    """A connection that sends requests and waits for their answers."""

    def __init__(self, host, port, tls=None, timeout=10, **connect):
        self._socket = socket.create_connection((host, port), timeout)
        self._file = self._socket.makefile("rb")
        self.info = json.loads(self._file.readline().split(b" ", 1)[1])
        if tls:
            self._socket = tls.wrap_socket(self._socket, server_hostname="localhost")
            self._file = self._socket.makefile("rb")
        hello = {"verbose": False, "pedantic": False, "headers": True, "no_responders": True, "protocol": 1,
                 "lang": "python", "version": "0"} | connect
        self._inbox = f"_INBOX.{secrets.token_hex(8)}"
        self._numbers = itertools.count()
        self.send(f"CONNECT {json.dumps(hello)}\r\nSUB {self._inbox}.* 1\r\nPING\r\n".encode())
        while self._line() != b"PONG":
            pass

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()

    def close(self):
        self._file.close()
        self._socket.close()

    def send(self, data):
        self._socket.sendall(data)

    def publish(self, subject, payload=b"", reply=""):
        self.send(b"PUB %s %s %d\r\n%s\r\n" % (subject.encode(), reply.encode(), len(payload), payload))

    def subscribe(self, subject):
        """Somebody who listens and never answers."""
        self.send(f"SUB {subject} 2\r\nPING\r\n".encode())
        while self._line() != b"PONG":
            pass

    def answer(self, payload):
        """Answers the first message that comes."""
        while True:
            word, *arguments = self._line().split()
            if word in (b"MSG", b"HMSG"):
                self._file.read(int(arguments[-1]) + 2)
                self.publish(arguments[2].decode(), payload)
                return

    def requests(self, subject, payloads):
        """Asks all at once; the answers in the order of the questions."""
        first = next(self._numbers)
        wanted = [f"{self._inbox}.{first}"] + [f"{self._inbox}.{next(self._numbers)}" for _ in payloads[1:]]
        self.send(b"".join(b"PUB %s %s %d\r\n%s\r\n" % (subject.encode(), reply.encode(), len(payload), payload)
                           for reply, payload in zip(wanted, payloads)))
        found = {}
        while len(found) < len(wanted):
            inbox, answer = self._message()
            found[inbox] = answer
        return [found[reply] for reply in wanted]

    def api(self, call, /, **arguments):
        """One call of JetStream's own API."""
        answer = json.loads(self.requests(f"$JS.API.{call}", [json.dumps(arguments).encode() if arguments else b""])[0])
        if "error" in answer:
            raise Error(answer["error"]["description"])
        return answer

    def _line(self):
        line = self._file.readline()
        if not line.endswith(b"\r\n"):
            raise ConnectionError("the server closed the connection")
        line = line[:-2]
        if line == b"PING":
            self.send(b"PONG\r\n")
        if line.startswith(b"-ERR"):
            raise Error(line.decode())
        return line

    def _message(self):
        while True:
            word, *arguments = self._line().split()
            if word not in (b"MSG", b"HMSG"):
                continue
            body = self._file.read(int(arguments[-1]) + 2)[:-2]
            headers = int(arguments[-2]) if word == b"HMSG" else 0
            if headers and b" 503" in body[:headers].split(b"\r\n")[0]:
                raise Error(f"nobody answers on {arguments[0].decode()}")
            return arguments[0].decode(), body[headers:]


class Stored:
    """One message of a stream."""

    def __init__(self, answer):
        message = answer["message"]
        self.subject, self.sequence = message["subject"], message["seq"]
        self.data = base64.b64decode(message.get("data", ""))
        lines = base64.b64decode(message.get("hdrs", "")).decode().split("\r\n")[1:]
        self.headers = dict(re.split(": ?", line, maxsplit=1) for line in lines if line)


def stored(client, stream="EVENTS", at_once=500):
    """All messages of a stream in its order, each fetched by its number."""
    state = client.api(f"STREAM.INFO.{stream}")["state"]
    numbers = range(state["first_seq"], state["last_seq"] + 1) if state["messages"] else []
    found = []
    for start in range(0, len(numbers), at_once):
        questions = [json.dumps({"seq": number}).encode() for number in numbers[start:start + at_once]]
        answers = [json.loads(answer) for answer in client.requests(f"$JS.API.STREAM.MSG.GET.{stream}", questions)]
        found += [Stored(answer) for answer in answers if "error" not in answer]
    return found


def die_with_parent():
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


class Server:
    """nats-server with the given settings of its own configuration language."""

    def __init__(self, settings, login=None, tls=None, host="127.0.0.1"):
        self.host, self.port = host, free_port()
        self.folder = pathlib.Path(tempfile.mkdtemp(prefix="retrysafe-nats-"))
        self._settings, self._login, self._tls, self._process = settings, login or {}, tls, None

    def start(self):
        config = self.folder / "config"
        config.write_text(f'host: "{self.host}"\nport: {self.port}\nserver_name: test\n'
                          f"max_payload: {MAX_PAYLOAD}\n{self._settings}\n")
        with open(self.folder / "log", "ab") as log, ending.deferred():
            self._process = subprocess.Popen([SERVER, "-c", config], stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                                             preexec_fn=die_with_parent)
        ends = deadline(10)
        while not self._greets():
            assert self._process.poll() is None and time.monotonic() < ends, self.log()
            time.sleep(0.02)

    def _greets(self):
        try:
            with socket.create_connection((self.host, self.port), 10) as probe:
                return probe.recv(4) == b"INFO"
        except OSError:
            return False

    def client(self, **login):
        return Client(self.host, self.port, self._tls, **(self._login | login))

    def log(self):
        return (self.folder / "log").read_text(errors="replace")

    def stop(self):
        """SIGSTOP, which reaches one thread after the other."""
        self._process.send_signal(signal.SIGSTOP)
        tasks = pathlib.Path(f"/proc/{self._process.pid}/task")
        while any(re.search(r"\) ([^T])", (task / "stat").read_text()) for task in tasks.iterdir()):
            time.sleep(0.001)

    def go_on(self):
        self._process.send_signal(signal.SIGCONT)

    def kill(self):
        self._process.kill()  # a stopped one as well
        self._process.wait()

    def close(self):
        if self._process:
            self.kill()
        shutil.rmtree(self.folder)


def jetstream(server_folder):
    return f"jetstream {{ store_dir: {server_folder}/jetstream, max_mem: 64MB, max_file: 256MB }}"


class Nats(Broker):
    kind = "nats"
    reader = "a client in Python"
    keeps_ids = True  # a second copy of an id is not stored, whoever sends it
    PASSWORD = "s3cret-of-the-courier"

    def __init__(self):
        login = {"user": "courier", "pass": self.PASSWORD}
        self._server = Server("", login)
        self._server._settings = (jetstream(self._server.folder) +
                                  f"\nauthorization {{ user: courier, password: {self.PASSWORD} }}")

    def __exit__(self, *_):
        self._server.close()

    def start(self):
        self._server.start()
        with self._server.client() as client:
            client.api("STREAM.CREATE.EVENTS", name="EVENTS", subjects=["events.>"], storage="file",
                       duplicate_window=120 * 10**9)

    def kill(self):
        self._server.kill()

    def client(self):
        return self._server.client()

    def options(self):
        return {"servers": f"127.0.0.1:{self._server.port}", "subject": "events.{type}", "user": "courier",
                "password": self.PASSWORD}

    def options_for_any_type(self):
        """A type with blanks and wildcards is no part of a subject."""
        return self.options() | {"subject": ONE_FOR_ALL}

    def wrong_credentials(self):
        return self.options() | {"password": "hunter2"}

    def wrong_host(self):
        return self.options() | {"servers": f"127.0.0.1:{free_port()}, no-such-host.invalid"}

    def too_large(self):
        return MAX_PAYLOAD

    def read(self):
        with self._server.client() as client:
            return [as_event(message) for message in stored(client)]


def as_event(message):
    headers = message.headers
    attributes = {name.removeprefix("ce-"): unquote(value, errors="strict")
                  for name, value in headers.items() if name.startswith("ce-")}
    assert headers["Nats-Msg-Id"] == attributes["id"]
    assert message.subject == ONE_FOR_ALL or message.subject.endswith(attributes["type"])
    return Message.of(attributes, message.data.decode() if "Content-Type" in headers else None)
