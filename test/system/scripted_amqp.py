"""A far side that speaks AMQP 0-9-1 and does with messages what a test says: what a real broker does not do on demand."""
import contextlib
import socket
import threading
from dataclasses import dataclass

from pika import frame, spec


@dataclass
class Message:
    number: int  # as it is confirmed
    method: spec.Basic.Publish
    properties: spec.BasicProperties
    body: bytes


class ScriptedBroker:
    """`on_message(talk, message)` is called for each message; talk.send(method) answers on its channel."""

    def __init__(self, on_message, frame_max=131072, heartbeat=0, mechanisms="PLAIN AMQPLAIN", host="127.0.0.1",
                 opens_channels=True):
        self.on_message = on_message
        self.tune = spec.Connection.Tune(channel_max=0, frame_max=frame_max, heartbeat=heartbeat)
        self.mechanisms = mechanisms
        self.host = host
        self.opens_channels = opens_channels
        self.talks = []

    def __enter__(self):
        self._server = socket.create_server((self.host, 0), family=socket.AF_INET6 if ":" in self.host else socket.AF_INET)
        threading.Thread(target=self._accept, daemon=True).start()
        return self

    def __exit__(self, *_):
        self._server.shutdown(socket.SHUT_RDWR)
        self._server.close()
        for talk in self.talks:
            talk.close()

    def options(self):
        return {"host": self.host, "port": self._server.getsockname()[1], "user": "u", "password": "p", "exchange": "e"}

    def _accept(self):
        with contextlib.suppress(OSError):
            while True:
                connection, _ = self._server.accept()
                talk = Talk(self, connection)
                self.talks.append(talk)
                threading.Thread(target=talk.run, daemon=True).start()


class Talk:
    """One connection."""

    def __init__(self, broker, connection):
        self.broker, self.connection = broker, connection
        self.largest_frame = self.published = 0

    def send(self, method, channel=1):
        self.raw(frame.Method(channel, method).marshal())

    def raw(self, data):
        self.connection.sendall(data)

    def close(self):
        with contextlib.suppress(OSError):
            self.connection.shutdown(socket.SHUT_RDWR)
        self.connection.close()

    def run(self):
        with contextlib.suppress(OSError):
            assert self.connection.recv(8) == b"AMQP\0\0\x09\x01"
            properties = {"product": "script", "capabilities": {"publisher_confirms": True}}
            self.send(spec.Connection.Start(server_properties=properties, mechanisms=self.broker.mechanisms), 0)
            buffer = b""
            while data := self.connection.recv(65536):
                buffer += data
                while (used_and_frame := frame.decode_frame(buffer))[1] is not None:
                    used, one = used_and_frame
                    buffer = buffer[used:]
                    self.largest_frame = max(self.largest_frame, used)
                    self._take(one)

    def _take(self, one):
        method = getattr(one, "method", None)
        if isinstance(method, spec.Connection.StartOk):
            self.login = method
            self.send(self.broker.tune, 0)
        elif isinstance(method, spec.Connection.TuneOk):
            self.tuned = method
        elif isinstance(method, spec.Connection.Open):
            self.send(spec.Connection.OpenOk(), 0)
        elif isinstance(method, spec.Channel.Open):
            self.published = 0
            self._open = True
            if self.broker.opens_channels:
                self.send(spec.Channel.OpenOk())
            else:
                self.close_channel(504, "CHANNEL_ERROR - no more of them")
        elif isinstance(method, spec.Confirm.Select):
            self.send(spec.Confirm.SelectOk())
        elif isinstance(method, spec.Basic.Publish):
            self._method = method
        elif isinstance(one, frame.Header):
            self._properties, self._body, self._left = one.properties, b"", one.body_size
            self._message_is_complete()
        elif isinstance(one, frame.Body):
            self._body += one.fragment
            self._left -= len(one.fragment)
            self._message_is_complete()

    def _message_is_complete(self):
        if self._left == 0 and self._open:
            self.published += 1
            self.broker.on_message(self, Message(self.published, self._method, self._properties, self._body))

    def close_channel(self, code, text):
        """As brokers do: what comes after is passed over until the channel is opened again."""
        self._open = False
        self.send(spec.Channel.Close(code, text, 60, 40))
