"""The rings of records, log and progress: what holds while they turn.

The server of these tests starts no workers: each step is taken by a call. Retention is zero, so that a step is due as
soon as nothing else holds it.
"""
import contextlib
import subprocess
import threading

import psycopg2
import pytest

from conftest import Database, Pending, Server, cluster, eventually, run
from rings import bytes_of, fetch_all, fill, held_by, retire, ring, rotate, save, seal, settle, states, step, turn_until

SETTINGS = ("retrysafe.workers_per_database = 0", "retrysafe.outbox_retention = 0", "retrysafe.idem_retention = 1s",
            "max_prepared_transactions = 50", "autovacuum = off")


@pytest.fixture(scope="module")
def server():
    with cluster(*SETTINGS) as own:
        yield own


def begin(db, isolation="READ COMMITTED"):
    connection = db.connect(autocommit=False)
    connection.set_session(isolation_level=isolation)
    return connection


def emit(connection, key, payload="{}"):
    return run(connection, "SELECT outbox_emit(NULL, %s, 't', %s)", key, payload)[0][0]


def copies(db, key):
    return db.value("SELECT count(*) FROM outbox_log WHERE event_key = %s", key)


def sqlstate_of(function, *arguments):
    try:
        function(*arguments)
    except psycopg2.Error as error:
        return error.pgcode
    return None


# --- the reader ---


def test_a_window_left_half_read_by_an_era_holds_the_log(db):
    """What is left of it is told by the next window alone, which must be read to its end."""
    fill(db, 10)
    db.sql("SELECT outbox_create_destination('d', 'pull', start_at => 'earliest')")
    seal(db, "log")
    first = db.sql("SELECT batch, id FROM outbox_fetch('d')")
    db.sql("SELECT outbox_ack(%s, %s)", first[0][0], first[2][1])  # three of ten
    db.sql("SELECT outbox_consent('fork')")
    second = db.sql("SELECT batch, id FROM outbox_fetch('d')")
    assert len(second) == 7
    db.sql("SELECT outbox_ack(%s, %s)", second[0][0], second[1][1])  # two more
    db.sql("SELECT outbox_release(%s)", second[0][0])
    settle(db, "log")
    assert states(db, "log")[0] == "sealed"
    assert held_by(db, "log") == ["destination d"]
    assert fetch_all(db, "d") == [f"e{i}" for i in range(6, 11)]
    turn_until(db, "log", lambda: fetch_all(db, "d") == [] and copies(db, "e10") == 0)


# --- steps never wait ---


def idle_shard(db):
    """A destination whose progress lies in the oldest piece, which could be retired but for it."""
    db.sql("SELECT outbox_create_destination('d', 'pull')")
    fill(db, 1, "first")
    assert fetch_all(db, "d") == ["first1"]
    seal(db, "progress")
    seal(db, "log")
    turn_until(db, "log", lambda: fetch_all(db, "d") == [] and states(db, "log") == ["active"])


def test_a_step_does_not_wait_for_a_shard(db):
    idle_shard(db)
    assert ring(db, "progress")[0][:2] == (1, "sealed")
    client = begin(db)
    run(client, "SELECT FROM outbox_shards FOR UPDATE")  # as outbox_ack does
    cleaner = Pending(db, "SELECT outbox_cleanup()")
    assert not cleaner.blocks()
    cleaner.close()
    assert ring(db, "progress")[0][:2] == (1, "sealed")
    client.rollback()
    settle(db, "progress")
    assert ring(db, "progress")[0][0] != 1
    fill(db, 1, "next")
    assert fetch_all(db, "d") == ["next1"]


def test_retiring_progress_is_tried_again_where_writers_could_not_be_excluded(db):
    idle_shard(db)
    writer = begin(db)
    run(writer, "LOCK ring_pieces IN ROW EXCLUSIVE MODE")  # one that inserts all the time
    assert step(db, "progress") == 0
    writer.rollback()
    settle(db, "progress")
    assert ring(db, "progress")[0][0] != 1
    fill(db, 1, "next")
    assert fetch_all(db, "d") == ["next1"]


def test_rings_do_not_turn_inside_of_a_transaction_block(db):
    """They would hold up those who insert until its end, and its commit would not be waited for."""
    fill(db)
    admin = begin(db)
    run(admin, "SELECT outbox_cleanup()")
    assert any("transaction block" in notice for notice in admin.notices)
    writer = Pending(db, "SELECT outbox_emit(NULL, 'k', 't', '{}')")
    assert not writer.blocks()
    writer.close()
    assert run(admin, "SHOW synchronous_commit") == [("on",)]
    admin.commit()
    assert states(db, "log") == ["active"]
    assert step(db, "log") == 1


# --- what administrators do to a piece ---


@pytest.mark.parametrize("parent", ["outbox_log", "idem_records", "outbox_windows", "outbox_batches"])
def test_a_column_more(db, parent):
    db.sql(f"ALTER TABLE {parent} ADD COLUMN note text, ADD COLUMN payload2 jsonb DEFAULT '{{}}'")
    db.sql("SELECT outbox_create_destination('d', 'pull')")
    session = begin(db)
    assert save(session, "k") == "new"
    assert save(session, "k") == "replay"
    for _ in range(4):
        fill(db, 3)
        fetch_all(db, "d")
        settle(db, "log")
    fill(db, 3, "last")
    assert fetch_all(db, "d") == ["last1", "last2", "last3"]


def test_moving_an_index_waits_for_writers(db, tmp_path):
    writer = begin(db)
    for n in range(3):
        emit(writer, f"a{n}")
        writer.commit()  # knows the indexes now
    emit(writer, "b")
    admin = db.connect()
    run(admin, "SET lock_timeout = '100ms'")
    for index in ("outbox_log_pkey_1", "outbox_log_event_key_1", "outbox_log_txid_1"):
        assert sqlstate_of(run, admin, f"ALTER INDEX {index} SET TABLESPACE pg_default") == "55P03", index
    writer.commit()


def test_indexes_of_an_administrator(db):
    db.sql("CREATE FUNCTION first_letter(text) RETURNS text IMMUTABLE LANGUAGE sql AS 'SELECT left($1, 1)'")
    writer = begin(db)
    emit(writer, "before")
    writer.commit()
    for piece in 1, 2, 3:
        db.sql(f"CREATE INDEX ON outbox_log_{piece} (first_letter(event_key)) WHERE event_type = 't'")
        db.sql(f"CREATE INDEX ON outbox_log_{piece} USING gin (payload)")
        db.sql(f"CREATE INDEX ON outbox_log_{piece} USING brin (created_at)")
        db.sql(f"CREATE INDEX ON outbox_log_{piece} USING hash (event_key)")
        connection = db.connect()
        run(connection, f"CREATE INDEX CONCURRENTLY ON outbox_log_{piece} (created_at DESC) WHERE payload IS NOT NULL")
    for n in range(3):
        for key in "xyz":
            emit(writer, f"{key}{n}", f'{{"n": {n}}}')
        run(writer, "SELECT outbox_emit(NULL, %s, 'other', '{}')", f"other{n}")
        writer.commit()
        rotate(db, "log")
        settle(db, "log")
    emit(writer, "x9", '{"n": 9}')
    writer.commit()
    session = db.connect()
    run(session, "SET enable_seqscan = off")
    by_index = run(session, "SELECT event_key FROM outbox_log WHERE first_letter(event_key) = 'x' AND event_type = 't'")
    by_gin = run(session, "SELECT event_key FROM outbox_log WHERE payload @> '{\"n\": 9}'")
    assert ("x9",) in by_index and by_gin == [("x9",)]
    run(session, "RESET enable_seqscan; SET enable_indexscan = off; SET enable_bitmapscan = off")
    assert sorted(run(session, "SELECT event_key FROM outbox_log WHERE left(event_key, 1) = 'x'")) == sorted(by_index)
    for index in run(session, "SELECT indexrelid::regclass FROM pg_index i JOIN pg_class c ON c.oid = i.indexrelid "
                              "JOIN pg_am a ON a.oid = c.relam WHERE indrelid::regclass::text LIKE %s AND amname = 'btree'",
                     "outbox_log%"):
        run(session, "CREATE EXTENSION IF NOT EXISTS amcheck SCHEMA public")
        run(session, "SELECT public.bt_index_check(%s::regclass, true)", index[0])


# --- restoring ---


def test_a_worker_does_not_turn_a_ring_that_is_just_being_restored(db):
    """The tables of a dump arrive one by one, ring_pieces last."""
    session = begin(db)
    save(session, "k")
    rows = db.sql("SELECT ring, generation, since, since_position FROM ring_pieces")
    assert [(name, generation) for name, generation, _, _ in rows] == [("records", 1)]
    db.sql("DELETE FROM ring_pieces")  # as it is before its turn has come
    settle(db)
    db.sql("INSERT INTO ring_pieces (ring, generation, since, since_position) VALUES (%s, %s, %s, %s)", *rows[0])
    assert states(db, "records") == ["active"]
