"""The destination kind "postgres" with a worker: what arrives, what is told, what an outage or a crash costs."""
import contextlib
import json
import os
import signal

import pytest

import outages
from conftest import cluster, eventually, in_spite_of_crashes, make_database, run
from far_database import HANDLER, INBOX, create, effects
from names import cluster_with_names
from receiver import Receiver
from strikes import children_of


@pytest.fixture
def second(server):
    """Another database of the same server, as the far side."""
    database = make_database(server)
    database.sql(INBOX)
    database.sql(HANDLER)
    yield database
    admin = server.connect()
    run(admin, f'DROP DATABASE "{database.name}" WITH (FORCE)')


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
