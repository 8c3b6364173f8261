"""Failover: standbys are promoted while requests come in, with WAL that went along with the old primary and without."""
import contextlib
import json
import time

import pytest

from clients import Clients, assert_complete, assert_in_order, everything_is_sent, positions, published, repeat
from conftest import Database, cluster, eventually, load_factor, make_database, run
from copies import Copy, folder, standby_of  # noqa: F401 (fixture)
from pull_client import STALE, Client, create, emit, refused
from receiver import Receiver
from relay_process import Relay
from workers import let_look


@pytest.fixture
def receiver():
    with Receiver() as r:
        yield r


@contextlib.contextmanager
def primary_with(receiver, *settings, workers=True):
    with cluster("retrysafe.poll_interval = 200ms", *settings) as server:
        db = make_database(server)
        db.sql("SELECT outbox_create_destination('hook', 'http', %s, workers => %s)", json.dumps({"url": receiver.url}), workers)
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


@contextlib.contextmanager
def relay(primary, standby, db):
    """It knows both servers, and finds out which of them is the primary."""
    both = ",".join(str(server.directory) for server in (primary, standby))
    connection = f"host={both} port={primary.port},{standby.port} dbname={db.name} user=postgres"
    with Relay(db, "--allowed-addresses", "127.0.0.1", "hook", connection=connection) as process:
        yield process.ready()


@pytest.mark.parametrize("publish_after, publisher", [("local_flush", "worker"), ("synchronous_standby", "worker"),
                                                      ("synchronous_standby", "relay")])
def test_promotion_under_load_with_a_synchronous_standby(folder, receiver, publish_after, publisher):
    """Nothing that was answered is lost, and nothing was published that is not there; work goes on within seconds."""
    with primary_with(receiver, f"retrysafe.publish_after = {publish_after}", workers=publisher == "worker") as (primary, db):
        with Clients(db) as clients, contextlib.ExitStack() as publishers:
            standby = standby_of(primary, folder / "standby")
            try:
                follow_synchronously(primary)
                if publisher == "relay":
                    publishers.enter_context(relay(primary, standby, db))
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


def test_what_is_in_hand_at_a_promotion_comes_again(folder):
    """The standby has not received that an event was refused before the batch was fetched. Acknowledged there, the batch
    would pass it over."""
    with cluster("retrysafe.workers_per_database = 0") as primary:
        db = make_database(primary)
        create(db)
        standby = standby_of(primary, folder / "standby")
        try:
            client = Client(db)
            emit(db, "a", "b", "c")
            assert client.fetch(lease="1 h") == ["a", "b", "c"]
            written, follower = db.value("SELECT pg_current_wal_flush_lsn()"), Database(standby, db.name)
            eventually(lambda: follower.value("SELECT pg_last_wal_receive_lsn() >= %s", written))
            stop_receiving(standby)
            client.nack("b", retry_after="1 h")
            assert client.fetch() == ["a", "c"]
            primary.pg_ctl("stop", "-m", "immediate")
            copy = promote(standby, db)
            for call in ["outbox_ack(%s)", "outbox_record(%s)", "outbox_renew(%s)", "outbox_release(%s)"]:
                refused(STALE, copy.sql, f"SELECT {call}", client.batch)
            assert Client(copy).drain() == ["a", "b", "c"], "the shard is free at once"
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
            eventually(lambda: copy.value("SELECT state FROM outbox_workers WHERE database = current_database()") == "suspended")
            let_look(copy, "hook")
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
