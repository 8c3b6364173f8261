"""A ring turns: it rotates, what is filled is sealed, retired and emptied, one step at a call, and no step waits for
anybody. Who writes or reads holds off a step, and is not held off."""
import subprocess

import pytest

from conftest import Pending, eventually, run
from null_destination import NullDestination
from rings import (  # noqa: F401 (the fixture server)
    begin, bytes_of, copies, dead_rows, emit, fetch_all, fill, held_by, ring, rotate, save, seal, server, setting,
    settle, states, step, stopped_at, turn_until, undisturbed)


# --- a turn of each ring ---


def test_a_turn_of_the_records(db):
    session = begin(db)
    assert save(session, "k") == "new"
    assert ring(db, "records") == [(1, "active", None)]
    seal(db, "records")
    assert save(session, "k") in ("replay", "new")  # it may have expired meanwhile
    turn_until(db, "records", lambda: ring(db, "records")[0][0] == 2)
    assert bytes_of(db, "records", 1) == 0
    for piece in 2, 3, 1, 2:
        assert ring(db, "records")[-1][:2] == (piece, "active")
        run(session, "SET retrysafe.idem_retention = '1s'")
        save(session, f"k{piece}")
        before = bytes_of(db, "records", piece)
        assert before > 0
        turn_until(db, "records", lambda: bytes_of(db, "records", piece) == 0)
    assert dead_rows(db, "idem_records_%") == 0


def test_a_turn_of_log_and_progress(db):
    db.sql("SELECT outbox_create_destination('d', 'pull', shards => 2)")
    db.sql("SELECT outbox_create_destination('slow', 'pull')")
    fill(db, 5)
    assert step(db, "log") == 1  # progress rotates,
    assert states(db, "progress") == ["filled", "active"]
    assert step(db, "log") == 1  # is sealed,
    assert states(db, "progress") == ["sealed", "active"]
    assert held_by(db, "progress") == ["log"]
    assert step(db, "log") == 1
    assert states(db, "log") == ["filled", "active"]
    assert step(db, "log") == 1
    assert ring(db, "log") == [(1, "sealed", ["destination d", "destination slow"]), (2, "active", None)]
    assert db.sql("SELECT name, holds_back_bytes > 0 FROM outbox_status ORDER BY name") == [("d", True), ("slow", True)]
    assert step(db, "log") == 0
    assert len(fetch_all(db, "d")) == 5
    assert held_by(db, "log") == ["destination slow"]
    assert db.sql("SELECT name, holds_back_bytes > 0 FROM outbox_status ORDER BY name") == [("d", False), ("slow", True)]
    settle(db, "log")
    assert states(db, "log") == ["sealed", "active"]
    assert copies(db, "e1") == 1
    assert fetch_all(db, "slow") == [f"e{i}" for i in range(1, 6)]
    turn_until(db, "log", lambda: states(db, "log")[0] == "retired")
    assert held_by(db, "log") == ["readers"]
    settle(db, "log")
    assert bytes_of(db, "log", 1) == 0
    assert copies(db, "e1") == 0
    turn_until(db, "progress", lambda: ring(db, "progress")[0][0] != 1 and bytes_of(db, "progress", 1) == 0)
    fill(db, 2, "next")
    assert sorted(fetch_all(db, "d")) == ["next1", "next2"] and fetch_all(db, "slow") == ["next1", "next2"]
    assert dead_rows(db, "outbox_log_%") == dead_rows(db, "outbox_batches_%") == dead_rows(db, "outbox_windows_%") == 0


def test_retention_by_name_and_its_end_at_run_time(server, db):
    session = db.connect()
    db.sql("SELECT outbox_create_destination('d', 'pull')")
    fill(db, 1)
    seal(db, "log")
    with setting(server, "retrysafe.outbox_retention", "1h", session):
        assert fetch_all(db, "d") == ["e1"]
        assert run(session, "SELECT outbox_cleanup()") == [(0,)]
        assert held_by(db, "log") == ["retention"]
    turn_until(db, "log", lambda: fetch_all(db, "d") == [] and copies(db, "e1") == 0)


def test_a_piece_is_left_when_it_is_large_enough(server, db):
    session = db.connect()
    with setting(server, "retrysafe.outbox_retention", "1h", session):
        fill(db, 100)
        assert run(session, "SELECT outbox_cleanup()") == [(0,)]
        with setting(server, "retrysafe.outbox_rotation_size", "1MB", session):
            assert run(session, "SELECT outbox_cleanup()") == [(0,)]
            db.sql("""SELECT outbox_emit(NULL, 'big' || t.i, 't', to_jsonb(random_text)) FROM generate_series(1, 400) AS i,
                      LATERAL (SELECT i, string_agg(md5(random()::text), '') FROM generate_series(1, 100)) AS t (i, random_text)""")
            assert run(session, "SELECT outbox_cleanup()") == [(1,)]
            assert states(db, "log") == ["filled", "active"]


@pytest.mark.slow
def test_a_worker_turns_the_rings_by_itself(server, db):
    """Also past a destination that gets nothing, whose progress is told for retention's sake alone."""
    session = db.connect()
    NullDestination(db, "d")
    NullDestination(db, "rare", event_types="'{rare}'")
    with setting(server, "retrysafe.idem_rotation_age", "1s", session):
        save(begin(db), "k")
        fill(db, 3)
        db.sql("SELECT outbox_run_worker()")
        eventually(lambda: copies(db, "e1") == 0 and bytes_of(db, "log", 1) == 0 and states(db, "log") == ["active"], 60)
        fill(db, 1, "wakes the worker up")
        eventually(lambda: db.value("SELECT count(*) FROM idem_records") == 0, 60)


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


def test_a_batch_in_hand_while_its_progress_is_retired(db):
    idle_shard(db)
    fill(db, 3)
    rows = db.sql("SELECT batch, id FROM outbox_fetch('d')")  # its window is stored
    settle(db, "progress")
    assert ring(db, "progress")[0][0] != 1
    db.sql("SELECT outbox_ack(%s, %s)", rows[0][0], rows[0][1])
    settle(db, "progress")
    db.sql("SELECT outbox_ack(%s)", rows[0][0])
    assert fetch_all(db, "d") == []
    assert db.sql("SELECT delivered FROM outbox_status") == [(4,)]


@pytest.mark.parametrize("call", [
    "SELECT {}", "SELECT {}, pg_sleep(0)", "SELECT n FROM {} AS n, generate_series(1, 2)",
    "WITH late AS (INSERT INTO public.late VALUES (1)) SELECT {}", "DO $$BEGIN PERFORM {}; END$$",
    "DO $$DECLARE n bigint; BEGIN FOR n IN SELECT {} LOOP END LOOP; END$$", "SELECT public.tidy()"])
@pytest.mark.parametrize("function, ring", [("outbox_cleanup()", "log"), ("idem_cleanup()", "records")])
def test_rings_do_not_turn_while_the_transaction_goes_on(db, function, ring, call):
    """They would hold up those who insert until its end, and its commit would not be waited for."""
    fill(db)
    assert save(begin(db), "old") == "new"
    eventually(lambda: db.value("SELECT max(since) < clock_timestamp() - interval '1 s' FROM ring_pieces"))
    db.sql(f"CREATE FUNCTION public.tidy() RETURNS bigint LANGUAGE sql AS $$SELECT retrysafe.{function}; SELECT 1::bigint$$")
    db.sql("CREATE TABLE public.late (n integer)")
    admin = begin(db) if call == "SELECT {}" else db.connect()
    run(admin, call.format(function))
    assert any("may go on after the call" in notice for notice in admin.notices)
    writer = Pending(db, "SELECT outbox_emit(NULL, 'k', 't', '{}')")
    assert not writer.blocks()
    writer.close()
    assert run(admin, "SHOW synchronous_commit") == [("on",)]
    if not admin.autocommit:
        admin.commit()
    assert states(db, ring) == ["active"]
    assert step(db, ring) == 1


def test_rings_do_not_turn_in_a_function_of_the_same_name(db):
    """The statement in it reads like that of the client."""
    fill(db)
    db.sql("""CREATE FUNCTION public.outbox_cleanup() RETURNS bigint LANGUAGE plpgsql SET search_path = retrysafe AS $$
                DECLARE n bigint; BEGIN FOR n IN SELECT outbox_cleanup() LOOP END LOOP; RETURN n; END$$""")
    admin = db.connect()
    run(admin, "SET search_path = public")
    run(admin, "SELECT outbox_cleanup()")
    assert any("may go on after the call" in notice for notice in admin.notices)
    assert states(db, "log") == ["active"]


@pytest.mark.parametrize("call", ["SELECT {}", "SELECT {} AS n", "SELECT * FROM {}"])
@pytest.mark.parametrize("protocol", ["simple", "extended", "prepared"])
@pytest.mark.parametrize("function, ring", [("outbox_cleanup()", "log"), ("idem_cleanup()", "records")])
def test_rings_turn_by_a_statement_of_their_own(db, tmp_path, function, ring, protocol, call):
    fill(db)
    assert save(begin(db), "old") == "new"
    eventually(lambda: db.value("SELECT max(since) < clock_timestamp() - interval '1 s' FROM ring_pieces"))
    script = tmp_path / "call.sql"
    script.write_text(call.format(f"retrysafe.{function}") + ";")
    subprocess.run([db.server.bindir() / "pgbench", "-n", "-t", "1", "-M", protocol, "-f", script, db.server.dsn(db.name)],
                   check=True, stdout=subprocess.DEVNULL)
    assert states(db, ring) == ["filled", "active"]


# --- writers and readers ---


def test_an_open_writer_keeps_its_piece_from_being_sealed(db):
    session = begin(db)
    run(session, "SET retrysafe.idem_retention = '1h'")
    save(session, "first")
    fill(db, 1, "first")
    writer = begin(db)
    run(writer, "SET retrysafe.idem_retention = '1h'")
    emit(writer, "open")
    run(writer, "SELECT idem_begin('open', 'h')")
    run(writer, "SELECT idem_complete('open', '1')")
    for name in "log", "records":
        rotate(db, name)
        settle(db, name)
        assert ring(db, name)[0] == (1, "filled", ["writers"])
    fill(db, 1)  # into the next one
    assert save(session, "next") == "new"
    writer.commit()
    for name in "log", "records":
        turn_until(db, name, lambda: states(db, name)[0] != "filled")
    assert save(session, "open") == "replay"


def test_a_prepared_writer_keeps_its_piece_over_a_restart(server, db):
    db.sql("SELECT outbox_create_destination('d', 'pull')")
    fill(db, 1)
    writer = begin(db)
    run(writer, "SET retrysafe.idem_retention = '1h'")
    run(writer, "SELECT idem_begin('k', 'h')")
    emit(writer, "prepared")
    run(writer, "SELECT idem_complete('k', '1')")
    run(writer, "PREPARE TRANSACTION 'ring writer'")
    writer.close()
    db.close()
    rotate(db, "log")
    server.pg_ctl("restart", "-m", "immediate")
    settle(db, "log")
    assert "sealed" not in states(db, "log")
    other = Pending(db, "SELECT outcome, response FROM idem_begin('k', 'h')")
    assert other.blocks()
    db.sql("COMMIT PREPARED 'ring writer'")
    assert other.result() == [("replay", 1)]
    other.close()
    turn_until(db, "log", lambda: "sealed" in states(db, "log"))
    assert sorted(fetch_all(db, "d")) == ["e1", "prepared"]
    turn_until(db, "log", lambda: fetch_all(db, "d") == [] and copies(db, "prepared") == 0)


def test_readers_hold_off_nothing_but_the_emptying(db):
    """A dump that takes hours: writers go on, each step but the last is taken."""
    db.sql("SELECT outbox_create_destination('d', 'pull')")
    fill(db, 1, "first")
    session = begin(db)
    save(session, "k")
    reader = begin(db, "REPEATABLE READ")
    tables = run(reader, """SELECT string_agg(i.inhrelid::regclass::text, ', ') FROM pg_inherits i
                             WHERE inhparent::regclass::text IN ('outbox_log', 'outbox_windows', 'outbox_batches', 'idem_records')""")
    run(reader, f"LOCK {tables[0][0]} IN ACCESS SHARE MODE")
    for n in range(6):
        fill(db, 1, f"n{n}-")
        fetch_all(db, "d")
        settle(db)
        writer = Pending(db, f"SELECT outbox_emit(NULL, 'w{n}', 't', '{{}}')")
        assert not writer.blocks()
        writer.close()
    turn_until(db, "log", lambda: fetch_all(db, "d") == [] and states(db, "log")[0] == "retired")
    assert ring(db, "log")[0] == (1, "retired", ["readers"])
    turn_until(db, "records", lambda: ring(db, "records")[0] == (1, "retired", ["readers"]))
    assert bytes_of(db, "log", 1) > 0
    assert save(session, "k2") == "new"
    reader.rollback()
    settle(db)
    assert bytes_of(db, "log", 1) == 0
    fetch_all(db, "d")


def test_a_ring_that_turns_while_it_is_looked_at(db):
    """What the reader knew of is retired by then, and emptied when no snapshot is left that needs it."""
    db.sql("SELECT outbox_create_destination('d', 'pull')")
    with stopped_at(db, "ring.before_snapshot", [["SELECT event_key FROM outbox_fetch('d')"]]) as (reader,):
        other = undisturbed(db)
        while run(other, "SELECT outbox_cleanup()") == [(1,)]:
            pass
        assert run(other, "SELECT state, held_by FROM ring_status WHERE ring = 'progress' ORDER BY generation LIMIT 1") \
            == [("retired", ["readers"])]
        run(other, "SELECT outbox_emit(NULL, 'e', 't', '{}')")
    assert reader.result() in ([], [("e",)])
    reader.close()
    settle(db, "progress")
    assert bytes_of(db, "progress", 1) == 0


# --- who turns a ring is not who writes to it ---


def test_a_transaction_does_not_seal_what_it_has_written(db):
    """Its own locks do not keep it off."""
    db.sql("SELECT outbox_create_destination('d', 'pull')")
    fill(db)
    gate = db.connect()
    run(gate, "SELECT pg_advisory_lock(1), pg_advisory_lock(2)")
    writer = Pending(db, """DO $$BEGIN
        PERFORM outbox_emit(NULL, 'mine', 't', '{}');
        PERFORM pg_advisory_xact_lock(1);
        PERFORM outbox_cleanup() FROM generate_series(1, 4);
        PERFORM pg_advisory_xact_lock(2);
      END$$""")
    assert writer.blocks()
    rotate(db, "log")
    run(gate, "SELECT pg_advisory_unlock(1)")
    assert writer.blocks()
    assert states(db, "log") == ["filled", "active"]
    fill(db, 1, "other")
    assert fetch_all(db, "d") == ["e1", "other1"]
    run(gate, "SELECT pg_advisory_unlock(2)")
    writer.result()
    settle(db, "log")
    assert fetch_all(db, "d") == ["mine"]


def test_what_a_trigger_writes_keeps_its_piece(db):
    """What the clean-up removes can make an administrator's trigger write, in the transaction that is about to turn the ring."""
    assert save(begin(db), "old") == "new"
    db.sql("SELECT idem_begin('short', 'h', ttl => '1 microsecond'), idem_complete('short')")
    db.sql("""CREATE FUNCTION public.note() RETURNS trigger LANGUAGE plpgsql AS $$BEGIN
                PERFORM retrysafe.idem_begin('k', 'h'); PERFORM retrysafe.idem_complete('k');
                PERFORM pg_advisory_xact_lock(1); RETURN OLD; END$$""")
    db.sql("CREATE TRIGGER note BEFORE DELETE ON idem_records_with_ttl FOR EACH ROW EXECUTE FUNCTION public.note()")
    gate = db.connect()
    run(gate, "SELECT pg_advisory_lock(1)")
    tidy = Pending(db, "SELECT idem_cleanup()")
    assert tidy.blocks()
    rotate(db, "records")
    run(gate, "SELECT pg_advisory_unlock(1)")
    assert tidy.result() == [(1,)]
    tidy.close()
    assert states(db, "records") == ["filled", "active"]
    assert step(db, "records") == 1
    assert states(db, "records") == ["sealed", "active"]


def test_nobody_waits_while_the_clean_up_removes(db):
    """The ring is turned afterwards: who writes waits for the end of a transaction that has done so."""
    assert save(begin(db), "old") == "new"
    db.sql("SELECT idem_begin('short', 'h', ttl => '1 microsecond'), idem_complete('short')")
    db.sql("CREATE TABLE public.seen (locks bigint)")
    db.sql("""CREATE FUNCTION public.look() RETURNS trigger LANGUAGE plpgsql AS $$BEGIN
                INSERT INTO public.seen SELECT count(*) FROM pg_locks WHERE pid = pg_backend_pid() AND mode = 'ShareRowExclusiveLock';
                RETURN OLD; END$$""")
    db.sql("CREATE TRIGGER look BEFORE DELETE ON idem_records_with_ttl FOR EACH ROW EXECUTE FUNCTION public.look()")
    eventually(lambda: db.value("SELECT max(since) < clock_timestamp() - interval '1 s' FROM ring_pieces WHERE ring = 'records'"))
    assert step(db, "records") == 2  # a row and a step
    assert db.value("SELECT locks FROM public.seen") == 0


def test_what_was_written_through_a_cursor_keeps_its_piece(db):
    """A cursor that fails in a block of its own takes its locks along, and leaves what earlier fetches have written."""
    db.sql("SELECT outbox_create_destination('d', 'pull')")
    fill(db)
    assert save(begin(db), "old") == "new"
    writer = begin(db)
    run(writer, """SELECT idem_begin('k', 'h');
        DO $$DECLARE
          emits CURSOR FOR SELECT CASE i WHEN 1 THEN outbox_emit('k', NULL, 't', '{}') ELSE 1 / (i - 2) END FROM generate_series(1, 2) i;
          answers CURSOR FOR SELECT CASE i WHEN 1 THEN idem_complete('k')::text ELSE (1 / (i - 2))::text END FROM generate_series(1, 2) i;
          said text;
        BEGIN
          OPEN emits; OPEN answers;
          FOR n IN 1..2 LOOP
            BEGIN FETCH emits INTO said; EXCEPTION WHEN division_by_zero THEN NULL; END;
            BEGIN FETCH answers INTO said; EXCEPTION WHEN division_by_zero THEN NULL; END;
          END LOOP;
        END$$""")
    rotate(db, "log")
    rotate(db, "records")
    settle(db)
    assert [held_by(db, name) for name in ("log", "records")] == [["writers"], ["writers"]]
    writer.commit()
    assert fetch_all(db, "d") == ["e1", "k~1"]
    assert db.value("SELECT count(*) FROM idempotency_records WHERE key = 'k'") == 1
