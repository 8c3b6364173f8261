"""Secrets that are kept outside of the database: read when events are sent."""
import base64
import hmac
import json

from conftest import cluster, eventually, make_database
from operating import emit, status
from receiver import Receiver


def test_a_secret_is_read_from_its_file_when_events_are_sent(db, secrets):
    key = bytes(range(24))
    (secrets / "hook.key").write_text("whsec_" + base64.b64encode(key).decode() + "\n")
    with Receiver() as receiver:
        db.sql("SELECT outbox_create_destination('d', 'http', %s)", json.dumps({"url": receiver.url, "secret_file": "hook.key"}))
        emit(db, "a")
        eventually(lambda: receiver.requests)
        request = receiver.requests[0]
        signed = f'{request.header("webhook-id")}.{request.header("webhook-timestamp")}.'.encode() + request.body
        assert request.header("webhook-signature") == "v1," + base64.b64encode(hmac.digest(key, signed, "sha256")).decode()


def test_a_secret_is_taken_from_the_environment_of_the_server(monkeypatch):
    monkeypatch.setenv("RETRYSAFE_TEST_KEY", "sesame")
    with cluster() as own, Receiver() as receiver:
        db = make_database(own)
        db.sql("SELECT outbox_create_destination('d', 'http', %s)",
               json.dumps({"url": receiver.url, "secret_env": "RETRYSAFE_TEST_KEY"}))
        emit(db, "a")
        eventually(lambda: receiver.requests)
        request, = receiver.requests
        signed = f'{request.header("webhook-id")}.{request.header("webhook-timestamp")}.'.encode() + request.body
        assert request.header("webhook-signature") == "v1," + base64.b64encode(hmac.digest(b"sesame", signed, "sha256")).decode()


def test_a_secret_that_cannot_be_read_stops_its_destination_only(db, secrets):
    (secrets.parent / "elsewhere.key").write_text("hunter2")
    (secrets / "link.key").symlink_to(secrets.parent / "elsewhere.key")
    (secrets / "empty.key").write_text("\n")
    (secrets / "large.key").write_text("x" * 65537)
    (secrets / "folder.key").mkdir()
    expected = {
        "link": ('"secret_file": "link.key"', "outside of the allowed directory"),
        "missing": ('"secret_file": "missing.key"', "cannot be found"),
        "empty": ('"secret_file": "empty.key"', "empty or not text"),
        "large": ('"secret_file": "large.key"', "cannot be read"),
        "folder": ('"secret_file": "folder.key"', "cannot be read"),
        "environment": ('"secret_env": "RETRYSAFE_NO_SUCH_VARIABLE"', "is not set"),
    }
    with Receiver() as receiver:
        for name, (option, _) in expected.items():
            db.sql("SELECT outbox_create_destination(%s, 'http', %s)", name, f'{{"url": "{receiver.url}", {option}}}')
        db.sql("SELECT outbox_create_destination('good', 'http', %s)", json.dumps({"url": receiver.url}))
        emit(db, "a")
        eventually(lambda: receiver.requests)
        for name, (_, error) in expected.items():
            assert error in eventually(lambda: status(db, name)["last_error"]), name
            assert status(db, name)["backlog"] == 1
        assert len(receiver.requests) == 1
        # A mended secret is tried again.
        (secrets / "missing.key").write_text("no secret")
        eventually(lambda: len(receiver.requests) == 2)
