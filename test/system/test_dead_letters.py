"""Dead letters: what revives them, what gives them up, and in which order they go."""
from conftest import Pending, run
from operating import bury, dead, drain, emit, fail_first, fetch, status


def test_dead_letters_are_sent_again_in_order(db):
    db.sql("SELECT outbox_create_destination('d', 'pull')")
    for i in range(5):
        emit(db, f"p{i}", ordering_key="P")
        emit(db, f"q{i}", ordering_key="Q")
    bury(db, "d")
    assert sorted(dead(db)) == sorted(f"{k}{i}" for k in "pq" for i in range(5))
    row = db.sql("SELECT destination, reason, attempts, dead_since IS NOT NULL, event_id::text FROM outbox_dead_letters")[0]
    assert row[:4] == ("d", "refused: " + row[4], 1, True)
    emit(db, "p5", ordering_key="P")
    assert db.value("SELECT outbox_retry('d', ordering_key => 'P')") == 5
    assert drain(db, "d") == [f"p{i}" for i in range(6)]
    assert sorted(dead(db)) == [f"q{i}" for i in range(5)]
    assert db.value("SELECT outbox_retry('d')") == 5
    assert drain(db, "d") == [f"q{i}" for i in range(5)]
    assert dead(db) == [] and db.value("SELECT outbox_retry('d')") == 0


def test_filters_choose_dead_letters(db):
    db.sql("SELECT outbox_create_destination('d', 'pull')")
    db.sql("SELECT outbox_create_destination('e', 'pull')")
    for i in range(4):
        emit(db, f"a{i}", type=f"type{i % 2}")
    bury(db, "d")
    bury(db, "e")
    one = db.value("SELECT outbox_event_id('a3')")
    assert db.value("SELECT outbox_discard('d', reason_like => '%nothing%')") == 0
    assert db.value("SELECT outbox_retry('d', event_id => %s)", one) == 1
    assert drain(db, "d") == ["a3"]
    assert db.value("SELECT outbox_retry('d', event_type => 'type0', max_events => 1)") == 1
    assert drain(db, "d") == ["a0"]
    assert db.value("SELECT outbox_discard('d', reason_like => 'refused%')") == 2
    assert db.value("SELECT count(*) FROM outbox_dead_letters WHERE destination = 'd'") == 0
    assert db.value("SELECT count(*) FROM outbox_dead_letters WHERE destination = 'e'") == 4
    assert drain(db, "d") == []


def test_revived_events_go_before_a_later_one_that_waits(db):
    db.sql("SELECT outbox_create_destination('d', 'pull')")
    emit(db, "first", ordering_key="K")
    emit(db, "second", ordering_key="K")
    bury(db, "d")
    emit(db, "third", ordering_key="K")
    fail_first(db, "d", reason="later", retry_after="0")
    assert (status(db, "d")["parked_retry"], status(db, "d")["parked_blocked"]) == (1, 0)
    db.sql("SELECT outbox_retry('d')")
    assert (status(db, "d")["parked_retry"], status(db, "d")["parked_blocked"]) == (1, 2)
    assert drain(db, "d") == ["first", "second", "third"]


def test_discarding_the_head_lets_the_others_go(db):
    db.sql("SELECT outbox_create_destination('d', 'pull', on_exhausted => 'block')")
    for i in range(3):
        emit(db, f"k{i}", ordering_key="K")
    fail_first(db, "d", reason="never", dead=True)
    assert drain(db, "d") == []
    now = status(db, "d")
    assert (now["dead"], now["parked_blocked"]) == (1, 2)
    assert db.value("SELECT outbox_discard('d')") == 1
    assert drain(db, "d") == ["k1", "k2"]


def test_redrive_waits_for_a_record_that_is_under_way(db):
    db.sql("SELECT outbox_create_destination('d', 'pull')")
    emit(db, "a")
    bury(db, "d")
    emit(db, "b")
    batch, _ = fetch(db, "d")
    recorder = db.connect(autocommit=False)
    run(recorder, "SELECT outbox_ack(%s)", batch)
    redrive = Pending(db, "SELECT outbox_retry('d')")
    assert redrive.blocks()
    recorder.commit()
    assert redrive.result() == [(1,)]
    assert drain(db, "d") == ["a"]
