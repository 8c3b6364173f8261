"""Far sides that mean harm: servers on loopback that say what no server says, for as long as one listens."""
import contextlib
import re
import socket
import threading
import time

import psycopg2
import pytest

from conftest import eventually, run
from receiver import Receiver

MEGABYTE = 1 << 20


class Hostile:
    """Calls `talk(connection)` for each connection, which sends until it fails."""

    def __init__(self, talk):
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.port = self.listener.getsockname()[1]
        self.talk, self.sent, self.connections, self.ended = talk, 0, 0, 0
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self):
        with contextlib.suppress(OSError):
            while True:
                connection, _ = self.listener.accept()
                self.connections += 1
                threading.Thread(target=self._talk, args=(connection,), daemon=True).start()

    def _talk(self, connection):
        try:
            with connection:
                self.talk(Line(connection, self))
        except OSError:
            pass
        finally:
            self.ended += 1

    def close(self):
        self.listener.shutdown(socket.SHUT_RDWR)
        self.listener.close()


class Line:
    """One connection."""

    def __init__(self, connection, server):
        self.connection, self.server = connection, server

    def read(self, size=65536):
        data = self.connection.recv(size)
        if not data:
            raise OSError("closed")
        return data

    def read_until(self, pattern):
        text = b""
        while not (found := re.search(pattern, text, re.S)):
            text += self.read()
        return found

    def send(self, data):
        self.connection.sendall(data)
        self.server.sent += len(data)

    def flood(self, piece, pause=0):
        """Without an end."""
        block = piece * max(1, 65536 // len(piece))
        while self.server.listener.fileno() >= 0:
            self.send(block)
            time.sleep(pause)

    def drip(self, data, seconds=0.1):
        for byte in data:
            self.send(bytes([byte]))
            time.sleep(seconds)


def refused(session, query, *parameters, sqlstate="42501"):
    """The error, which has this SQLSTATE."""
    with pytest.raises(psycopg2.Error) as error:
        run(session, query, *parameters)
    assert error.value.pgcode == sqlstate, error.value
    return error.value


def worker_pid(db):
    return eventually(lambda: run(db.connect(), "SELECT pid FROM pg_stat_activity WHERE backend_type = 'retrysafe worker'"
                                                " AND datname = current_database()"))[0][0]


@contextlib.contextmanager
def healthy_neighbour(db):
    """Another destination of the same worker. Tells whether it works."""
    with Receiver() as receiver:
        db.sql("SELECT outbox_create_destination('healthy', 'http', jsonb_build_object('url', %s), event_types => '{healthy}')",
               receiver.url)
        count = 0

        def works():
            nonlocal count
            count += 1
            db.sql("SELECT outbox_emit(NULL, %s, 'healthy', '{}')", f"healthy-{count}")
            eventually(lambda: len(receiver.requests) >= count, timeout=15)
        works()
        yield works
