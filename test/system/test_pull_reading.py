"""What a fetch finds in the log: durable, due, prepared, behind many events of others; and what it says of it."""
import contextlib
import datetime
import os

import psycopg2
import pytest

from conftest import eventually, run
from pull_client import STALE, Client, create, emit, expire, refused
from rings import setting, stopped_at


def test_event_ids_are_those_of_the_view(db):
    create(db)
    emit(db, "a", "b")
    client = Client(db)
    client.fetch()
    assert db.sql("SELECT event_id FROM outbox_events ORDER BY id") == [(row[1],) for row in client.rows]


def test_delayed_events_come_when_they_are_due(db):
    create(db)
    db.sql("SELECT outbox_emit(NULL, 'later', 't', '{}', deliver_after => now() + interval '1 h')")
    client = Client(db)
    assert client.fetch() == []
    db.sql("UPDATE outbox_scheduled SET deliver_after = now()")
    # Due ones are moved by the fetch, and handed out when that has committed.
    assert eventually(client.fetch) == ["later"]


def test_nothing_is_handed_out_before_its_commit_is_durable(db):
    create(db)
    client = Client(db)
    for n in range(20):
        c = db.connect()
        run(c, "SET synchronous_commit = off")
        run(c, "SELECT outbox_emit(NULL, %s, 't', '{}')", f"e{n}")
        commit = run(c, "SELECT pg_current_wal_insert_lsn()")[0][0]
        assert client.fetch() == [f"e{n}"]
        assert db.value("SELECT pg_current_wal_flush_lsn() >= %s::pg_lsn", commit)
        client.ack()


def test_fetching_where_wal_ends_at_a_page(db):
    """The insert position is then behind a page header that nobody wrote yet: a flush up to there fails."""
    create(db)
    client, filler = Client(db), db.connect()

    def position():
        return int(run(filler, "SELECT pg_current_wal_insert_lsn() - '0/0'")[0][0])

    def write(size):
        run(filler, "SELECT pg_logical_emit_message(false, 'x', repeat('y', %s))", size)

    def overhead_of_one():
        start = position()
        write(504)
        return position() - start - 504

    # One that crosses a page has a page header as well.
    overhead = min(overhead_of_one() for _ in range(3))
    hits = 0
    for n in range(30):
        emit(db, f"e{n}")
        left = -position() % 8192
        if left > overhead + 8:
            write(left - overhead)
        hits += position() % 8192 in (24, 40)
        assert client.fetch() == [f"e{n}"]
        client.ack()
    assert hits > 0
    assert "request to flush past end" not in db.server.log()
    assert "is not satisfied" not in db.server.log()


def test_progress_over_events_of_others_is_stored(db):
    """Windows without an event for the destination are passed over in memory, and stored now and then."""
    try:
        db.sql("SET retrysafe.fault_points = 'reader.store_progress'")
    except psycopg2.Error:
        pytest.skip("the build has no fault points")
    create(db, event_types=["wanted"])
    emit(db, "a", "b", event_type="other")
    client = Client(db)
    assert client.fetch() == []
    emit(db, "c", event_type="other")
    assert client.fetch() == []
    assert db.sql("SELECT seq, window_no FROM outbox_batches") == [(0, 0)]
    run(client.connection, "SET retrysafe.fault_points = 'reader.store_progress'")
    assert client.fetch() == []
    assert db.sql("SELECT seq, window_no, delivered FROM outbox_batches ORDER BY seq") == [(0, 0, 0), (1, 1, 0)]
    assert db.value("SELECT ceiling FROM outbox_windows WHERE window_no = 1") == 3
    emit(db, "d", event_type="wanted")
    assert Client(db).fetch() == ["d"]


@pytest.mark.parametrize("table, said", [("outbox_batches", "the progress of shard 0"), ("outbox_windows", "window 0 of shard 0")])
def test_missing_progress_is_an_error(db, table, said):
    """Never a beginning from zero: events that were delivered would all be sent again."""
    create(db)
    emit(db, "a")
    db.sql(f"DELETE FROM {table}")
    error = refused("RS212", Client(db).fetch)
    assert said in str(error) and f"Restore table {table}" in error.diag.message_hint


def test_a_destination_that_is_dropped_while_a_batch_is_out(db):
    create(db)
    emit(db, "a")
    client = Client(db)
    client.fetch()
    db.sql("SELECT outbox_drop_destination('d')")
    refused(STALE, client.ack)
    refused("RS201", client.fetch)
    create(db)
    assert client.fetch() == ["a"]


def test_long_logs_are_read_in_short_transactions(db):
    """Many rows for others: the fetch gets on by itself and finds what is behind them."""
    create(db, event_types=["wanted"])
    db.sql("SELECT outbox_emit(NULL, 'o' || i, 'other', '{}') FROM generate_series(1, 45000) i")
    emit(db, "w", event_type="wanted")
    client = Client(db)
    assert eventually(client.fetch) == ["w"]
    client.ack()
    assert db.value("SELECT count(*) FROM outbox_batches") == 4  # the start, two of nothing but progress, and this


SLOWNESS = float(os.environ.get("RETRYSAFE_SLOWNESS", 1))


def many_for_others(db):
    create(db, event_types=["wanted"])
    db.sql("SELECT count(outbox_emit(NULL, 'o' || i, 'other', '{}')) FROM generate_series(1, 400000) i")


def many_behind_one_that_failed(db):
    create(db)
    emit(db, "failed", ordering_key="k")
    client = Client(db)
    client.fetch()
    client.nack("failed", retry_after="1 h")
    client.ack()
    expire(db)
    db.sql("SELECT count(outbox_emit(NULL, 'k' || i, 't', '{}', 'k')) FROM generate_series(1, 20000) i")


@pytest.mark.parametrize("in_front, timeout_ms", [(many_for_others, 40), (many_behind_one_that_failed, 300)])
def test_what_a_fetch_gets_past_before_its_statement_timeout_is_kept(db, in_front, timeout_ms):
    in_front(db)
    emit(db, "w", event_type="wanted")
    client = Client(db)
    run(client.connection, f"SET statement_timeout = '{int(timeout_ms * SLOWNESS)}ms'")

    def fetch():
        with contextlib.suppress(psycopg2.errors.QueryCanceled):
            return client.fetch()

    assert eventually(fetch) == ["w"]


def test_a_fetch_that_has_read_for_long_is_called_again(db, server):
    """It hands out nothing; what it got past is kept with its commit, and who waits need not wait."""
    try:
        db.sql("SET retrysafe.fault_points = 'fetch.time_is_up'")
    except psycopg2.Error:
        pytest.skip("the build has no fault points")
    create(db, event_types=["wanted"])
    db.sql("SELECT count(outbox_emit(NULL, 'o' || i, 'other', '{}')) FROM generate_series(1, 45000) i")
    emit(db, "w", event_type="wanted")
    client = Client(db)
    waiter = db.connect()
    run(waiter, "SET statement_timeout = '30 s'")
    run(waiter, "CALL outbox_wait('{d}', '0 s')")  # from now on its bell rings
    run(client.connection, "SET retrysafe.fault_points = 'fetch.time_is_up'")
    with setting(server, "retrysafe.poll_interval", "1h", waiter):
        for position in 20000, 40000:
            assert client.fetch() == []
            assert db.value("SELECT max(position) FROM outbox_batches") == position
            run(waiter, "CALL outbox_wait('{d}', '1 h')")
    assert client.fetch() == ["w"]


def test_a_fetch_that_has_no_time_for_all_shards_is_called_again(db):
    try:
        db.sql("SET retrysafe.fault_points = 'fetch.time_is_up'")
    except psycopg2.Error:
        pytest.skip("the build has no fault points")
    create(db, shards=3)
    for key in map(str, range(20)):
        emit(db, key, ordering_key=key)
    client = Client(db)
    while client.fetch():
        client.ack()
        shard, key = client.batch.split(".")[1], client.rows[0][5]
        if shard == "2":
            last = key
    client = Client(db)
    run(client.connection, "SET retrysafe.fault_points = 'fetch.time_is_up'")
    emit(db, "late", ordering_key=last)
    expire(db)
    assert [client.fetch() for _ in range(3)] == [[], [], ["late"]]


def test_a_bulk_writer_that_was_prepared(db):
    create(db)
    client = Client(db)
    c = db.connect()
    run(c, "BEGIN")
    run(c, "SELECT outbox_emit(NULL, 'bulk' || i, 't', '{}') FROM generate_series(1, 1000) i")
    run(c, "PREPARE TRANSACTION 'bulk'")
    emit(db, "a")
    assert client.drain() == ["a"]
    emit(db, "b")
    assert client.drain() == ["b"]
    run(c, "COMMIT PREPARED 'bulk'")
    emit(db, "c")
    keys = client.drain(300)
    assert keys == [f"bulk{i}" for i in range(1, 1001)] + ["c"]


def test_times_of_events(db):
    create(db)
    emit(db, "a")
    created = run(db.connect(), "SELECT created_at FROM outbox_fetch('d')")[0][0]
    assert abs(created - datetime.datetime.now(datetime.timezone.utc)) < datetime.timedelta(minutes=1)


FETCH = "SELECT batch, event_key FROM outbox_fetch('d')"


@pytest.mark.parametrize("meanwhile", ["t", "unwanted"])
def test_another_has_the_shard_and_gives_it_back_while_a_fetch_reads(db, meanwhile):
    """Both have opened a window of the same number, the one to hand out events and the other to go past some."""
    create(db, event_types=["t"])
    emit(db, "before", event_type=meanwhile)
    other = Client(db)
    run(other.connection, "SET retrysafe.fault_points = ''")
    with stopped_at(db, "reader.store_progress,fetch.after_read", [[FETCH]]) as (fetch,):
        emit(db, "later")
        keys = other.fetch()
        run(other.connection, "SELECT outbox_release(%s)", other.batch)
    assert [key for _, key in fetch.result()] == keys


@pytest.mark.parametrize("others", [0, 20001])
def test_an_era_begins_while_a_fetch_reads(db, others):
    """It has found events of the old one, or has read so many of others that it keeps how far it has got."""
    create(db, event_types=["t"])
    emit(db, "first")
    db.sql("SELECT count(outbox_emit(NULL, 'o' || i, 'other', '{}')) FROM generate_series(1, %s) i", others)
    emit(db, "next")
    client = Client(db)
    assert client.fetch(1) == ["first"]
    client.ack()
    expire(db)
    with stopped_at(db, "fetch.after_read", [[FETCH]]) as (fetch,):
        db.sql("SELECT outbox_consent('fork')")
    rows = fetch.result()
    eventually(lambda: rows or rows.extend(fetch.run(FETCH)))
    assert [key for _, key in rows] == ["next"]
    assert fetch.run(f"SELECT outbox_ack('{rows[0][0]}')") == [(1,)]
