"""One event per event key and one execution per key, on both sides of a turn."""
import psycopg2
import pytest

from conftest import Pending, eventually, run
from rings import (  # noqa: F401 (the fixture server)
    ISOLATION, begin, copies, emit, fetch_all, fill, ring, rotate, save, seal, server, settle, states, stopped_at,
    turn_until)


# --- a key of a piece that is not the active one any more ---


def emit_pending(db, key, isolation):
    return Pending(db, f"BEGIN ISOLATION LEVEL {isolation}", "SELECT 1", f"SELECT outbox_emit(NULL, '{key}', 't', '{{}}')")


def result_or_state(pending):
    """The rows, or the SQLSTATE that the statement ended with."""
    try:
        return pending.result()
    except psycopg2.Error as error:
        return error.pgcode


@pytest.mark.parametrize("isolation", ISOLATION)
@pytest.mark.parametrize("end", ["COMMIT", "ROLLBACK", "ROLLBACK TO s"])
def test_an_event_key_on_both_sides_of_a_turn(db, isolation, end):
    fill(db, 1)
    first = begin(db, isolation)
    run(first, "SAVEPOINT s")
    position = emit(first, "k")
    rotate(db, "log")
    second, third = emit_pending(db, "k", isolation), emit_pending(db, "k", isolation)
    assert second.blocks() and third.blocks()
    run(first, end)
    if end == "COMMIT":
        expected = [(position,)] if isolation == "READ COMMITTED" else "40001"
        assert result_or_state(second) == result_or_state(third) == expected
        assert db.sql("SELECT id, tableoid::regclass::text FROM outbox_log WHERE event_key = 'k'") == [(position, "outbox_log_1")]
    else:
        winner, loser = (second, third) if not second.blocks() else (third, second)
        (new,), = winner.result()
        assert new > position
        assert loser.blocks()
        winner.run("COMMIT")
        assert result_or_state(loser) == ([(new,)] if isolation == "READ COMMITTED" else "40001")
        assert db.sql("SELECT id, tableoid::regclass::text FROM outbox_log WHERE event_key = 'k'") == [(new, "outbox_log_2")]
    second.close()
    third.close()


@pytest.mark.parametrize("end", ["COMMIT", "ROLLBACK"])
def test_an_event_key_of_a_prepared_transaction_across_a_turn_and_a_crash(server, db, end):
    fill(db, 1)
    first = begin(db)
    position = emit(first, "k")
    run(first, "PREPARE TRANSACTION 'k'")
    first.close()
    rotate(db, "log")
    db.close()
    server.pg_ctl("restart", "-m", "immediate")
    second = Pending(db, "SELECT outbox_emit(NULL, 'k', 't', '{}')")
    assert second.blocks()
    db.sql(f"{end} PREPARED 'k'")
    (answer,), = second.result()
    assert (answer == position) == (end == "COMMIT")
    second.close()
    assert copies(db, "k") == 1


@pytest.mark.parametrize("isolation", ISOLATION)
@pytest.mark.parametrize("end", ["COMMIT", "ROLLBACK", "ROLLBACK TO s"])
def test_a_key_on_both_sides_of_a_turn(server, db, isolation, end):
    begun = "SELECT outcome, response FROM idem_begin('k', 'h')"
    session = begin(db)
    save(session, "other")
    first = begin(db, isolation)
    run(first, "SET LOCAL retrysafe.idem_retention = '1h'")
    run(first, "SAVEPOINT s")
    assert run(first, begun) == [("new", None)]
    run(first, "SELECT idem_complete('k', '1')")
    rotate(db, "records")
    second = Pending(db, f"BEGIN ISOLATION LEVEL {isolation}", "SELECT 1", begun)
    assert second.blocks()
    run(first, end)
    if end == "COMMIT":
        assert result_or_state(second) == ([("replay", 1)] if isolation == "READ COMMITTED" else "40001")
        settle(db, "records")
        assert save(session, "k") == "replay"
    else:
        assert second.result() == [("new", None)]
        second.run("SET LOCAL retrysafe.idem_retention = '1h'")
        second.run("SELECT idem_complete('k', '2')")
        second.run("COMMIT")
        assert db.sql("SELECT tableoid::regclass::text FROM idem_records WHERE key = 'k'") == [("idem_records_2",)]
    second.close()
    if end == "ROLLBACK TO s":
        first.rollback()


def test_an_expired_key_is_begun_again_across_a_turn(db):
    """The expired record and the live one lie in two pieces; the live one counts, whatever becomes of the other."""
    session = begin(db)
    save(session, "k", "1")
    seal(db, "records")
    turn_until(db, "records", lambda: db.sql("SELECT outcome FROM idem_peek('k', 'h')") == [("unknown",)])
    run(session, "SET retrysafe.idem_retention = '1h'")
    session.commit()
    assert save(session, "k", "2") == "new"
    assert db.sql("SELECT response_json FROM idempotency_records WHERE key = 'k'") == [(2,)]
    settle(db, "records")
    assert db.sql("SELECT outcome, response FROM idem_peek('k', 'h')") == [("replay", 2)]
    rotate(db, "records") if len(ring(db, "records")) < 3 else None
    assert db.sql("SELECT outcome, response FROM idem_begin('k', 'h')") == [("replay", 2)]


# --- the race between looking and inserting ---


@pytest.mark.parametrize("isolation", ISOLATION)
@pytest.mark.parametrize("inside", ["transaction", "subtransaction"])
def test_losers_of_a_race_take_their_row_back(db, isolation, inside):
    fill(db, 1)
    call = [f"BEGIN ISOLATION LEVEL {isolation}", "SELECT 1", "SELECT outbox_emit(NULL, 'k', 't', '{}')"]
    if inside == "subtransaction":
        call[2:2] = ["SAVEPOINT s"]
    with stopped_at(db, "emit.before_insert", [call] * 3) as sessions:
        cleaner = Pending(db, "SELECT outbox_cleanup()")  # cannot rotate while they hold the ring lock
        cleaner.result()
        cleaner.close()
        assert states(db, "log") == ["active"]
    winner = eventually(lambda: next((one for one in sessions if not one.blocks()), None))
    (position,), = winner.result()
    losers = [one for one in sessions if one is not winner]
    assert all(one.blocks() for one in losers)
    winner.run("COMMIT")
    for one in losers:
        assert result_or_state(one) == ([(position,)] if isolation == "READ COMMITTED" else "40001")
        one.run("COMMIT" if inside == "transaction" or isolation == "READ COMMITTED" else "ROLLBACK TO s")
    assert db.sql("SELECT id FROM outbox_log WHERE event_key = 'k'") == [(position,)]
    for one in sessions:
        one.close()


def test_a_numbered_event_is_in_the_piece_that_was_active(db):
    """Nothing is looked up for it, but rotation waits for it all the same: positions grow from piece to piece."""
    fill(db, 1)
    call = ["BEGIN", "SELECT idem_begin('k', 'h')", "SELECT outbox_emit('k', NULL, 't', '{}')"]
    with stopped_at(db, "emit.before_insert", [call]) as sessions:
        cleaner = Pending(db, "SELECT outbox_cleanup()")
        cleaner.result()
        cleaner.close()
        assert states(db, "log") == ["active"]
    (position,), = sessions[0].result()
    rotate(db, "log")
    sessions[0].run("SELECT outbox_emit('k', NULL, 't', '{}')")
    sessions[0].run("SELECT idem_complete('k')")
    sessions[0].run("COMMIT")
    assert db.sql("SELECT id = %s, event_number, tableoid::regclass::text FROM outbox_log WHERE event_number > 0 ORDER BY id",
                  position) == [(True, 1, "outbox_log_1"), (False, 2, "outbox_log_2")]
    sessions[0].close()


@pytest.mark.parametrize("inside, end", [("transaction", "ROLLBACK"), ("subtransaction", "ROLLBACK"), ("subtransaction", "ROLLBACK TO s")])
def test_losers_of_a_race_whose_winner_rolls_back(db, inside, end):
    """Each of them has a row in the index that it took back; they do not wait for each other because of that."""
    call = ["BEGIN", "SELECT outbox_emit(NULL, 'k', 't', '{}')"]
    if inside == "subtransaction":
        call[1:1] = ["SAVEPOINT s"]
    with stopped_at(db, "emit.before_insert", [call] * 4) as sessions:
        pass
    waiting = list(sessions)
    for _ in range(3):
        winner = eventually(lambda: next((one for one in waiting if not one.blocks()), None))
        assert winner.result()
        waiting.remove(winner)
        assert all(one.blocks() for one in waiting)
        winner.run(end)
    (position,), = waiting[0].result()
    waiting[0].run("COMMIT")
    assert db.sql("SELECT id FROM outbox_log WHERE event_key = 'k'") == [(position,)]
    for one in sessions:
        one.close()


def test_who_waits_does_so_for_the_one_that_has_the_row(db):
    """Not for a loser that took its row back, and whose transaction may go on for long."""
    call = ["BEGIN", "SELECT outbox_emit(NULL, 'k', 't', '{}')"]
    with stopped_at(db, "emit.before_insert", [call] * 2) as sessions:
        pass
    winner = eventually(lambda: next((one for one in sessions if not one.blocks()), None))
    loser = next(one for one in sessions if one is not winner)
    (position,), = winner.result()
    third = Pending(db, "SELECT outbox_emit(NULL, 'k', 't', '{}')")
    assert third.blocks() and loser.blocks()
    winner.run("COMMIT")
    assert third.result() == [(position,)]
    assert loser.result() == [(position,)]  # and still open
    for one in (*sessions, third):
        one.close()


@pytest.mark.parametrize("later", ["", ", deliver_after => 'tomorrow'"])
def test_a_row_that_was_taken_back_is_in_nobodys_way(db, later):
    """Not even while the transaction that lost the race goes on: here the event it found is gone before it ends."""
    call = ["BEGIN", "SELECT outbox_emit(NULL, 'k', 't', '{}')"]
    with stopped_at(db, "emit.before_insert", [call] * 2) as sessions:
        pass
    winner = eventually(lambda: next((one for one in sessions if not one.blocks()), None))
    loser = next(one for one in sessions if one is not winner)
    position = winner.result()
    assert loser.blocks()
    winner.run("COMMIT")
    assert loser.result() == position
    db.sql("DELETE FROM outbox_log WHERE event_key = 'k'")
    third = Pending(db, f"SELECT outbox_emit(NULL, 'k', 't', '{{}}'{later})")
    assert not third.blocks() and len(third.result()) == 1
    assert db.sql("SELECT event_key FROM outbox_log UNION ALL SELECT event_key FROM outbox_scheduled") == [("k",)]
    for one in (*sessions, third):
        one.close()


def test_a_delayed_event_that_moves_beside_an_emit_of_its_key(db):
    """The mover and the emits meet in the log, on both sides of a turn."""
    db.sql("SELECT outbox_create_destination('d', 'pull')")
    for n in range(4):
        key = f"k{n}"
        fill(db, 1, f"filler{n}-")
        db.sql("SELECT outbox_emit(NULL, %s, 't', '{}', deliver_after => clock_timestamp() + '1 ms')", key)
        eventually(lambda: db.value("SELECT now() > max(deliver_after) FROM outbox_scheduled"))
        mover = Pending(db, "BEGIN", "SELECT event_key FROM outbox_fetch('d')")
        (*_, last), = mover.result()[-1:]
        assert last in (key, f"filler{n}-1")
        if n % 2:
            settle(db, "log")
        emitter = Pending(db, f"SELECT outbox_emit(NULL, '{key}', 't', '{{}}')")
        assert emitter.blocks()
        mover.run("COMMIT" if n < 2 else "ROLLBACK")
        answer = emitter.result()
        emitter.close()
        mover.close()
        keys = fetch_released(db)
        assert keys.count(key) == 1, keys
        assert answer[0][0] is None or copies(db, key) <= 1


def fetch_released(db):
    """What comes when nobody has a batch in hand any more."""
    db.sql("UPDATE outbox_shards SET holder = NULL, lease_until = NULL, token = token + 1")
    return fetch_all(db, "d")
