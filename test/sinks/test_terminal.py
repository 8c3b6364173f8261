"""A server or a relay may have been started at a terminal: no sink asks anything there."""
import contextlib
import os
import pty
import socket
import subprocess
import sys
import threading

import pytest

from sink import interpreter


@pytest.fixture(scope="module")
def locked(tmp_path_factory):
    """A certificate whose key has a password."""
    folder = tmp_path_factory.mktemp("locked")
    subprocess.run(["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-passout",
                    "pass:hunter2", "-keyout", folder / "key.pem", "-out", folder / "cert.pem", "-days", "2", "-subj", "/CN=x"],
                   check=True, capture_output=True)
    return {"cert_file": str(folder / "cert.pem"), "key_file": str(folder / "key.pem")}


@pytest.fixture
def port():
    """Of a server that agrees to TLS, in the words of PostgreSQL, and says nothing more."""
    def serve():
        with contextlib.suppress(OSError):
            while True:
                connections.append(listener.accept()[0])
                connections[-1].sendall(b"S")

    connections = []
    with socket.create_server(("127.0.0.1", 0)) as listener:
        threading.Thread(target=serve, daemon=True).start()
        yield str(listener.getsockname()[1])
        listener.shutdown(socket.SHUT_RDWR)
    for connection in connections:
        connection.close()


HERE = {"host": "127.0.0.1", "user": "u", "password": "p"}


@pytest.mark.parametrize("kind, options", [
    ("http", {"url": "https://127.0.0.1:PORT/"}),
    ("kafka", {"brokers": "127.0.0.1:PORT", "topic": "t", "tls": "true"}),
    ("nats", {"servers": "tls://127.0.0.1:PORT", "subject": "s"}),
    ("postgres", HERE | {"port": "PORT", "dbname": "d"}),
    ("rabbitmq", HERE | {"port": "PORT", "tls": "true", "exchange": "e", "routing_key": "k"}),
    ("redis", HERE | {"port": "PORT", "tls": "true", "stream": "s"})])
def test_nobody_is_asked_for_the_password_of_a_key(locked, port, kind, options):
    options = {name: value.replace("PORT", port) for name, value in options.items()} | locked
    program = f"""
import sys
sys.path[:0] = {sys.path!r}
from sink import OpenError, Sink, event
try:
    with Sink({kind!r}, {options!r}) as sink:
        print(sink.send(event(0))[0].reason)
except OpenError as error:
    print(error)
"""
    child, terminal = pty.fork()
    if child == 0:
        os.execve(sys.executable, [sys.executable, "-c", program], interpreter())
    said = b""
    try:
        while piece := os.read(terminal, 4096):
            said += piece
            assert b"phrase" not in said
    except OSError:  # that is how its end reads
        pass
    finally:
        os.close(terminal)
        status = os.waitpid(child, 0)[1]
    assert status == 0, said
    assert b"key" in said or b"certificate" in said, said
