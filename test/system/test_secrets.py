"""A far side may repeat the secret that it was shown: nobody gets to see it, in no view and in no log."""
import contextlib
import json
import re
import socket
import threading

import psycopg2
import pytest

from brokers.contract import backs_off, create, emit, status
from conftest import eventually
from relay_process import Relay

SECRET = "hunter2-hunter2"


def nats(connection):
    connection.sendall(b'INFO {"server_id": "x", "version": "2.10.0", "proto": 1, "headers": true, "max_payload": 1024}\r\n')
    login = json.loads(re.search(rb"CONNECT (\{.*?\})\r\n", connection.recv(65536)).group(1))
    secret = login.get("pass") or login.get("auth_token")
    connection.sendall(b"-ERR 'no login with " + secret.encode() + b"'\r\n")


def redis(connection):
    words = connection.recv(65536).split(b"\r\n")
    connection.sendall(b"-ERR no login with " + b" ".join(words) + b"\r\n")


@contextlib.contextmanager
def far_side(talk):
    with socket.create_server(("127.0.0.1", 0)) as listener:
        def serve():
            with contextlib.suppress(OSError):
                while True:
                    connection, _ = listener.accept()
                    with connection, contextlib.suppress(OSError):
                        talk(connection)
                        connection.shutdown(socket.SHUT_WR)
                        while connection.recv(65536):  # closed on unread words, it would be reset and the answer lost
                            pass
        threading.Thread(target=serve, daemon=True).start()
        yield listener.getsockname()[1]


@pytest.mark.parametrize("kind, talk, options", [
    ("nats", nats, {"servers": "127.0.0.1:{port}", "subject": "x", "user": "u", "password": SECRET}),
    ("nats", nats, {"servers": "127.0.0.1:{port}", "subject": "x", "token": SECRET}),
    ("redis", redis, {"host": "127.0.0.1", "port": "{port}", "stream": "s", "password": SECRET})],
    ids=["password of nats", "token of nats", "password of redis"])
def test_a_server_that_repeats_a_secret(db, server, kind, talk, options):
    logged = len(server.log())
    with far_side(talk) as port:
        options = {name: value.replace("{port}", str(port)) for name, value in options.items()}
        if "port" in options:
            options["port"] = port
        create(db, "d", kind, options)
        create(db, "relayed", kind, options, workers=False)
        emit(db, "event")
        relay = Relay(db, "relayed", "--allowed-addresses", "127.0.0.1")
        try:
            for name in "d", "relayed":
                shown = backs_off(db, name)
                assert "no login with" in shown and "***" in shown
                assert "hunter2" not in json.dumps(status(db, name))
            eventually(lambda: "no login with" in relay.log())
            assert "hunter2" not in relay.log()
        finally:
            relay.stop()
    eventually(lambda: "no login with" in server.log()[logged:])
    assert "hunter2" not in server.log()[logged:]


@pytest.mark.parametrize("kind, options", [
    ("nats", {"servers": "nats://u:open-sesame@h", "subject": "x"}), ("kafka", {"brokers": "u:open-sesame@h:9092", "topic": "t"}),
    ("redis", {"host": "u:open-sesame@h", "stream": "s"}), ("rabbitmq", {"host": "u:open-sesame@h", "user": "u", "password": "p"}),
    ("postgres", {"host": "u:open-sesame@h", "dbname": "d", "user": "u", "password": "p"})])
def test_secrets_that_do_not_belong_into_an_address(db, kind, options):
    with pytest.raises(psycopg2.Error) as error:
        create(db, "d", kind, options)
    assert error.value.pgcode == "RS203" and "without user and password" in error.value.diag.message_hint
    assert "sesame" not in str(error.value)
