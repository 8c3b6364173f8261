"""What somebody needs stays while the rings turn: events that a destination has not recorded, where destinations stand, and
answers that have not expired."""
import pytest

from conftest import Pending, run
from operating import pass_a_minute
from rings import (  # noqa: F401 (the fixture server)
    begin, bytes_of, copies, emit, fetch_all, fill, held_by, ring, save, seal, server, setting, settle,
    sqlstate_of, states, turn_until)


# --- events ---


def turn_all(db, *destinations, rounds=8):
    """As far as the rings go, with traffic that nobody else asked for taken away."""
    for n in range(rounds):
        settle(db, "log")
        for name in destinations:
            fetch_all(db, name)


def test_a_shard_that_somebody_removed_keeps_what_it_has_not_had(db):
    db.sql("SELECT outbox_create_destination('d', 'pull', shards => 2)")
    fill(db, 3)
    db.sql("TRUNCATE outbox_shards")
    assert db.sql("SELECT state, backlog FROM outbox_status") == [("unclaimed", None)]
    turn_all(db)
    assert (states(db, "log"), held_by(db, "log")) == (["sealed", "active"], ["destination d"])
    assert copies(db, "e1") == 1


@pytest.mark.parametrize("hold", ["slow", "paused", "in hand"])
def test_what_a_destination_has_not_recorded_stays(db, hold):
    db.sql("SELECT outbox_create_destination('d', 'pull')")
    db.sql("SELECT outbox_create_destination('other', 'pull')")
    if hold == "paused":
        db.sql("SELECT outbox_pause('d')")
    fill(db, 5)
    batch = db.sql("SELECT batch FROM outbox_fetch('d')")[0][0] if hold == "in hand" else None
    for n in range(8):
        fill(db, 1, f"more{n}-")
        turn_all(db, "other", rounds=2)
    assert [s for s in states(db, "log")][0] == "sealed" and held_by(db, "log") == ["destination d"]
    assert len(ring(db, "log")) == 3
    if hold == "paused":
        db.sql("SELECT outbox_resume('d')")
    if batch:
        db.sql("SELECT outbox_ack(%s)", batch)
    got = fetch_all(db, "d")
    assert got == ([] if batch else [f"e{i}" for i in range(1, 6)]) + [f"more{n}-1" for n in range(8)]
    turn_until(db, "log", lambda: fetch_all(db, "d") == fetch_all(db, "other") == [] and copies(db, "e1") == 0)


def test_a_late_commit_across_turns(db):
    db.sql("SELECT outbox_create_destination('d', 'pull', shards => 2)")
    fill(db, 1, "first")
    late = begin(db)
    emit(late, "late")
    for n in range(8):
        fill(db, 1, f"n{n}-")
        turn_all(db, "d", rounds=2)
    assert ring(db, "log")[0][:2] == (1, "filled")
    late.commit()
    settle(db, "log")
    assert copies(db, "late") == 1
    assert fetch_all(db, "d") == ["late"]
    turn_until(db, "log", lambda: fetch_all(db, "d") == [] and copies(db, "late") == 0)


def test_parked_events_outlive_the_log(db):
    db.sql("SELECT outbox_create_destination('d', 'pull', backoff => '1 ms')")
    fill(db, 1, "retry", "k")
    fill(db, 1, "behind", "k")
    fill(db, 1, "dead")
    rows = db.sql("SELECT batch, event_id, event_key FROM outbox_fetch('d')")
    ids = {key: event_id for _, event_id, key in rows}
    db.sql("SELECT outbox_nack(%s, %s, retry_after => '1 hour')", rows[0][0], ids["retry1"])
    db.sql("SELECT outbox_nack(%s, %s, dead => true)", rows[0][0], ids["dead1"])
    db.sql("SELECT outbox_ack(%s)", rows[0][0])
    turn_until(db, "log", lambda: fetch_all(db, "d") == [] and copies(db, "retry1") == 0)
    turn_until(db, "progress", lambda: bytes_of(db, "progress", 1) == 0)
    assert db.sql("SELECT event_key FROM outbox_dead_letters") == [("dead1",)]
    db.sql("UPDATE outbox_parked SET retry_at = now() WHERE state = 'retry'")
    db.sql("SELECT outbox_retry('d')")
    assert sorted(fetch_all(db, "d")) == ["behind1", "dead1", "retry1"]
    settle(db, "log")
    assert db.sql("SELECT * FROM outbox_parked") == []


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


def test_the_end_of_a_window_without_events_is_told_for_retention(db):
    """The last events of its window were recorded, and behind them are only those of another shard."""
    db.sql("SELECT outbox_create_destination('d', 'pull', event_types => '{wanted}')")
    fill(db, 1, "before")
    seal(db, "log")
    db.sql("SELECT outbox_emit(NULL, 'a', 'wanted', '{}')")
    fill(db, 3, "unwanted")
    rows = db.sql("SELECT batch, event_key FROM outbox_fetch('d', 1)")
    assert [key for _, key in rows] == ["a"]
    db.sql("SELECT outbox_ack(%s)", rows[0][0])
    assert fetch_all(db, "d") == []
    settle(db, "log")
    assert copies(db, "before1") == 0


# --- where destinations stand ---


def test_where_a_new_destination_stands_is_copied_forward(db):
    """Its start is all that the ring of progress has."""
    db.sql("SELECT outbox_create_destination('d', 'pull', shards => 2)")
    settle(db, "progress")
    assert bytes_of(db, "progress", 1) == 0
    assert db.value("SELECT count(*) FROM outbox_batches") == 2
    fill(db, 3)
    assert len(fetch_all(db, "d")) == 3


def key_of_shard(db, destination, shard):
    """An ordering key whose events go to that shard of two."""
    for n in range(100):
        fill(db, 1, f"probe-{shard}-{n}-", f"key{n}")
        batch = db.sql("SELECT batch FROM outbox_fetch(%s)", destination)[0][0]
        db.sql("SELECT outbox_ack(%s)", batch)
        if db.value("SELECT shard FROM outbox_batches WHERE delivered > 0 ORDER BY published_at DESC LIMIT 1") == shard:
            return f"key{n}"
    raise AssertionError("no key for the shard")


@pytest.mark.parametrize("era", [False, True])
def test_a_shard_that_rests_while_others_work(db, era):
    """Its place goes from piece to piece; it goes on there, in a new era too, and with a window half read."""
    db.sql("SELECT outbox_create_destination('d', 'pull', shards => 2)")
    busy, resting = key_of_shard(db, "d", 0), key_of_shard(db, "d", 1)
    fill(db, 1, "before", resting)
    assert fetch_all(db, "d") == ["before1"]
    generation = "SELECT max(generation) FROM ring_pieces WHERE ring = 'progress'"
    start = db.value(generation)
    for n in range(30):
        fill(db, 1, f"busy{n}-", busy)
        assert fetch_all(db, "d") == [f"busy{n}-1"]
        settle(db, "log")
    assert db.value(generation) > start + 6
    fill(db, 4, "after", resting)
    if era:
        rows = db.sql("SELECT batch, id FROM outbox_fetch('d')")
        db.sql("SELECT outbox_ack(%s, %s)", rows[0][0], rows[1][1])
        db.sql("SELECT outbox_release(%s)", rows[0][0])
        db.sql("SELECT outbox_consent('fork')")
        settle(db, "log")
        fill(db, 1, "fresh", resting)
        assert fetch_all(db, "d") == ["after3", "after4", "fresh1"]
    else:
        assert fetch_all(db, "d") == ["after1", "after2", "after3", "after4"]
    for n in range(5):
        fill(db, 1, f"more{n}-", busy)
        assert fetch_all(db, "d") == [f"more{n}-1"]
        settle(db, "log")
    fill(db, 1, "last", resting)
    assert fetch_all(db, "d") == ["last1"]


def test_destinations_that_change_while_rings_turn(db):
    db.sql("SELECT outbox_create_destination('d', 'pull')")
    for shards in (3, 1, 2):
        fill(db, 5, f"s{shards}-")
        assert len(fetch_all(db, "d")) == 5
        turn_all(db, "d")
        db.sql("SELECT outbox_alter_destination('d', shards => %s)", shards)
        turn_all(db, "d")
    fill(db, 5, "x")
    assert sorted(fetch_all(db, "d")) == [f"x{i}" for i in range(1, 6)]
    assert db.sql("SELECT delivered FROM outbox_status") == [(20,)]
    turn_until(db, "log", lambda: fetch_all(db, "d") == [] and copies(db, "x1") == 0)
    db.sql("SELECT outbox_drop_destination('d')")
    fill(db, 2, "kept")
    db.sql("SELECT outbox_create_destination('d', 'pull', start_at => 'earliest')")
    assert fetch_all(db, "d") == ["kept1", "kept2"]
    turn_until(db, "log", lambda: fetch_all(db, "d") == [] and copies(db, "kept1") == 0)


def test_a_change_of_shards_takes_no_retention_away(server, db):
    """What the old shards recorded a moment ago is kept as long as if they were still there. A new destination keeps nothing
    from before its start."""
    db.sql("SELECT outbox_create_destination('d', 'pull')")
    fill(db)
    seal(db, "log")
    assert fetch_all(db, "d") == ["e1"]
    session = db.connect()
    with setting(server, "retrysafe.outbox_retention", "1h", session):
        db.sql("UPDATE ring_pieces SET since = since - interval '3 h', sealed_at = sealed_at - interval '2 h'")
        settle(db, "log")
        assert (held_by(db, "log"), copies(db, "e1")) == (["retention"], 1)
        db.sql("SELECT outbox_alter_destination('d', shards => 3)")
        db.sql("SELECT outbox_create_destination('new', 'pull')")
        settle(db, "log")
        assert (held_by(db, "log"), copies(db, "e1")) == (["retention"], 1)
        db.sql("UPDATE outbox_batches SET published_at = published_at - interval '2 h'"
               " WHERE destination = (SELECT destination FROM outbox_destinations WHERE name = 'd')")
        turn_until(db, "log", lambda: copies(db, "e1") == 0)


def test_a_lost_destination_does_not_stop_anything_else(server, db):
    """Where it stood is copied forward like the place of any other: consent and acknowledgements come across it."""
    session = db.connect()
    db.sql("SELECT outbox_create_destination('d', 'pull')")
    db.sql("SELECT outbox_create_destination('dead', 'pull', start_at => 'earliest')")
    fill(db, 1)
    batch, = db.sql("SELECT batch FROM outbox_fetch('dead')")[0]
    db.sql("SELECT outbox_emit(NULL, 'big' || i, 't', to_jsonb(i::text || repeat('x', 1000))) FROM generate_series(1, 2000) i")
    db.sql("SELECT outbox_emit(NULL, 'wide' || i, 't', (SELECT jsonb_agg(random()) FROM generate_series(1, 200 + i * 0))) FROM generate_series(1, 400) i")
    fetch_all(db, "d")
    seal(db, "log")
    fill(db, 1, "next")
    with setting(server, "retrysafe.max_retained_bytes", "1MB", session):
        pass_a_minute(db)
        busy = begin(db)
        run(busy, "SELECT FROM outbox_destinations WHERE name = 'dead' FOR UPDATE")  # as outbox_alter_destination does
        cleaner = Pending(db, "SELECT outbox_cleanup()")
        assert not cleaner.blocks()
        cleaner.close()
        busy.rollback()
        turn_until(db, "log", lambda: fetch_all(db, "d") is not None and copies(db, "big1") == 0)
    assert db.sql("SELECT name FROM outbox_status WHERE state = 'lost'") == [("dead",)]
    for n in range(12):
        fill(db, 1, f"n{n}-")
        fetch_all(db, "d")
        settle(db, "log")
    assert sqlstate_of(db.sql, "SELECT * FROM outbox_fetch('dead')") == "RS218"
    assert sqlstate_of(db.sql, "SELECT outbox_ack(%s)", batch) in (None, "RS210", "RS218")
    db.sql("SELECT outbox_consent('fork')")
    fill(db, 1, "after")
    assert fetch_all(db, "d") == ["after1"]
    db.sql("SELECT outbox_drop_destination('dead')")
    db.sql("SELECT outbox_create_destination('dead', 'pull', start_at => 'earliest')")
    assert "after1" in fetch_all(db, "dead")


def test_when_kept_events_were_sent_stays_told(db):
    db.sql("SELECT outbox_create_destination('d', 'pull')")
    for n in range(10):
        fill(db, 1, f"n{n}-")
        fetch_all(db, "d")
        settle(db, "log")
        if n == 4:
            db.sql("SELECT outbox_create_destination('slow', 'pull', event_types => '{none, t}')")
        unsent = db.sql("SELECT event_key FROM outbox_events WHERE sent_at IS NULL")
        assert unsent == [] if n < 5 else {key for key, in unsent} <= {f"n{m}-1" for m in range(5, n + 1)}
    told = dict(db.sql("""SELECT event_key, outbox_recorded_at(d.destination, 1, NULL, id, txid, event_type, NULL)
                            FROM outbox_events, outbox_destinations d WHERE d.name = 'd'"""))
    for n in range(10):
        settle(db, "log")
        fetch_all(db, "d")
    again = dict(db.sql("""SELECT event_key, outbox_recorded_at(d.destination, 1, NULL, id, txid, event_type, NULL)
                             FROM outbox_events, outbox_destinations d WHERE d.name = 'd'"""))
    assert again.items() <= told.items() and {f"n{m}-1" for m in range(5, 10)} <= again.keys()
    assert all(at.year < 3000 for at in again.values())


# --- answers ---


def test_a_record_that_lives_long_keeps_its_piece(db):
    session = begin(db)
    run(session, "SET retrysafe.idem_retention = '1h'")
    session.commit()
    assert save(session, "long") == "new"
    short = begin(db)
    save(short, "short")
    seal(db, "records")
    turn_until(db, "records", lambda: save(short, "short") == "new")
    settle(db, "records")
    assert ring(db, "records")[0] == (1, "sealed", ["retention"])
    assert save(short, "long") == "replay"
    db.sql("SELECT idem_forget('long')")
    assert save(short, "long") == "new"
