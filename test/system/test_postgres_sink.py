"""The destination kind "postgres", its module driven alone: the far side is another database."""
import contextlib
import json
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import uuid

import pytest

import outages
import preload
from conftest import TOP, cluster, eventually, in_spite_of_crashes, make_database, run
from names import cluster_with_names
from receiver import Receiver
from strikes import children_of

sys.path.insert(0, str(TOP / "test/sinks"))
import sink as interface  # noqa: E402
from sink import DELIVERED, FAILED_FINAL, FAILED_RETRY, UNREACHABLE, OpenError, interpreter  # noqa: E402


def event_id(key):
    """The same key is the same event."""
    return str(uuid.uuid5(uuid.NAMESPACE_URL, key))


class Sink(interface.Sink):
    """Events and their outcomes by event key."""

    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.longest = 0.0  # seconds that one call took
        self._numbers = 0
        self._waiting = {}

    def _timed(self, function, *arguments):
        begin = time.monotonic()
        result = function(*arguments)
        self.longest = max(self.longest, time.monotonic() - begin)
        return result

    def submit(self, key, payload="{}", attempt=1, **parts):
        self._numbers += 1
        event = interface.event(self._numbers, id=event_id(key), event_key=key, payload=payload, **parts)
        event.attempt = attempt
        self._waiting[self._numbers] = (key, event)
        if self._timed(super().submit, event):
            return True
        del self._waiting[self._numbers]
        return False

    def flush(self):
        self._timed(self.module.flush, self.handle)

    def collect(self):
        outcomes, timeout = self._timed(super().collect)
        return {self._waiting.pop(outcome.tag)[0]: outcome for outcome in outcomes}, timeout

    def wait(self, within=20):
        """Works until every event has its outcome."""
        result = {}
        deadline = time.monotonic() + within
        while self._waiting:
            found, timeout = self.collect()
            result.update(found)
            if self._waiting and not found:
                left = deadline - time.monotonic()
                assert left > 0, f"no outcome for {[key for key, _ in self._waiting.values()]}"
                poll = select.poll()
                poll.register(self.module.wait_fd(self.handle), select.POLLIN)
                poll.poll(1000 * left if timeout < 0 else min(1000 * left, timeout))
        return result

    def deliver(self, *keys):
        """One batch."""
        for key in keys:
            assert self.submit(key)
        self.flush()
        return self.wait()


INBOX = """CREATE TABLE public.retrysafe_inbox (
  event_id uuid PRIMARY KEY, event_type text NOT NULL, source text, event_key text, scope text, ordering_key text,
  payload jsonb, headers jsonb, created_at timestamptz, received_at timestamptz NOT NULL DEFAULT clock_timestamp(),
  serial bigint GENERATED ALWAYS AS IDENTITY)"""

HANDLER = """CREATE TABLE public.effects (serial bigint GENERATED ALWAYS AS IDENTITY, key text, event jsonb);
CREATE FUNCTION public.handle(event jsonb) RETURNS void LANGUAGE plpgsql AS $$
BEGIN
  INSERT INTO public.effects (key, event) VALUES (event->>'key', event);
  IF event->'payload' ? 'sqlstate' THEN
    RAISE EXCEPTION 'handler says no' USING ERRCODE = event->'payload'->>'sqlstate', DETAIL = 'secret detail';
  END IF;
END $$"""


@pytest.fixture
def far(db):
    """The far side: a plain database with an inbox and a handler."""
    db.sql(INBOX)
    db.sql(HANDLER)
    return db


@pytest.fixture
def sinks():
    opened = []

    def open_sink(database, allowed="127.0.0.1, ::1, localhost", **options):
        given = {"host": "127.0.0.1", "port": database.server.port, "dbname": database.name, "user": "postgres",
                 "require_password": "false", **options}
        opened.append(Sink("postgres", {name: value for name, value in given.items() if value is not None}, allowed))
        return opened[-1]

    yield open_sink
    for sink in opened:
        sink.close()
        assert sink.log_lines == []
        assert sink.longest < 0.5, "a call blocked"


def effects(database):
    return [row[0] for row in database.sql("SELECT key FROM public.effects ORDER BY serial")]


def statuses(outcomes):
    print({key: outcome.reason for key, outcome in outcomes.items() if outcome.reason})  # shown when the test fails
    return {key: outcome.status for key, outcome in outcomes.items()}


def test_fills_the_inbox(far, sinks):
    sink = sinks(far)
    payload = {"n": 1.5, "text": "é \U0001f600 \\ \" \u2028"}
    assert sink.submit("e1", json.dumps(payload), ordering_key="order 1", type="order.paid", scope="s",
                       headers={"traceparent": "00-1", "quote\"": "a\nb"})
    assert sink.submit("e2", None)
    sink.flush()
    assert statuses(sink.wait()) == {"e1": DELIVERED, "e2": DELIVERED}
    rows = far.sql("SELECT event_id::text, event_type, source, event_key, scope, ordering_key, payload, headers,"
                   " created_at = '2026-01-02 03:04:05.678901+00' FROM public.retrysafe_inbox ORDER BY serial")
    assert rows == [(event_id("e1"), "order.paid", "retrysafe/shop/", "e1", "s", "order 1", payload,
                     {"traceparent": "00-1", "quote\"": "a\nb"}, True),
                    (event_id("e2"), "order.created", "retrysafe/shop/", "e2", "", None, None, {}, True)]


def test_function_gets_the_event_and_only_new_ones(far, sinks):
    sink = sinks(far, function="public.handle")
    assert sink.submit("e1", '{"a": [1]}', ordering_key="k", headers={"h": "v"}, attempt=3)
    sink.flush()
    assert statuses(sink.wait()) == {"e1": DELIVERED}
    assert far.value("SELECT event FROM public.effects") == {
        "id": event_id("e1"), "type": "order.created", "key": "e1", "scope": "", "ordering_key": "k", "payload": {"a": [1]},
        "headers": {"h": "v"}, "created_at": "2026-01-02T03:04:05.678901Z", "attempt": 3}
    assert statuses(sink.deliver("e1", "e2", "e2x")) == {"e1": DELIVERED, "e2": DELIVERED, "e2x": DELIVERED}
    assert effects(far) == ["e1", "e2", "e2x"]
    assert far.value("SELECT count(*) FROM public.retrysafe_inbox") == 3


def test_an_event_twice_in_one_batch_has_one_effect(far, sinks):
    sink = sinks(far, function="public.handle")
    sink.submit("e1"), sink.submit("e1")
    sink.flush()
    assert statuses(sink.wait()) == {"e1": DELIVERED}
    assert effects(far) == ["e1"]


def test_a_batch_is_one_transaction_in_order(far, sinks):
    sink = sinks(far, function="public.handle")
    keys = [f"e{i}" for i in range(300)]
    assert set(statuses(sink.deliver(*keys)).values()) == {DELIVERED}
    assert effects(far) == keys
    assert far.value("SELECT count(DISTINCT xmin::text) FROM public.effects") == 1


def test_the_function_sees_the_inbox_and_the_events_before(far, sinks):
    far.sql("""CREATE FUNCTION public.look(event jsonb) RETURNS void LANGUAGE plpgsql AS $$
      BEGIN
        INSERT INTO public.effects (key) SELECT count(*)::text FROM public.retrysafe_inbox;
      END $$""")
    sinks(far, function="public.look").deliver("a", "b", "c")
    assert effects(far) == ["1", "2", "3"]


def test_what_the_function_returns_does_not_matter(far, sinks):
    far.sql("""CREATE FUNCTION public.many(event jsonb) RETURNS SETOF text LANGUAGE plpgsql AS $$
      BEGIN
        INSERT INTO public.effects (key) VALUES (event->>'key');
        RETURN QUERY SELECT 'x' FROM generate_series(1, 100);
      END $$""")
    assert statuses(sinks(far, function="public.many(jsonb)").deliver("a", "b")) == {"a": DELIVERED, "b": DELIVERED}
    assert effects(far) == ["a", "b"]


def test_poisoned_events_fail_alone(far, sinks):
    sink = sinks(far, function="public.handle")
    bad = {"e3": "P0001", "e7": "22023", "e8": "23503"}
    for i in range(12):
        key = f"e{i}"
        assert sink.submit(key, json.dumps({"sqlstate": bad[key]} if key in bad else {}))
    sink.flush()
    outcomes = sink.wait()
    assert statuses(outcomes) == {f"e{i}": DELIVERED for i in range(12)} | {
        "e3": FAILED_RETRY, "e7": FAILED_FINAL, "e8": FAILED_RETRY}
    assert outcomes["e3"].reason == "P0001: handler says no"
    assert effects(far) == [f"e{i}" for i in range(12) if f"e{i}" not in bad]
    assert far.value("SELECT count(*) FROM public.retrysafe_inbox") == 9
    assert statuses(sink.deliver("e3")) == {"e3": DELIVERED}, "the failed try left no trace"


def test_nothing_of_a_key_goes_out_behind_a_failure(far, sinks):
    sink = sinks(far, function="public.handle")
    for number, key in enumerate(["a", "b", "a", "b", "a"]):
        assert sink.submit(f"e{number}", '{"sqlstate": "P0001"}' if number == 2 else "{}", ordering_key=key)
    sink.flush()
    assert statuses(sink.wait()) == {"e0": DELIVERED, "e1": DELIVERED, "e2": FAILED_RETRY, "e3": DELIVERED,
                                     "e4": FAILED_RETRY}
    assert effects(far) == ["e0", "e1", "e3"]


def test_deferred_constraints_fail_the_event_that_broke_them(far, sinks):
    far.sql("""CREATE TABLE public.parent (id int PRIMARY KEY);
      CREATE TABLE public.child (id int REFERENCES public.parent DEFERRABLE INITIALLY DEFERRED);
      CREATE FUNCTION public.adopt(event jsonb) RETURNS void LANGUAGE sql AS
        $$ INSERT INTO public.child SELECT (event->'payload'->>'id')::int $$;
      INSERT INTO public.parent VALUES (1)""")
    sink = sinks(far, function="public.adopt")
    for i in range(6):
        assert sink.submit(f"e{i}", json.dumps({"id": 2 if i == 4 else 1}))
    sink.flush()
    outcomes = sink.wait()
    assert statuses(outcomes) == {f"e{i}": FAILED_RETRY if i == 4 else DELIVERED for i in range(6)}
    assert outcomes["e4"].reason.startswith("23503: ")
    assert far.value("SELECT count(*) FROM public.child") == 5


def test_a_handler_that_takes_too_long_is_a_failing_event(far, sinks):
    far.sql("""CREATE FUNCTION public.slow(event jsonb) RETURNS void LANGUAGE plpgsql AS $$
      BEGIN
        PERFORM pg_sleep((event->'payload'->>'seconds')::float8);
        INSERT INTO public.effects (key) VALUES (event->>'key');
      END $$""")
    sink = sinks(far, function="public.slow", statement_timeout=300)
    for key, seconds in (("a", 0), ("b", 30), ("c", 0)):
        assert sink.submit(key, json.dumps({"seconds": seconds}))
    sink.flush()
    outcomes = sink.wait()
    assert statuses(outcomes) == {"a": DELIVERED, "b": FAILED_RETRY, "c": DELIVERED}
    assert outcomes["b"].reason.startswith("57014: ")
    assert effects(far) == ["a", "c"]


def test_a_conflict_with_another_transaction_costs_no_attempt(far, sinks):
    """A deadlock between the sink and a client: the batch is sent again."""
    far.sql("""CREATE TABLE public.account (id text PRIMARY KEY, n int); INSERT INTO public.account VALUES ('x', 0), ('y', 0);
      CREATE FUNCTION public.add(event jsonb) RETURNS void LANGUAGE plpgsql AS $$
      BEGIN
        UPDATE public.account SET n = n + 1 WHERE id = event->>'key';
      END $$""")
    sink = sinks(far, function="public.add")
    client = far.connect(autocommit=False)
    run(client, "SET deadlock_timeout = '60s'")  # the other one notices first
    run(client, "UPDATE public.account SET n = n + 1 WHERE id = 'y'")
    assert sink.submit("x") and sink.submit("y")
    sink.flush()

    def waits():
        sink.collect()
        return far.value("SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND"
                         " application_name = 'retrysafe' AND wait_event_type = 'Lock'") == 1

    eventually(waits)
    thread = threading.Thread(target=lambda: (run(client, "UPDATE public.account SET n = n + 1 WHERE id = 'x'"),
                                              client.commit()))
    thread.start()
    outcomes = sink.wait()
    thread.join()
    assert statuses(outcomes) == {"x": DELIVERED, "y": DELIVERED}
    assert far.sql("SELECT id, n FROM public.account ORDER BY id") == [("x", 2), ("y", 2)]


def test_a_minimal_inbox_is_enough(db, sinks):
    db.sql("CREATE TABLE public.seen (event_id text PRIMARY KEY, payload int, created_at date)")
    sink = sinks(db, inbox_table="public.seen")
    assert statuses(sink.deliver("a", "b", "a")) == {"a": DELIVERED, "b": DELIVERED}
    assert db.sql("SELECT event_id, payload, created_at FROM public.seen ORDER BY event_id") == sorted(
        [(event_id("a"), None, None), (event_id("b"), None, None)])


def test_an_inbox_for_several_consumers(far, sinks):
    far.sql('CREATE TABLE public."In Box" (consumer text, event_id uuid, PRIMARY KEY (consumer, event_id))')
    for consumer in ("one", "two"):
        sinks(far, inbox_table='public."In Box"', function="public.handle", consumer=consumer).deliver("a")
    sinks(far, inbox_table='public."In Box"', function="public.handle").deliver("a")
    assert effects(far) == ["a"] * 3
    assert far.sql('SELECT consumer FROM public."In Box" ORDER BY 1') == [("one",), ("test",), ("two",)]


def test_an_inbox_function(far, sinks):
    far.sql("""CREATE TABLE public.accepted (consumer text, event_id text, PRIMARY KEY (consumer, event_id));
      CREATE FUNCTION public.accept(consumer text, event_id text) RETURNS boolean LANGUAGE plpgsql AS $$
      BEGIN
        INSERT INTO public.accepted VALUES (consumer, event_id) ON CONFLICT DO NOTHING;
        RETURN FOUND;
      END $$""")
    sink = sinks(far, inbox_function="public.accept", function="public.handle")
    sink.deliver("a", "b")
    sink.deliver("b", "c")
    assert effects(far) == ["a", "b", "c"]
    assert far.value("SELECT count(*) FROM public.accepted WHERE consumer = 'test'") == 3
    assert far.value("SELECT count(*) FROM public.retrysafe_inbox") == 0


@pytest.mark.parametrize("change, options, reason", [
    ("DROP TABLE public.retrysafe_inbox", {}, "table public.retrysafe_inbox does not exist there; at least: CREATE TABLE"),
    ("ALTER TABLE public.retrysafe_inbox DROP CONSTRAINT retrysafe_inbox_pkey", {}, "has no unique index on event_id"),
    ("ALTER TABLE public.retrysafe_inbox ALTER event_id TYPE int USING 0", {}, "has no column event_id"),
    ("SELECT", {"function": "public.handel"}, "function public.handel(jsonb) does not exist there"),
    ("SELECT", {"function": "public.handle", "inbox_function": "public.handle"}, "returning boolean does not exist there"),
    ("SELECT", {"dbname": "no such database"}, "does not exist"),
    ("SELECT", {"port": 1}, "refused"),
    ("SELECT", {"host": "no-such-host.invalid"}, "could not resolve host"),
])
def test_a_destination_that_cannot_work_says_why(far, sinks, change, options, reason):
    far.sql(change)
    outcomes = sinks(far, **options).deliver("a", "b")
    assert statuses(outcomes) == {"a": UNREACHABLE, "b": UNREACHABLE}
    assert reason in outcomes["a"].reason


def test_what_breaks_while_connected_counts_against_no_event(far, sinks):
    sink = sinks(far, function="public.handle")
    assert statuses(sink.deliver("a")) == {"a": DELIVERED}
    far.sql("ALTER TABLE public.retrysafe_inbox RENAME TO elsewhere")
    outcomes = sink.deliver("b", "c")
    assert statuses(outcomes) == {"b": UNREACHABLE, "c": UNREACHABLE}
    assert "does not exist there" in outcomes["b"].reason
    far.sql("ALTER TABLE public.elsewhere RENAME TO retrysafe_inbox")
    assert statuses(sink.deliver("b", "c")) == {"b": DELIVERED, "c": DELIVERED}
    assert effects(far) == ["a", "b", "c"]


def test_a_handler_that_is_wrong_for_one_event_fails_that_event(far, sinks):
    """The same SQLSTATE as a missing table, but the table is there."""
    sink = sinks(far, function="public.handle")
    sink.submit("a"), sink.submit("b", '{"sqlstate": "42P01"}'), sink.submit("c")
    sink.flush()
    assert statuses(sink.wait()) == {"a": DELIVERED, "b": FAILED_RETRY, "c": DELIVERED}
    assert effects(far) == ["a", "c"]


def test_roles_need_few_rights(far, sinks):
    far.sql("CREATE ROLE courier LOGIN")
    try:
        outcomes = sinks(far, user="courier").deliver("a")
        assert statuses(outcomes) == {"a": UNREACHABLE} and "may insert into" in outcomes["a"].reason
        far.sql("GRANT INSERT ON public.retrysafe_inbox TO courier")
        assert statuses(sinks(far, user="courier").deliver("a")) == {"a": DELIVERED}
    finally:
        far.sql("DROP OWNED BY courier")
        far.sql("DROP ROLE courier")


def test_durable_means_durable(far, sinks):
    far.sql(f'ALTER DATABASE "{far.name}" SET synchronous_commit = off')
    far.sql("""CREATE FUNCTION public.show(event jsonb) RETURNS void LANGUAGE sql AS
      $$ INSERT INTO public.effects (key) VALUES (current_setting('synchronous_commit')) $$""")
    sinks(far, function="public.show").deliver("a")
    assert effects(far) == ["on"]


def test_a_connection_that_died_while_idle_is_made_anew(far, sinks):
    sink = sinks(far, function="public.handle")
    for i in range(3):
        assert statuses(sink.deliver(f"e{i}")) == {f"e{i}": DELIVERED}
        assert far.value("SELECT count(pg_terminate_backend(pid, 5000)) FROM pg_stat_activity"
                         " WHERE datname = current_database() AND application_name = 'retrysafe'") == 1
    assert statuses(sink.deliver("last")) == {"last": DELIVERED}


def test_a_backend_that_dies_in_the_middle(far, sinks):
    far.sql("""CREATE FUNCTION public.die(event jsonb) RETURNS void LANGUAGE plpgsql AS $$
      BEGIN
        INSERT INTO public.effects (key) VALUES (event->>'key');
        IF event->>'key' = 'b' THEN PERFORM pg_terminate_backend(pg_backend_pid()); END IF;
      END $$""")
    sink = sinks(far, function="public.die")
    assert statuses(sink.deliver("a", "b", "c")) == dict.fromkeys("abc", UNREACHABLE)
    assert effects(far) == []
    assert statuses(sink.deliver("a", "c")) == dict.fromkeys("ac", DELIVERED)
    assert effects(far) == ["a", "c"]


# --- connections -----------------------------------------------------------------------------------------------------


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


# --- certificates of ours --------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def guarded():
    """A server that demands a certificate of its authority; its role courier needs nothing else, `asked` a password too."""
    with cluster() as own:
        folder = own.directory / "tls"
        folder.mkdir(mode=0o755)

        def openssl(*words):
            subprocess.run(["openssl", *words], cwd=folder, check=True, capture_output=True)

        key = "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"
        openssl("req", "-x509", *key, "-keyout", "ca.key", "-out", "ca.pem", "-days", "2", "-subj", "/CN=ca")
        openssl("req", "-x509", *key, "-keyout", "nobody.key", "-out", "nobody.pem", "-days", "2", "-subj", "/CN=courier")
        (folder / "extension").write_text("subjectAltName=IP:127.0.0.1")
        for name in "server", "courier":
            openssl("req", *key, "-keyout", f"{name}.key", "-out", f"{name}.csr", "-subj", f"/CN={name}")
            openssl("x509", "-req", "-in", f"{name}.csr", "-CA", "ca.pem", "-CAkey", "ca.key", "-CAcreateserial", "-days", "2",
                    "-out", f"{name}.pem", "-extfile", "extension")
        openssl("pkey", "-in", "courier.key", "-aes256", "-passout", "pass:hunter2", "-out", "locked.key")
        for path in folder.glob("*.key"):
            path.chmod(0o600)
            shutil.chown(path, (own.directory / "data").owner())
        far = make_database(own)
        far.sql(INBOX)
        for role in "courier", "asked":
            far.sql(f"CREATE ROLE {role} LOGIN PASSWORD 'right'")
            far.sql(f"GRANT INSERT ON public.retrysafe_inbox TO {role}")
        hba = own.directory / "data/pg_hba.conf"
        hba.write_text("hostssl all courier 127.0.0.1/32 cert\n"
                       "hostssl all asked 127.0.0.1/32 scram-sha-256 clientcert=verify-ca\n"
                       "host all courier,asked 127.0.0.1/32 reject\n" + hba.read_text())
        for setting, name in ("ssl_ca_file", "ca.pem"), ("ssl_cert_file", "server.pem"), ("ssl_key_file", "server.key"):
            own.set(setting, folder / name)
        own.set("ssl", "on")
        eventually(lambda: far.value("SHOW ssl") == "on")
        yield far, folder


def certificate(folder, name="courier", key=None):
    return {"sslmode": "verify-full", "ca_file": folder / "ca.pem", "cert_file": folder / f"{name}.pem",
            "key_file": folder / f"{key or name}.key"}


@pytest.mark.parametrize("change", [{}, {"sslmode": "prefer", "ca_file": None}, {"key": "locked", "key_password": "hunter2"}])
def test_a_certificate_is_shown(guarded, sinks, change):
    far, folder = guarded
    options = certificate(folder, key=change.pop("key", None)) | change
    assert statuses(sinks(far, user="courier", **options).deliver("a")) == {"a": DELIVERED}


@pytest.mark.parametrize("change, reason", [
    ({"cert_file": None, "key_file": None}, "certificate"),
    ({"name": "nobody"}, ""),
    ({"key": "nobody"}, "mismatch"),
    ({"key": "locked"}, "locked.key"),
    ({"key": "locked", "key_password": "hunter3"}, "locked.key"),
])
def test_a_certificate_that_is_not_good_enough(guarded, sinks, change, reason):
    far, folder = guarded
    options = certificate(folder, **{part: change.pop(part) for part in ("name", "key") if part in change}) | change
    outcomes = sinks(far, user="courier", **options).deliver("a")
    assert statuses(outcomes) == {"a": UNREACHABLE}
    assert reason in outcomes["a"].reason and "hunter" not in outcomes["a"].reason


def test_a_certificate_does_not_replace_the_password(guarded, sinks):
    far, folder = guarded
    asked = {"require_password": "true", "password": "right", **certificate(folder)}
    assert statuses(sinks(far, user="asked", **asked).deliver("b")) == {"b": DELIVERED}
    outcomes = sinks(far, user="courier", **asked).deliver("c")
    assert statuses(outcomes) == {"c": UNREACHABLE}
    with pytest.raises(OpenError, match='option "password" is missing'):
        sinks(far, user="courier", require_password="true", **certificate(folder))


@pytest.mark.parametrize("option", ["ca_file", "cert_file", "key_file"])
def test_a_file_that_has_gone_is_not_passed_over(guarded, sinks, tmp_path, option):
    """libpq would not verify the server, or show no certificate."""
    far, folder = guarded
    options = certificate(folder) | {"sslmode": "require"}
    moved = shutil.copy2(options[option], tmp_path / option)
    sink = sinks(far, user="courier", **options | {option: moved})
    assert statuses(sink.deliver("d")) == {"d": DELIVERED}
    (tmp_path / option).unlink()
    end_connections(far, "courier")
    outcomes = sink.deliver("e")
    assert statuses(outcomes) == {"e": UNREACHABLE}
    assert outcomes["e"].reason == f'the file of option "{option}" cannot be read: No such file or directory'


def end_connections(database, role):
    assert database.value("SELECT count(pg_terminate_backend(pid, 5000)) FROM pg_stat_activity WHERE usename = %s", role) > 0


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


# --- a server that goes down -----------------------------------------------------------------------------------------


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


# --- with the worker -------------------------------------------------------------------------------------------------


@pytest.fixture
def second(server):
    """Another database of the same server, as the far side."""
    database = make_database(server)
    database.sql(INBOX)
    database.sql(HANDLER)
    yield database
    admin = server.connect()
    run(admin, f'DROP DATABASE "{database.name}" WITH (FORCE)')


def create(db, far, **options):
    options = {"host": "127.0.0.1", "port": far.server.port, "dbname": far.name, "user": "postgres", **options}
    db.sql("SELECT outbox_create_destination('far', 'postgres', %s, backoff => '50 ms', backoff_max => '200 ms')",
           json.dumps(options))


def test_the_worker_delivers(db, second):
    create(db, second, function="public.handle")
    db.sql("SELECT outbox_emit(NULL, 'e' || i, 'order.paid', jsonb_build_object('i', i), 'k' || i % 3, '{\"h\": \"v\"}')"
           " FROM generate_series(1, 100) AS i ORDER BY i")
    eventually(lambda: len(effects(second)) == 100)
    assert second.sql("SELECT event_id::text FROM public.retrysafe_inbox ORDER BY serial") == db.sql(
        "SELECT event_id::text FROM outbox_events ORDER BY id")
    for key in ("k0", "k1", "k2"):
        positions = [row[0] for row in second.sql(
            "SELECT (payload->>'i')::int FROM public.retrysafe_inbox WHERE ordering_key = %s ORDER BY serial", key)]
        assert positions == sorted(positions)


def test_the_worker_shows_a_certificate(server, db, guarded):
    far, folder = guarded
    server.set("retrysafe.allowed_secret_directory", folder)
    try:
        create(db, far, user="courier", sslmode="verify-full", ca_file="ca.pem", cert_file="courier.pem",
               key_file="locked.key", key_password="hunter2")
        db.sql("SELECT outbox_emit(NULL, 'e1', 't', '{}')")
        eventually(lambda: far.value("SELECT count(*) FROM public.retrysafe_inbox WHERE event_key = 'e1'") == 1)
        assert "hunter2" not in str(db.sql("SELECT * FROM outbox_status"))
    finally:
        server.set("retrysafe.allowed_secret_directory", None)


def test_another_installation_can_be_the_inbox(db, second):
    create(db, second, function="public.handle", inbox_function="retrysafe.inbox_accept", consumer="shop")
    db.sql("SELECT outbox_emit(NULL, 'e1', 't', '{}')")
    eventually(lambda: effects(second) == ["e1"])
    assert second.sql("SELECT consumer, event_id FROM retrysafe.inbox_messages") == [
        ("shop", db.value("SELECT event_id::text FROM outbox_events"))]


def test_the_status_tells_what_is_missing(db, second):
    second.sql("DROP TABLE public.retrysafe_inbox")
    create(db, second)
    db.sql("SELECT outbox_emit(NULL, 'e1', 't', '{}')")
    eventually(lambda: "CREATE TABLE public.retrysafe_inbox (event_id uuid PRIMARY KEY)" in
               (db.value("SELECT last_error FROM outbox_status") or ""))
    second.sql(INBOX)
    eventually(lambda: second.value("SELECT count(*) FROM public.retrysafe_inbox") == 1)
    assert db.value("SELECT count(*) FROM outbox_dead_letters") == 0


def test_poison_goes_to_the_dead_letters_and_holds_up_its_key_only(db, second):
    db.sql("SELECT outbox_create_destination('far', 'postgres', %s, max_attempts => 2, backoff => '10 ms',"
           " backoff_max => '10 ms')",
           json.dumps({"host": "127.0.0.1", "port": second.server.port, "dbname": second.name, "user": "postgres",
                       "function": "public.handle"}))
    db.sql("SELECT outbox_emit(NULL, 'e' || i, 't', CASE WHEN i = 3 THEN '{\"sqlstate\": \"P0001\"}'::jsonb ELSE '{}' END,"
           " 'k' || i % 2) FROM generate_series(1, 10) AS i ORDER BY i")
    eventually(lambda: db.value("SELECT count(*) FROM outbox_dead_letters") == 1)
    eventually(lambda: len(effects(second)) == 9)
    assert db.value("SELECT reason FROM outbox_dead_letters") == "P0001: handler says no"


class FarServer:
    """A server with an inbox, which has the name broken.test."""

    def __init__(self, server, names):
        self.server, self.names = server, names
        self.database = make_database(server)
        self.database.sql(INBOX)
        self.come_back()

    def come_back(self):
        self.names.say("broken.test")

    def arrivals(self):
        return self.database.sql("SELECT event_id::text, event_key FROM public.retrysafe_inbox ORDER BY serial")

    def disconnect(self):
        connection = self.server.connect()
        run(connection, "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE application_name = 'retrysafe'")
        connection.close()


class Refuses(FarServer):
    def begin(self):
        self.server.pg_ctl("stop", "-m", "immediate")

    def come_back(self):
        super().come_back()
        if not (self.server.directory / "data/postmaster.pid").exists():
            self.server.pg_ctl("start")


class Hangs(FarServer):
    stopped = ()

    def begin(self):
        os.kill(self.server.pid, signal.SIGSTOP)  # first, so that it starts no more of them
        self.stopped = [self.server.pid, *children_of(self.server.pid)]
        for pid in self.stopped[1:]:
            with contextlib.suppress(ProcessLookupError):  # an autovacuum worker that was done
                os.kill(pid, signal.SIGSTOP)

    def come_back(self):
        super().come_back()
        for pid in self.stopped:
            with contextlib.suppress(ProcessLookupError):  # it went on, and ended, with its parent
                os.kill(pid, signal.SIGCONT)
        self.stopped = ()


class Resets(FarServer):
    def begin(self):
        self.database.sql("""
            CREATE FUNCTION public.reset() RETURNS trigger LANGUAGE plpgsql AS
              'BEGIN PERFORM pg_terminate_backend(pg_backend_pid()); RETURN NULL; END';
            CREATE TRIGGER reset AFTER INSERT ON public.retrysafe_inbox FOR EACH ROW EXECUTE FUNCTION public.reset()""")

    def come_back(self):
        super().come_back()
        self.database.sql("DROP FUNCTION IF EXISTS public.reset() CASCADE")


class LacksTheTable(FarServer):
    def begin(self):
        self.database.sql("ALTER TABLE public.retrysafe_inbox RENAME TO elsewhere")

    def come_back(self):
        super().come_back()
        self.database.sql("ALTER TABLE IF EXISTS public.elsewhere RENAME TO retrysafe_inbox")


class DoesNotResolve(FarServer):
    answer = "none"

    def begin(self):
        self.names.say("broken.test", self.answer)
        self.disconnect()


class ResolverHangs(DoesNotResolve):
    answer = "hang"


@pytest.fixture(scope="module")
def with_names():
    with cluster_with_names() as (server, names):
        yield server, names


@pytest.mark.slow
@pytest.mark.alone
@pytest.mark.parametrize("kind", [Refuses, Hangs, Resets, LacksTheTable, DoesNotResolve, ResolverHangs])
def test_case_23_an_outage_of_one_destination(with_names, kind):
    server, names = with_names
    db = make_database(server)
    with Receiver() as healthy, cluster() as second:
        far = kind(second, names)
        db.sql(f"SELECT outbox_create_destination('healthy', 'http', %s, {outages.BACKOFF})", json.dumps({"url": healthy.url}))
        db.sql(f"SELECT outbox_create_destination('broken', 'postgres', %s, {outages.BACKOFF})",
               json.dumps({"host": "broken.test", "port": second.port, "dbname": far.database.name, "user": "postgres",
                           "connect_timeout": "500ms", "statement_timeout": "500ms"}))
        try:
            seen = outages.bear(server, db, healthy, far.arrivals, far.begin, far.come_back)
        finally:
            far.come_back()
        assert not isinstance(far, DoesNotResolve) or "resolv" in seen.last_error
    db.close()
    admin = server.connect()
    run(admin, f"DROP DATABASE {db.name}")
    admin.close()


def test_effectively_once_when_the_worker_dies(db, second):
    """Killed after the far side committed, before it was recorded."""
    create(db, second, function="public.handle")
    db.server.set("retrysafe.fault_points", "worker.after_ack=kill")
    try:
        in_spite_of_crashes(lambda: db.sql("SELECT outbox_emit(NULL, 'e' || i, 't', '{}', 'k')"
                                           " FROM generate_series(1, 50) AS i ORDER BY i"))
        eventually(lambda: in_spite_of_crashes(lambda: len(effects(second)) == 50))
        seen = db.server.log().count("was terminated by signal 9")
        eventually(lambda: db.server.log().count("was terminated by signal 9") > seen, message="sent again")
    finally:
        eventually(lambda: in_spite_of_crashes(lambda: db.server.set("retrysafe.fault_points", None) is None))
    eventually(lambda: in_spite_of_crashes(lambda: db.value("SELECT delivered FROM outbox_status") == 50))
    assert effects(second) == [f"e{i}" for i in range(1, 51)]
