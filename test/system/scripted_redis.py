"""A far side that speaks the protocol of Redis and answers what a test says: what a real server does not do on demand."""
import contextlib
import socket
import threading

from brokers.redis import PASSWORD


class ScriptedRedis:
    """Answers each command with what `answer` makes of its words."""

    def __init__(self, answer, greeting=b""):
        self.answer, self.greeting = answer, greeting
        self.commands = []
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.port = self.listener.getsockname()[1]
        self.connections = []
        threading.Thread(target=self.accept, daemon=True).start()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.listener.close()
        for connection in self.connections:
            connection.close()

    def options(self, **others):
        return {"host": "127.0.0.1", "port": self.port, "password": PASSWORD, "stream": "events"} | others

    def seen(self, name):
        return any(words[0] == name for words in self.commands)

    def accept(self):
        with contextlib.suppress(OSError):
            while True:
                connection, _ = self.listener.accept()
                self.connections.append(connection)
                threading.Thread(target=self.serve, args=(connection,), daemon=True).start()

    def serve(self, connection):
        with contextlib.suppress(OSError, ValueError):
            connection.sendall(self.greeting)
            stream = connection.makefile("rb")
            while line := stream.readline():
                words = []
                for _ in range(int(line[1:])):
                    size = int(stream.readline()[1:])
                    words.append(stream.read(size + 2)[:size])
                self.commands.append(words)
                connection.sendall(self.answer(words))
