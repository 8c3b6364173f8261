"""What a publisher outside of the server has beyond single acknowledgements: outbox_record, outbox_wait, destinations that
workers leave to it, and how it learns of options and secrets."""
import contextlib
import datetime
import json
import signal
import threading

import psycopg2.errors
import pytest

from conftest import Pending, cluster, eventually, in_spite_of_crashes, kill, make_database, run
from null_destination import NullDestination
from pull_client import STALE, Client, create, emit, expire, refused
from relay_process import emit_many


def record(client, outcomes=None, unreachable=None, retry_after=None):
    """`outcomes`: of event keys."""
    ids = {row[4]: str(row[1]) for row in client.rows}
    named = None if outcomes is None else json.dumps({ids[key]: outcome for key, outcome in outcomes.items()})
    return run(client.connection, "SELECT outbox_record(%s, %s, %s, %s)", client.batch, named, unreachable, retry_after)[0][0]


def status(db):
    return db.sql("SELECT delivered, parked_retry, parked_blocked, dead FROM outbox_status")[0]


RETRY, DEAD, NOT_TRIED = {"status": "retry", "reason": "HTTP 500"}, {"status": "dead", "reason": "no"}, {"status": "not tried"}


def test_a_batch_is_recorded_in_one_call(db):
    create(db, backoff="10 minutes", backoff_max="10 minutes")
    for key in "abcd":
        emit(db, f"{key}1", f"{key}2", ordering_key=key)
    client = Client(db)
    assert len(client.fetch()) == 8
    # What was delivered behind a dead event stays delivered; what is behind one that is tried again waits for it.
    assert record(client, {"a1": RETRY, "a2": NOT_TRIED, "b1": DEAD}) is None
    assert status(db) == (5, 1, 1, 1)
    assert db.sql("SELECT event_key, reason, attempts FROM outbox_dead_letters") == [("b1", "no", 1)]
    assert record(client, {"c1": RETRY}) is None, "recorded before: nothing happens"
    assert client.fetch() == []
    assert status(db) == (5, 1, 1, 1)


def test_only_what_was_not_tried_comes_again(db):
    create(db, backoff="10 minutes", backoff_max="10 minutes")
    emit(db, *"abcdefgh")
    client = Client(db)
    client.fetch()
    record(client, {"b": NOT_TRIED, "d": RETRY, "f": NOT_TRIED, "h": NOT_TRIED})
    assert client.fetch() == ["b", "f", "h"]
    assert [row[3] for row in client.rows] == [1, 1, 1], "no attempt was burnt"
    record(client, {"f": NOT_TRIED})
    assert client.fetch() == ["f"]
    record(client, {})
    assert client.fetch() == []
    assert status(db) == (7, 1, 0, 0)


def test_what_was_not_tried_keeps_the_order_of_its_key(db):
    create(db)
    emit(db, "k1", "k2", ordering_key="k")
    emit(db, "x")
    emit(db, "k3", ordering_key="k")
    emit(db, "y")
    emit(db, "k4", ordering_key="k")
    client = Client(db)
    client.fetch()
    record(client, {key: NOT_TRIED for key in ("k1", "k2", "k3", "k4")})
    emit(db, "k5", ordering_key="k")
    seen = []
    while keys := client.fetch():
        seen += keys
        record(client, {})
    assert seen == ["k1", "k2", "k3", "k4", "k5"]
    assert status(db) == (7, 0, 0, 0)


def test_what_failed_behind_events_that_were_not_tried_waits_for_them(db):
    create(db)
    emit(db, "k1", "k2", "k3", ordering_key="k")
    client = Client(db)
    client.fetch()
    client.nack("k1")
    client.ack()
    assert client.fetch() == ["k1", "k2", "k3"]
    record(client, {"k1": NOT_TRIED, "k2": NOT_TRIED, "k3": RETRY})
    assert db.sql("SELECT event_key, state FROM outbox_parked ORDER BY id") == [
        ("k1", "retry"), ("k2", "blocked"), ("k3", "blocked")]


def test_an_outage_in_the_middle_of_a_batch_writes_nothing_for_its_events(db):
    create(db, backoff="1 ms", backoff_max="1 ms")
    emit(db, *"abcd")
    client = Client(db)
    client.fetch()
    record(client, {"b": NOT_TRIED}, unreachable="reset")
    assert db.value("SELECT count(*) FROM outbox_parked") == 0
    assert eventually(client.fetch) == ["b", "c", "d"]


def test_an_unreachable_destination_rests_without_a_write_for_each_event(db):
    create(db, shards=1, backoff="10 minutes", backoff_max="10 minutes")
    emit(db, *"abc")
    client = Client(db)
    client.fetch()
    before = db.value("SELECT count(*) FROM outbox_parked"), db.value("SELECT count(*) FROM outbox_batches")
    until = record(client, {key: NOT_TRIED for key in "abc"}, unreachable="connection refused")
    assert until == db.value("SELECT retry_at FROM outbox_status")
    assert (db.value("SELECT count(*) FROM outbox_parked"), db.value("SELECT count(*) FROM outbox_batches")) == before
    assert db.sql("SELECT state, failures, last_error FROM outbox_status") == [("backing off", 1, "connection refused")]
    assert client.fetch() == [] and Client(db).fetch() == []
    db.sql("SELECT outbox_pause('d'), outbox_resume('d')")  # somebody has put it right
    assert client.fetch() == ["a", "b", "c"]
    assert [row[3] for row in client.rows] == [1, 1, 1], "no attempt was burnt"
    assert client.ack() == 3
    assert db.value("SELECT failures FROM outbox_status") == 0


LEASE = "SELECT token, holder, lease_until FROM outbox_shards"


@contextlib.contextmanager
def crash_of_a_server(db):
    """At the end of the block, with all WAL lost that no session of the block has waited for: the process that writes it
    by itself stands still, and is killed in the end. Others that flush it do not run."""
    writer = db.value("SELECT pid FROM pg_stat_activity WHERE backend_type = 'walwriter'")
    kill(writer, signal.SIGSTOP)
    try:
        yield
        before = db.sql(LEASE)
    finally:
        kill(writer)
    eventually(lambda: in_spite_of_crashes(
        lambda: db.value("SELECT pid FROM pg_stat_activity WHERE backend_type = 'walwriter'") not in (None, writer)))
    assert db.sql(LEASE) == before and before[0][1], "the lease stands"


@pytest.fixture
def quiet_db():
    with cluster("full_page_writes = off", "wal_level = minimal", "max_wal_senders = 0", "autovacuum = off",
                 "retrysafe.workers_per_database = 0") as server:
        yield make_database(server)


def test_what_a_crash_takes_from_a_session_that_does_not_wait_for_commits(quiet_db):
    """Nobody else has the shard. But the window of the batch is gone, and the events come again."""
    db = quiet_db
    create(db)
    client = Client(db)
    run(client.connection, "SET synchronous_commit = off")
    emit(db, "a")
    assert client.fetch() == ["a"] and client.ack() == 1
    with crash_of_a_server(db):
        emit(db, "b")  # waits for its commit, and so makes durable what was before
        assert client.fetch() == ["b"]
    refused(STALE, db.sql, "SELECT outbox_ack(%s)", client.batch)
    other = Client(db)
    assert other.fetch() == []
    expire(db)
    assert other.fetch() == ["b"] and other.ack() == 1


@pytest.mark.parametrize("first", [[], ["a"]], ids=["first of the window", "another one"])
def test_a_crash_takes_what_was_recorded_of_the_batch_before(quiet_db, first):
    """An event of it was refused, and all are of one window, which is there still. None is passed over."""
    db = quiet_db
    create(db)
    client = Client(db)
    run(client.connection, "SET synchronous_commit = off")
    emit(db, *first, "b", "c")
    for key in first:
        assert client.fetch(1) == [key] and client.ack() == 1
    assert client.fetch(1) == ["b"]
    emit(db, "d")  # waits for its commit, and so makes durable what was before
    with crash_of_a_server(db):
        record(client, {"b": RETRY})
        assert client.fetch(1) == ["c"]
    refused(STALE, db.sql, "SELECT outbox_ack(%s)", client.batch)
    expire(db)
    assert Client(db).drain() == ["b", "c", "d"]


def test_a_lease_is_durable_when_it_is_handed_out(quiet_db):
    db = quiet_db
    create(db)
    client = Client(db)
    run(client.connection, "SET synchronous_commit = off")
    with crash_of_a_server(db):
        emit(db, "a")
        assert client.fetch() == ["a"]
    assert db.value("SELECT outbox_ack(%s)", client.batch) == 1


def test_the_far_side_may_ask_for_a_longer_rest(db):
    create(db, backoff="1 ms")
    emit(db, "a")
    client = Client(db)
    client.fetch()
    record(client, {"a": NOT_TRIED}, unreachable="overloaded", retry_after="1 hour")
    assert db.value("SELECT retry_at > clock_timestamp() + interval '59 minutes' FROM outbox_status")


def test_a_late_record_is_refused(db):
    create(db)
    emit(db, "a")
    client = Client(db)
    client.fetch()
    expire(db)
    refused(STALE, record, client, {"a": RETRY})
    refused(STALE, record, client, {"a": NOT_TRIED}, unreachable="away")
    assert db.sql("SELECT failures, parked_retry FROM outbox_status") == [(0, 0)]


def test_another_session_records_and_gives_the_shard_back(db):
    create(db)
    emit(db, "a", "b")
    client, other = Client(db), Client(db)
    client.fetch()
    other.rows, other.batch = client.rows, client.batch
    record(other, {"b": RETRY})
    assert status(db)[:2] == (1, 1)
    assert db.value("SELECT holders FROM outbox_status") is None


@pytest.mark.parametrize("spelling", [str.upper, lambda id: id.replace("-", "")])
def test_the_id_of_an_event_may_be_written_as_the_server_reads_a_uuid(db, spelling):
    create(db)
    emit(db, "a", "b")
    client = Client(db)
    client.fetch()
    outcomes = json.dumps({spelling(str(client.rows[0][1])): DEAD})
    run(client.connection, "SELECT outbox_record(%s, %s)", client.batch, outcomes)
    assert status(db) == (1, 0, 0, 1)


def test_an_outcome_says_when_to_try_again(db):
    """Not sooner than the back-off does."""
    create(db, backoff="1 minute", backoff_max="1 minute")
    emit(db, "a", "b", "c")
    client = Client(db)
    client.fetch()
    record(client, {key: {"status": "retry", "retry_after_ms": ms} for key, ms in (("a", 3_600_000), ("b", 0))} | {"c": RETRY})
    waits = dict(db.sql("SELECT event_key, retry_at - clock_timestamp() FROM outbox_parked"))
    assert waits["a"] > datetime.timedelta(minutes=50)
    assert max(waits["b"], waits["c"]) <= datetime.timedelta(minutes=1)


def test_an_outcome_of_an_event_that_is_not_in_the_batch_is_refused(db):
    create(db, shards=1)
    emit(db, "a", "b", "c", "d")
    client = Client(db)
    assert client.fetch(3) == ["a", "b", "c"]
    other = db.value("SELECT outbox_event_id('d')")
    call = "SELECT outbox_record(%s, %s)"
    refused("RS211", run, client.connection, call, client.batch, json.dumps({other: RETRY}))
    assert status(db) == (0, 0, 0, 0), "nothing is recorded"
    # Also when a part of the batch is settled, whose ids count as known.
    record(client, {"a": RETRY, "c": NOT_TRIED})
    refused("RS211", run, client.connection, call, client.batch, json.dumps({other: RETRY}))
    assert status(db) == (1, 1, 0, 0)
    record(client, {"a": RETRY, "b": NOT_TRIED})
    assert status(db) == (2, 1, 0, 0)


@pytest.mark.parametrize("outcomes", ['[]', '1', '{"ID": 1}', '{"x": {"status": "dead"}}', '{"x": 1}', '{"": null}',
                                      '{"ID": {"status": "retry", "bogus": 1}}',
                                      '{"ID": {"status": "dead"}, "{ID}": {"status": "retry"}}',
                                      '{"ID": {"status": "retry", "retry_after_ms": 1e300}}',
                                      '{"ID": {"status": "retry", "retry_after_ms": 31622400001}}',
                                      '{"ID": {}}', '{"ID": {"status": "lost"}}',
                                      '{"ID": {"status": "retry", "reason": 1}}',
                                      '{"ID": {"status": "retry", "retry_after_ms": -1}}',
                                      '{"ID": {"status": "retry", "retry_after_ms": "1 s"}}'])
def test_malformed_outcomes_are_an_error(db, outcomes):
    create(db)
    emit(db, "a")
    client = Client(db)
    client.fetch()
    refused("RS214", run, client.connection, "SELECT outbox_record(%s, %s)", client.batch,
            outcomes.replace("ID", str(client.rows[0][1])))


# --- waiting ----------------------------------------------------------------------------------------------------


class Waiter:
    def __init__(self, db, destinations="{d}"):
        self.call = f"CALL retrysafe.outbox_wait('{destinations}', '60 s')"
        self.pending = Pending(db, self.call)  # the first one returns at once
        self.pending.result()

    def begin(self):
        self.pending.cursor = self.pending.connection.cursor()
        self.pending.cursor.execute(self.call)
        return self

    def blocks(self):
        return self.pending.blocks()

    def returns(self):
        self.pending.result()
        return True


def test_a_commit_wakes_who_waits(db):
    create(db)
    waiter = Waiter(db)
    assert waiter.begin().blocks()
    emit(db, "a")
    assert waiter.returns()
    emit(db, "b")  # while nobody waits
    assert waiter.begin().returns()
    assert waiter.begin().blocks()


def test_who_waits_holds_no_snapshot(db):
    create(db)
    waiter = Waiter(db).begin()
    held = """SELECT backend_xmin, backend_xid FROM pg_stat_activity
               WHERE datname = current_database() AND pid <> pg_backend_pid() AND query LIKE 'CALL%'"""
    eventually(lambda: db.sql(held) == [(None, None)])
    db.sql("SELECT outbox_drop_destination('d')")
    waiter.pending.connection.close()


def test_time_wakes_who_waits(db):
    create(db, shards=2, backoff="200 ms", backoff_max="200 ms")
    client = Client(db)
    waiter = Waiter(db)
    emit(db, "a")
    client.fetch()
    record(client, {"a": NOT_TRIED}, unreachable="away")
    assert waiter.begin().returns()  # the commits
    assert waiter.begin().returns()  # the end of the back-off
    assert client.fetch() == ["a"]
    client.nack("a", retry_after="200 ms")
    client.ack()
    eventually(lambda: client.fetch() == ["a"] or not waiter.begin().returns())
    client.ack()
    db.sql("SELECT outbox_emit(NULL, 'later', 't', '{}', deliver_after => clock_timestamp() + interval '300 ms')")
    eventually(lambda: client.fetch() == ["later"] or not waiter.begin().returns())


def test_waiting_is_refused_where_it_would_hold_a_transaction(db):
    create(db)
    connection = db.connect(autocommit=False)
    refused("25001", run, connection, "CALL outbox_wait('{d}')")
    refused("25001", db.sql, "DO $$ BEGIN CALL retrysafe.outbox_wait('{d}'); EXCEPTION WHEN division_by_zero THEN NULL; END $$")
    refused("RS201", db.sql, "CALL outbox_wait('{nobody}')")
    for arguments in ("NULL", "'{}'", "'{NULL}'", "'{d}', '-1 s'", "'{d}', '2 hours'", "'{d}', NULL"):
        refused("RS214", db.sql, f"CALL outbox_wait({arguments})")


def test_who_waits_comes_back_before_the_transaction_is_too_long(db):
    """Its wait is one, and transaction_timeout ends the session."""
    if not db.sql("SELECT 1 FROM pg_settings WHERE name = 'transaction_timeout'"):
        pytest.skip("of PostgreSQL 17")
    create(db)
    connection = db.connect()
    run(connection, "SET transaction_timeout = '2 s'")
    for _ in range(3):
        run(connection, "CALL outbox_wait('{d}', '1 hour')")
    assert run(connection, "SHOW transaction_timeout") == [("2s",)]


def test_without_preloading_waiting_is_polling():
    with cluster("shared_preload_libraries = ''", "retrysafe.poll_interval = '50ms'") as server:
        db = make_database(server)
        create(db)
        waiter = Waiter(db)
        assert waiter.begin().blocks()
        emit(db, "a")
        assert waiter.returns()


# --- destinations -----------------------------------------------------------------------------------------------


def test_workers_leave_a_destination_to_others(db):
    db.sql("SELECT outbox_create_destination('d', 'http', '{\"url\": \"http://127.0.0.1:1/\"}', workers => false)")
    db.sql("SELECT outbox_create_destination('mine', 'http', '{\"url\": \"http://127.0.0.1:1/\"}')")
    emit(db, "a")
    eventually(lambda: db.value("SELECT failures FROM outbox_status WHERE name = 'mine'") > 0)
    assert db.sql("SELECT holders, failures FROM outbox_status WHERE name = 'd'") == [(None, 0)]
    client = Client(db)
    assert client.fetch(lease="1 s") == ["a"]
    assert client.ack() == 1
    db.sql("SELECT outbox_alter_destination('d', workers => true)")
    emit(db, "b")
    eventually(lambda: db.value("SELECT failures FROM outbox_status WHERE name = 'd'") > 0)


def test_which_kinds_have_a_choice(db):
    create(db)
    assert db.value("SELECT workers FROM outbox_status") is False
    db.sql("SELECT outbox_alter_destination('d', workers => true)")
    assert db.value("SELECT workers FROM outbox_status") is False
    db.sql("CREATE FUNCTION public.f(jsonb) RETURNS void LANGUAGE sql AS ''")
    refused("RS214", db.sql, "SELECT outbox_create_destination('f', 'function', '{\"function\": \"public.f\"}', workers => false)")
    refused("RS214", db.sql, "SELECT outbox_create_destination('n', 'pull', workers => NULL)")


def test_options_as_a_sink_gets_them(db, server):
    server.set("retrysafe.allowed_secret_directory", "/etc/retrysafe")
    try:
        options = {"url": "https://example.com/", "timeout": "2s", "headers": {"X-A": "1"}, "secret_env": "RETRYSAFE_KEY",
                   "ca_file": "ca.pem"}
        db.sql("SELECT outbox_create_destination('d', 'http', %s, workers => false)", json.dumps(options))
    finally:
        server.set("retrysafe.allowed_secret_directory", None)
    found = {option: (value, source) for option, value, source in db.sql("SELECT * FROM outbox_relay_options('d')")}
    assert found["url"] == ("https://example.com/", "inline")
    assert found["timeout"] == ("2000", "inline")
    assert found["connect_timeout"] == ("5000", "inline")
    assert found["headers.X-A"] == ("1", "inline")
    assert found["secret"] == ("RETRYSAFE_KEY", "environment")
    assert found["ca_file"] == ("ca.pem", "file")


def test_the_version_changes_with_the_destination(db):
    db.sql("SELECT outbox_create_destination('d', 'http', '{\"url\": \"http://127.0.0.1/\"}', workers => false, lease => '7 s')")
    first = db.sql("SELECT kind, library, shards, batch_events, lease_ms, on_exhausted, paused, version"
                   " FROM outbox_relay_destination('d')")[0]
    assert first[:7] == ("http", "retrysafe_http", 1, 500, 7000, "dead_letter", False)
    db.sql("SELECT outbox_alter_destination('d', options => '{\"timeout\": \"1s\"}')")
    second = db.value("SELECT version FROM outbox_relay_destination('d')")
    assert second != first[7]
    db.sql("SELECT outbox_drop_destination('d')")
    db.sql("SELECT outbox_create_destination('d', 'pull')")
    assert db.sql("SELECT kind, library FROM outbox_relay_destination('d')") == [("pull", None)]
    assert db.value("SELECT version FROM outbox_relay_destination('d')") not in (second, first[7])
    refused("RS201", db.sql, "SELECT * FROM outbox_relay_destination('nobody')")
    refused("RS201", db.sql, "SELECT * FROM outbox_relay_options(NULL)")
    db.sql("CREATE FUNCTION public.f(jsonb) RETURNS void LANGUAGE sql AS ''")
    db.sql("SELECT outbox_create_destination('f', 'function', '{\"function\": \"public.f\"}')")
    refused("RS217", db.sql, "SELECT * FROM outbox_relay_destination('f')")


# --- and workers ------------------------------------------------------------------------------------------------


def test_workers_leave_no_shard_to_a_session_that_waits_no_more(db):
    """An idle session of a pool, say: its connection lives, and it publishes nothing."""
    destination = NullDestination(db, "w", shards=8)
    idle = [db.connect() for _ in range(4)]
    for connection in idle:
        run(connection, "CALL retrysafe.outbox_wait('{w}', '0 s')")
    emit_many(db, 80, keys=40)
    eventually(lambda: len(destination.delivered()) == 80)


def test_a_wait_that_was_cancelled_counts_as_over(db):
    destination = NullDestination(db, "w", shards=8)
    connection = db.connect()
    run(connection, "SET statement_timeout = '300 ms'")
    run(connection, "CALL retrysafe.outbox_wait('{w}', '0 s')")

    def cancelled():  # where it returns because of news it is called again
        try:
            run(connection, "CALL retrysafe.outbox_wait('{w}', '1 hour')")
        except psycopg2.errors.QueryCanceled:
            return True
    eventually(cancelled)
    emit_many(db, 80, keys=40)
    eventually(lambda: len(destination.delivered()) == 80)


def test_workers_publish_what_those_who_wait_do_not_fetch(db):
    destination = NullDestination(db, "w", shards=8)
    over = threading.Event()

    def wait(connection):
        while not over.is_set():
            run(connection, "CALL retrysafe.outbox_wait('{w}', '500 ms')")

    threads = [threading.Thread(target=wait, args=[db.connect()]) for _ in range(3)]
    try:
        for thread in threads:
            thread.start()
        eventually(lambda: db.value("SELECT count(*) FROM outbox_shards WHERE holder IS NOT NULL") == 2)
        emit_many(db, 80, keys=40)
        eventually(lambda: len(destination.delivered()) == 80)
    finally:
        over.set()
        for thread in threads:
            thread.join()
    assert len(set(destination.delivered())) == 80
