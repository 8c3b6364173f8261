"""Whom the destination kind "postgres" talks to: addresses, hosts, passwords, far sides that are no servers or go down. Its
module is driven alone."""
import os
import socket
import subprocess
import sys
import threading

import pytest

import preload
from conftest import TOP, cluster, eventually, make_database
from far_database import HANDLER, INBOX, effects, far, sinks, statuses  # noqa: F401 (the fixtures far and sinks)

sys.path.insert(0, str(TOP / "test/sinks"))
from sink import DELIVERED, UNREACHABLE, OpenError, interpreter  # noqa: E402


@pytest.mark.parametrize("allowed, host, reason", [
    ("", "127.0.0.1", "address 127.0.0.1 is not allowed"),
    ("", "localhost", "is not allowed; see allowed_addresses, of the server or of the relay"),
    ("", "0177.0.0.1", "address 127.0.0.1 is not allowed"),
    ("127.0.0.2", "127.0.0.1", "address 127.0.0.1 is not allowed"),
    ("127.0.0.1", "/tmp", "Unix sockets in /tmp are not allowed"),
])
def test_addresses_are_filtered(far, sinks, allowed, host, reason):
    outcomes = sinks(far, allowed=allowed, host=host).deliver("a")
    assert statuses(outcomes) == {"a": UNREACHABLE} and reason in outcomes["a"].reason
    assert far.value("SELECT count(*) FROM public.retrysafe_inbox") == 0


def test_names_and_sockets_can_be_allowed(far, sinks):
    assert statuses(sinks(far, allowed="localhost", host="localhost").deliver("a")) == {"a": DELIVERED}
    folder = str(far.server.directory)
    assert statuses(sinks(far, allowed=folder, host=folder).deliver("b")) == {"b": DELIVERED}


def test_the_next_host_is_tried(far, sinks):
    sink = sinks(far, host="no-such-host.invalid, 127.0.0.2, 127.0.0.1", allowed="127.0.0.0/8")
    assert statuses(sink.deliver("a")) == {"a": DELIVERED}


def test_read_only_servers_are_passed_over(far, sinks):
    far.sql(f'ALTER DATABASE "{far.name}" SET default_transaction_read_only = on')
    outcomes = sinks(far).deliver("a")
    assert statuses(outcomes) == {"a": UNREACHABLE} and "read-only" in outcomes["a"].reason


def test_a_password_that_nobody_asks_for_is_no_password(far, sinks):
    outcomes = sinks(far, require_password="true", password="x").deliver("a")
    assert statuses(outcomes) == {"a": UNREACHABLE}
    assert "did not ask for the password" in outcomes["a"].reason or "authentication" in outcomes["a"].reason
    assert far.value("SELECT count(*) FROM public.retrysafe_inbox") == 0
    with pytest.raises(OpenError, match='option "password" is missing'):
        sinks(far, require_password="true")


def test_passwords(far, sinks):
    hba = far.server.directory / "data/pg_hba.conf"
    before = hba.read_text()
    far.sql("CREATE ROLE courier LOGIN PASSWORD 'right'")
    far.sql("GRANT INSERT ON public.retrysafe_inbox TO courier")
    try:
        hba.write_text("host all courier 127.0.0.1/32 scram-sha-256\n" + before)
        far.sql("SELECT pg_reload_conf()")
        eventually(lambda: far.value("SELECT auth_method FROM pg_hba_file_rules ORDER BY line_number LIMIT 1") ==
                   "scram-sha-256")
        sink = sinks(far, user="courier", require_password="true", password="right")
        assert statuses(sink.deliver("a")) == {"a": DELIVERED}
        outcomes = sinks(far, user="courier", require_password="true", password="wrong").deliver("b")
        assert statuses(outcomes) == {"b": UNREACHABLE}
        assert "password authentication failed" in outcomes["b"].reason and "wrong" not in outcomes["b"].reason
    finally:
        hba.write_text(before)
        far.sql("SELECT pg_reload_conf()")
        far.sql("DROP OWNED BY courier")
        far.sql("DROP ROLE courier")


def test_the_environment_gives_nothing_away(far, sinks, monkeypatch, tmp_path):
    """Neither service, nor password, nor files of the account that the server runs as."""
    (tmp_path / "service").write_text("[trap]\nhost=127.0.0.9\nsslmode=verify-full\noptions=-c no_such_setting=1\n")
    for name, value in {"PGSERVICE": "trap", "PGSERVICEFILE": str(tmp_path / "service"), "PGPASSWORD": "other",
                        "PGOPTIONS": "-c application_name=trap", "PGAPPNAME": "trap", "PGREQUIRESSL": "1",
                        "PGSSLMODE": "verify-full", "PGTARGETSESSIONATTRS": "standby"}.items():
        monkeypatch.setenv(name, value)
    sink = sinks(far)
    assert statuses(sink.deliver("a")) == {"a": DELIVERED}
    assert os.environ["PGSERVICE"] == "trap"
    monkeypatch.undo()  # for this test's own connections
    assert far.value("SELECT count(*) FROM pg_stat_activity WHERE datname = current_database()"
                     " AND application_name = 'retrysafe'") == 1


@pytest.mark.parametrize("options, reason", [
    ({"host": "a,,b"}, "empty host"),
    ({"host": None}, 'option "host" is missing'),
    ({"inbox_function": "f"}, 'needs option "function"'),
    ({"sslmode": "verify-ca"}, 'needs option "ca_file"'),
    ({"cert_file": "/x"}, "need each other"),
    ({"key_file": "/x"}, "need each other"),
    ({"cert_file": "/x", "key_file": "/x", "sslmode": "disable"}, "another sslmode"),
    ({"cert_file": "/x", "key_file": "/engine:x"}, "holds a colon"),
])
def test_open_refuses_what_can_never_work(far, sinks, options, reason):
    with pytest.raises(OpenError, match=reason):
        sinks(far, **options)


def test_values_cannot_carry_options(far, sinks):
    outcomes = sinks(far, dbname=f"dbname={far.name} application_name=trap").deliver("a")
    assert statuses(outcomes) == {"a": UNREACHABLE} and "does not exist" in outcomes["a"].reason


class Listener:
    """A server that is none: sends `greeting` and then nothing."""

    def __init__(self, greeting=b"", accept=True):
        self.socket = socket.create_server(("127.0.0.1", 0))
        self.port = self.socket.getsockname()[1]
        self.greeting, self.connections = greeting, []
        self.thread = threading.Thread(target=self._serve, daemon=True)
        if accept:
            self.thread.start()

    def _serve(self):
        try:
            while True:
                connection, _ = self.socket.accept()
                connection.sendall(self.greeting)
                self.connections.append(connection)
        except OSError:
            pass

    def close(self):
        self.socket.close()
        for connection in self.connections:
            connection.close()


@pytest.mark.parametrize("greeting, reason", [
    (b"", "longer than connect_timeout"),
    (b"HTTP/1.1 400 Bad Request\r\n\r\n", ""),
    (b"E\x00\x00\x00\x20SFATAL\x00Mb\x00\xff\xfe\x01d\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00", ""),
    (b"N" + b"\xff" * 4000, ""),
    (b"R\xff\xff\xff\xff", ""),
])
def test_something_that_is_no_server(far, sinks, greeting, reason):
    listener = Listener(greeting)
    try:
        sink = sinks(far, port=listener.port, connect_timeout=500)
        outcomes = sink.deliver("a")
        assert statuses(outcomes) == {"a": UNREACHABLE} and outcomes["a"].reason
        assert reason in outcomes["a"].reason
    finally:
        listener.close()


@pytest.mark.skipif("RETRYSAFE_COVERAGE" in os.environ, reason="built to count lines, which is done where others do nothing more")
def test_the_end_of_a_process_that_connects(tmp_path):
    """As after a FATAL error of the server. Nothing is taken down that the thread may be in, OpenSSL least of all."""
    library = preload.build("alone_at_its_end", tmp_path)
    listener = Listener(b"S")
    program = f"""
import ctypes, os, select, sys
sys.path[:0] = {sys.path!r}
from sink import Sink, event
kept = event(1)
usual = ctypes.c_int.in_dll(ctypes.CDLL({str(library)!r}), "usual_threads")
usual.value = len(os.listdir("/proc/self/task"))
sink = Sink("postgres", dict(host="127.0.0.1", port={listener.port}, dbname="d", user="u", require_password="false"))
assert sink.submit(kept)
sink.collect()
while sys.stdin not in select.select([sys.stdin, sink.module.wait_fd(sink.handle)], [], [])[0]:
    sink.collect()
ctypes.CDLL(None).exit(3)
"""
    with subprocess.Popen([sys.executable, "-c", program], env=interpreter(library), stdin=subprocess.PIPE) as process:
        try:
            eventually(lambda: listener.connections)
            assert listener.connections[0].recv(8) + listener.connections[0].recv(1) == b"\0\0\0\x08\x04\xd2\x16\x2f\x16"
            process.stdin.close()
            assert process.wait(20) == 3
        finally:
            process.kill()
            listener.close()


def test_a_server_that_goes_down_and_comes_back(server, sinks):
    """Nothing is lost and nothing has two effects, with a crash in the middle."""
    with cluster() as second:
        far = make_database(second)
        far.sql(INBOX)
        far.sql(HANDLER)
        sink = sinks(far, function="public.handle")
        waiting = [f"e{i}" for i in range(600)]
        rounds = unreachable = 0
        while waiting:
            for key in waiting[:50]:
                assert sink.submit(key)
            sink.flush()
            if rounds in (3, 6):
                second.pg_ctl("stop", "-m", "immediate")
            outcomes = sink.wait()
            if rounds in (3, 6):
                lost = sink.deliver("while-down")
                assert statuses(lost) == {"while-down": UNREACHABLE}
                second.pg_ctl("start")
            assert set(statuses(outcomes).values()) <= {DELIVERED, UNREACHABLE}
            unreachable += sum(o.status == UNREACHABLE for o in outcomes.values())
            waiting = [key for key in waiting if key not in outcomes or outcomes[key].status != DELIVERED]
            rounds += 1
        assert effects(far) == [f"e{i}" for i in range(600)]
        assert rounds > 12 or unreachable == 0
