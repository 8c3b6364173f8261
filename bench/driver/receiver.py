"""A minimal web server on loopback that notes when each event was there, and what an event is sent with: one session that
emits one event per transaction at a steady rate. Both read CLOCK_MONOTONIC."""
import json
import os
import re
import select
import signal
import socket
import time

import ending


class Receiver:
    """Answers 204 and notes when the request with each number (its body) was there: a child process, which hands its
    notes over when it is told to terminate."""

    def __init__(self):
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.address = self.listener.getsockname()
        reading, writing = os.pipe()
        self.child = os.fork()
        if self.child == 0:
            os.close(reading)
            ending.ignored()
            arrived = {}

            def hand_over(*_):
                with os.fdopen(writing, "w") as pipe:
                    json.dump(arrived, pipe)
                os._exit(0)

            signal.signal(signal.SIGTERM, hand_over)
            try:
                self._serve(arrived)
            finally:
                os._exit(1)             # not into what the parent does next
        os.close(writing)
        self.listener.close()
        self.notes = os.fdopen(reading)

    def _serve(self, arrived):
        poller = select.epoll()
        poller.register(self.listener, select.EPOLLIN)
        connections, buffers = {}, {}
        while True:
            for descriptor, _ in poller.poll():
                if descriptor == self.listener.fileno():
                    connection, _ = self.listener.accept()
                    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                    poller.register(connection, select.EPOLLIN)
                    connections[connection.fileno()], buffers[connection.fileno()] = connection, b""
                    continue
                data = connections[descriptor].recv(65536)
                at = time.monotonic_ns()
                if not data:
                    poller.unregister(descriptor)
                    connections.pop(descriptor).close()
                    continue
                buffers[descriptor] += data
                head, blank_line, body = buffers[descriptor].partition(b"\r\n\r\n")
                if blank_line and len(body) >= int(re.search(rb"(?i)\r\ncontent-length: *(\d+)", head)[1]):
                    connections[descriptor].sendall(b"HTTP/1.1 204 No Content\r\n\r\n")
                    arrived.setdefault(int(body), at)
                    buffers[descriptor] = b""

    def kill(self):
        if self.child:
            os.kill(self.child, signal.SIGKILL)
            os.waitpid(self.child, 0)

    def finish(self):
        """{number: nanoseconds}"""
        os.kill(self.child, signal.SIGTERM)
        arrived = json.load(self.notes)
        os.waitpid(self.child, 0)
        self.child = None
        return {int(number): at for number, at in arrived.items()}


def emit(connection, statement, numbers, rate):
    """{number: (before COMMIT, after COMMIT)} in nanoseconds; one event each 1/rate seconds. `statement` takes `key`
    and `payload`, which is the event's number."""
    times = {}
    start = time.monotonic()
    with connection.cursor() as sql:
        for turn, number in enumerate(numbers):
            time.sleep(max(0.0, start + turn / rate - time.monotonic()))
            sql.execute(statement, {"key": f"e{number}", "payload": str(number)})
            before = time.monotonic_ns()
            connection.commit()
            times[number] = before, time.monotonic_ns()
    return times
