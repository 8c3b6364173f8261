"""Failover: standbys are promoted while requests come in, with WAL that went along with the old primary and without."""
import collections
import contextlib
import json
import threading
import time

import psycopg2
import pytest

import closing
from conftest import Database, cluster, eventually, load_factor, make_database, run
from copies import Copy, folder, standby_of  # noqa: F401 (fixture)
from receiver import Receiver


class Clients:
    """Each sends one request after the other, and each request again, with its key, until there is an answer; to `db`,
    which is another one after a failover."""

    def __init__(self, db, number=4):
        self.db, self.number = db, number
        self.answers = {}                        # order of each key
        self.sent = collections.Counter()
        self._stop = threading.Event()
        self._threads = [threading.Thread(target=self._work, args=(n,)) for n in range(number)]
        db.sql("CREATE TABLE public.orders (id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY, key text NOT NULL)")

    def __enter__(self):
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_):
        self._stop.set()
        for thread in self._threads:
            thread.join()

    def _work(self, n):
        session = Session(self)
        i = 0
        while not self._stop.is_set():
            i += 1
            self.answers[f"client{n}-{i:05}"] = session.answer(f"client{n}-{i:05}")
        session.close()

    def have(self, more):
        """Waits for so many more answers of each."""
        wanted = {n: self._answered(n) + more for n in range(self.number)}
        eventually(lambda: all(self._answered(n) >= wanted[n] for n in range(self.number)), timeout=60)

    def _answered(self, n):
        return sum(key.startswith(f"client{n}-") for key in list(self.answers))


class Session:
    def __init__(self, clients):
        self.clients, self.db, self.connection = clients, None, None

    def close(self):
        if self.connection:
            self.connection.close()
        self.connection = None

    def answer(self, key):
        until = time.monotonic() + 60
        while True:
            try:
                if self.db is not self.clients.db or not self.connection:
                    self.close()
                    self.db = self.clients.db
                    self.connection = self.db.server.connect(self.db.name, autocommit=False)
                return request(self.connection, key)[1]
            except psycopg2.Error:
                self.close()
                assert time.monotonic() < until, f"no answer to {key}"
                time.sleep(0.01)


def request(connection, key):
    """(outcome, order): one order and one event, of which the key alone decides the event key."""
    ((outcome, response),) = run(connection, "SELECT outcome, response FROM idem_begin(%s, 'h')", key)
    if outcome != "new":
        connection.rollback()
        return outcome, response
    ((order,),) = run(connection, "INSERT INTO public.orders (key) VALUES (%s) RETURNING id", key)
    run(connection, "SELECT outbox_emit(%s, %s, 'order.placed', to_jsonb(%s::text), ordering_key => %s)", key, f"{key}:placed",
        key, key.split("-")[0])
    run(connection, "SELECT idem_complete(%s, to_jsonb(%s::bigint))", key, order)
    connection.commit()
    return outcome, order


def repeat(db, keys):
    """Outcomes of requests that are sent again."""
    connection = db.connect(autocommit=False)
    outcomes = {key: request(connection, key) for key in keys}
    connection.close()
    return outcomes


def positions(db):
    """By event key."""
    return dict(db.sql("SELECT event_key, id FROM outbox_events"))


def published(receiver):
    """Event keys by id, of everything that arrived. An id that stood for two events would be dropped as a duplicate."""
    keys = collections.defaultdict(set)
    for r in receiver.requests:
        keys[r.id].add(r.header("ce-eventkey"))
    assert [k for k in keys.values() if len(k) > 1] == []
    return {i: k for i, (k,) in keys.items()}


def assert_in_order(receiver):
    """Of each client first copies came in the order in which it made its requests."""
    first = dict.fromkeys(r.header("ce-eventkey") for r in receiver.requests)
    for client in {key.split("-")[0] for key in first}:
        keys = [key for key in first if key.startswith(f"{client}-")]
        assert keys == sorted(keys)


def everything_is_sent(db):
    eventually(lambda: db.value("SELECT count(*) FROM outbox_events WHERE sent_at IS NULL") == 0, timeout=60)


def assert_complete(db, answers, receiver):
    """Each answer is kept, has one order and one event, and exactly these events were published."""
    orders = dict(db.sql("SELECT key, id FROM public.orders"))
    assert db.value("SELECT count(*) FROM public.orders") == len(orders)
    assert answers.items() <= orders.items()
    everything_is_sent(db)
    closing.balance(db, "hook", receiver.ids, committed=[f"{key}:placed" for key in orders])


@pytest.fixture
def receiver():
    with Receiver() as r:
        yield r


@contextlib.contextmanager
def primary_with(receiver, *settings):
    with cluster("retrysafe.poll_interval = 200ms", *settings) as server:
        db = make_database(server)
        db.sql("SELECT outbox_create_destination('hook', 'http', %s)", json.dumps({"url": receiver.url}))
        yield server, db


def synchronous_state(server):
    connection = server.connect()
    try:
        return run(connection, "SELECT sync_state FROM pg_stat_replication WHERE application_name = 'standby'")
    finally:
        connection.close()


def follow_synchronously(server):
    server.set("synchronous_standby_names", "standby")
    eventually(lambda: synchronous_state(server) == [("sync",)])


def promote(standby, db):
    standby.pg_ctl("promote")
    copy = Database(standby, db.name)
    eventually(lambda: not copy.value("SELECT pg_is_in_recovery()"))
    return copy


def stop_receiving(standby):
    connection = standby.connect()
    run(connection, "ALTER SYSTEM SET primary_conninfo = ''")
    run(connection, "SELECT pg_reload_conf()")
    eventually(lambda: run(connection, "SELECT count(*) FROM pg_stat_wal_receiver") == [(0,)])
    connection.close()


@pytest.mark.parametrize("publish_after", ["local_flush", "synchronous_standby"])
def test_promotion_under_load_with_a_synchronous_standby(folder, receiver, publish_after):
    """Nothing that was answered is lost, and nothing was published that is not there; work goes on within seconds."""
    with primary_with(receiver, f"retrysafe.publish_after = {publish_after}") as (primary, db):
        with Clients(db) as clients:
            standby = standby_of(primary, folder / "standby")
            try:
                follow_synchronously(primary)
                clients.have(int(40 * load_factor()))
                primary.pg_ctl("stop", "-m", "immediate")
                before = dict(clients.answers)
                copy = promote(standby, db)
                clients.db = copy
                began = time.monotonic()
                clients.have(1)
                arrived = len(receiver.requests)
                eventually(lambda: len(receiver.requests) > arrived, timeout=10 - (time.monotonic() - began))
                clients.have(int(20 * load_factor()))
                clients.__exit__()
                assert_complete(copy, before | clients.answers, receiver)
                assert {outcome for outcome, _ in repeat(copy, before).values()} == {"replay"}
                assert_in_order(receiver)
                published(receiver)
            finally:
                standby.stop()


def test_promotion_under_load_with_wal_that_is_lost(folder, receiver):
    """An asynchronous standby lags behind. What it has not received was answered and published, and is gone: those who send
    their requests again get new answers and the same event ids, and events that take the place of lost ones have others."""
    with primary_with(receiver) as (primary, db):
        with Clients(db) as clients:
            standby = standby_of(primary, folder / "standby")
            try:
                eventually(lambda: synchronous_state(primary) == [("async",)])
                clients.have(int(20 * load_factor()))
                stop_receiving(standby)
                clients.have(int(20 * load_factor()))
                answered = dict(clients.answers)
                eventually(lambda: {f"{key}:placed" for key in answered} <= set(published(receiver).values()))
                placed = positions(db)
                primary.pg_ctl("stop", "-m", "immediate")
                copy = promote(standby, db)
                clients.db = copy
                clients.have(int(20 * load_factor()))
                clients.__exit__()

                kept = positions(copy)
                lost = [key for key in answered if f"{key}:placed" not in kept]
                assert len(lost) >= 4 * int(20 * load_factor())
                again = {key for key, position in kept.items() if key not in placed and position in placed.values()}
                assert again, "positions are handed out again"
                everything_is_sent(copy)
                assert set(kept) <= set(published(receiver).values()), "a new event came under an id of its own"
                assert {outcome for outcome, _ in repeat(copy, lost).values()} == {"new"}
                # Once all of them are sent again there is one order of each, and exactly the ids that were published.
                outcomes = repeat(copy, clients.answers)
                assert_complete(copy, {key: order for key, (_, order) in outcomes.items()}, receiver)
                published(receiver)
            finally:
                standby.stop()


def test_recovery_to_a_point_in_time(folder, receiver):
    """Requests after that point were answered and published. The recovered server does not know of them, publishes nothing
    by itself, and after consent gives the same ids to the same events and no other to any event."""
    with primary_with(receiver, "wal_keep_size = 1GB") as (primary, db):
        db.sql("CREATE TABLE public.orders (id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY, key text NOT NULL)")
        backup = Copy(primary, folder / "backup")
        before = repeat(db, [f"before-{n}" for n in range(10)])
        everything_is_sent(db)
        admin = primary.connect()
        run(admin, "SELECT pg_create_restore_point('here')")
        after = repeat(db, [f"after-{n}" for n in range(10)])
        everything_is_sent(db)
        admin.close()
        primary.pg_ctl("stop", "-m", "fast")
        lost = published(receiver)
        backup.start("recovery.signal", restore_command=f"cp {primary.directory}/data/pg_wal/%f %p",
                     recovery_target_name="here", recovery_target_action="promote")
        try:
            copy = Database(backup, db.name)
            eventually(lambda: not copy.value("SELECT pg_is_in_recovery()"))
            assert positions(copy).keys() == {f"{key}:placed" for key in before}
            # As many requests as were lost take their positions.
            instead = repeat(copy, [f"instead-{n}" for n in range(10)])
            assert "backup" in copy.value("SELECT suspended_reason FROM outbox_status")
            assert published(receiver) == lost
            copy.sql("SELECT outbox_consent('same')")
            everything_is_sent(copy)
            assert {outcome for outcome, _ in instead.values()} == {"new"}
            again = repeat(copy, before | after)
            assert {key for key, (outcome, _) in again.items() if outcome == "new"} == after.keys()
            assert_complete(copy, {key: order for key, (_, order) in (again | instead).items()}, receiver)
            assert published(receiver).items() >= lost.items()
        finally:
            backup.stop()
