"""The background worker: what it delivers, when it wakes, and what it leaves alone."""
import pytest

from conftest import cluster, database_on, eventually, run
from null_destination import RETRY, UNREACHABLE, NullDestination, emit
from workers import is_idle, let_look, own  # noqa: F401 (the fixture own)


def test_events_arrive_once_and_in_order(db):
    d = NullDestination(db)
    keys = [f"e{i}" for i in range(200)]
    emit(db, *keys, ordering_key="one")
    eventually(lambda: len(d.delivered()) >= 200)
    assert d.delivered() == keys
    published = {str(event_id) for (event_id,) in db.sql("SELECT event_id FROM outbox_events")}
    assert {a.id for a in d.attempts()} == published
    eventually(lambda: db.value("SELECT bool_and(sent_at IS NOT NULL) FROM outbox_events"))


@pytest.mark.parametrize("way", ["alter", "resume", "pause and resume"])
def test_an_operator_ends_the_back_off(db, way):
    """Who has repaired something need not wait for the end of an hour."""
    d = NullDestination(db, backoff="interval '1 h'", backoff_max="interval '1 h'")
    d.tell("unreachable")
    emit(db, "a")
    eventually(lambda: d.status()["state"] == "backing off")
    d.tell("ok")
    if way == "alter":
        db.sql("SELECT outbox_alter_destination('d', options => '{\"delay_ms\": 0}')")
    if way == "pause and resume":
        db.sql("SELECT outbox_pause('d')")
        eventually(lambda: d.status()["holders"] is None)
    if way != "alter":
        db.sql("SELECT outbox_resume('d')")
    eventually(lambda: d.delivered() == ["a"])
    eventually(lambda: (d.status()["state"], d.status()["failures"]) == ("idle", 0))


def test_events_for_others_leave_a_destination_idle(db):
    """What it does not want does not count as backlog for ever, though nothing else happens."""
    d = NullDestination(db, event_types="'{wanted}'")
    emit(db, "a", "b")
    eventually(lambda: (d.status()["state"], d.status()["backlog"]) == ("idle", 0), timeout=60)
    assert d.status()["oldest_pending_age"] is None
    assert d.attempts() == []
    batches = db.value("SELECT count(*) FROM outbox_batches")
    assert batches <= 3, "once, not again and again"


def test_positions_without_events_leave_a_destination_idle(db):
    """Rolled back events, and rings that turn, draw positions too."""
    d = NullDestination(db)
    session = db.connect(autocommit=False)
    run(session, "SELECT outbox_emit(NULL, 'gone', 't', '1')")
    session.rollback()
    eventually(lambda: (d.status()["state"], d.status()["backlog"]) == ("idle", 0), timeout=60)


@pytest.fixture(scope="module")
def quiet():
    """Where the poll interval is an hour: what arrives was announced."""
    with cluster("retrysafe.poll_interval = 1h") as server:
        yield server


@pytest.mark.alone
def test_a_commit_wakes_the_worker(quiet):
    with database_on(quiet) as db:
        d = NullDestination(db)
        for i in range(20):
            emit(db, f"e{i}")
            eventually(lambda: len(d.delivered()) == i + 1, timeout=5)


@pytest.mark.alone
@pytest.mark.parametrize("call", ["SELECT outbox_emit(NULL, 'e2', 't', '1')",
                                  "SELECT outbox_emit(NULL, 'e2', 't', '1', deliver_after => clock_timestamp() + '1 s')",
                                  "SELECT outbox_resume('d')"])
def test_the_commit_wakes_the_worker_not_the_call(quiet, call):
    """At the call there is nothing to find yet: the worker looks after it, in vain, until it would not look again by itself."""
    with database_on(quiet) as db:
        db.sql("SELECT outbox_create_destination('other', 'pull')")
        d = NullDestination(db)
        emit(db, "e1")
        eventually(lambda: d.delivered() == ["e1"])
        if "resume" in call:
            db.sql("SELECT outbox_pause('d')")
            emit(db, "e2")
        session = db.connect(autocommit=False)
        run(session, call)
        let_look(db, "other")
        eventually(lambda: is_idle(db))
        assert d.delivered() == ["e1"]
        session.commit()
        eventually(lambda: d.delivered() == ["e1", "e2"], timeout=5)


@pytest.mark.alone
def test_delayed_events_come_when_due(db):
    d = NullDestination(db)
    db.sql("SELECT outbox_emit(NULL, 'late', 't', '1', deliver_after => clock_timestamp() + interval '1.5 s')")
    emit(db, "now")
    eventually(lambda: d.delivered() == ["now"])
    eventually(lambda: d.delivered() == ["now", "late"], timeout=5)


def test_a_failed_event_is_tried_again_and_dies_at_last(db):
    d = NullDestination(db, options='"refuse": "bad"', max_attempts=3, backoff="interval '50 ms'")
    emit(db, "good1", "bad", "good2")
    eventually(lambda: d.status()["dead"] == 1)
    assert d.delivered() == ["good1", "good2"]

    d.tell("retry")
    emit(db, "slow")
    eventually(lambda: len([a for a in d.attempts(RETRY) if a.key == "slow"]) >= 2)
    d.tell("ok")
    eventually(lambda: "slow" in d.delivered() or d.status()["dead"] == 2)


def test_an_unreachable_destination_costs_nothing(db):
    """P6: no attempts burnt, no writes per event, one line in the log, and the other destination goes on."""
    away = NullDestination(db, "away", backoff="interval '50 ms'", backoff_max="interval '200 ms'")
    other = NullDestination(db, "other")
    away.tell("unreachable")
    before = db.server.log().count('destination "away" is unreachable')
    keys = [f"e{i}" for i in range(50)]
    emit(db, *keys, ordering_key="k")
    eventually(lambda: other.delivered() == keys)
    eventually(lambda: len(away.attempts(UNREACHABLE)) > 8)
    status = away.status()
    assert status["state"] == "backing off" or status["failures"] > 0
    assert (status["parked_retry"], status["parked_blocked"], status["dead"]) == (0, 0, 0)
    assert db.server.log().count('destination "away" is unreachable') == before + 1
    away.tell("ok")
    eventually(lambda: away.delivered() == keys)
    assert {a.number for a in away.attempts()} == {"1"}
    eventually(lambda: 'destination "away" is back after' in db.server.log())


def test_an_event_that_breaks_its_destination_stops_no_other(db):
    """It is the last of what was there when the worker looked, and what comes later has to go beside it."""
    d = NullDestination(db, options='"breaks": "bad"', backoff="'100 ms'", backoff_max="'200 ms'")
    with db.connect(autocommit=False) as connection:
        for key in "a", "bad-1", "bad-2":
            run(connection, "SELECT outbox_emit(NULL, %s, 't', '{}')", key)
    eventually(lambda: d.status()["delivered"] == 1 and d.status()["failures"] > 0)
    emit(db, "b", "bad-3")
    eventually(lambda: d.status()["delivered"] == 2)
    emit(db, "c")
    eventually(lambda: d.status()["delivered"] == 3)
    assert set(d.delivered()) == {"a", "b", "c"}


@pytest.mark.parametrize("limit", [{"batch_events": 1}, {"batch_bytes": 10000}], ids=["events", "bytes"])
def test_an_event_that_breaks_its_destination_alone_in_its_batch_stops_no_other(db, limit):
    d = NullDestination(db, options='"breaks": "bad"', backoff="'100 ms'", backoff_max="'200 ms'", **limit)
    large = "SELECT outbox_emit(NULL, %s, 't', to_jsonb(repeat('x', 20000)))"
    db.sql(large, "bad")
    eventually(lambda: d.status()["failures"] > 0)
    for key in "a", "b":
        db.sql(large, key)
    eventually(lambda: d.status()["delivered"] == 2)
    assert set(d.delivered()) == {"a", "b"}


def test_an_event_that_breaks_its_destination_far_before_the_next_one_stops_no_other(db):
    """Between them are more rows for others than are looked at in one go."""
    d = NullDestination(db, options='"breaks": "bad"', backoff="'100 ms'", backoff_max="'200 ms'", event_types="'{t}'")
    emit(db, "bad")
    eventually(lambda: d.status()["failures"] > 0)
    for key in "a", "b":
        db.sql("SELECT count(outbox_emit(NULL, %s || i, 'other', '{}')) FROM generate_series(1, 25000) i", key)
        emit(db, key)
    eventually(lambda: set(d.delivered()) == {"a", "b"})


def test_a_sink_that_forgets_to_ask_for_a_call_is_looked_after(db):
    """It has an outcome and tells nobody: it is asked at the latest when the lease is renewed."""
    d = NullDestination(db, lease="interval '2 s'")
    d.tell("forget")
    emit(db, "a")
    eventually(lambda: d.status()["state"] == "publishing")
    d.tell("ok")
    eventually(lambda: d.status()["delivered"] == 1)
    assert d.delivered() == ["a"]


def test_a_destination_that_cannot_be_opened_says_why(db):
    d = NullDestination(db, options='"broken": "no such thing"')
    emit(db, "e1")
    eventually(lambda: d.status()["last_error"] == "no such thing")
    db.sql("SELECT outbox_alter_destination('d', '{\"broken\": null}')")
    db.sql("SELECT outbox_resume('d')")
    eventually(lambda: d.delivered() == ["e1"])


def test_pause_alter_and_drop_reach_the_worker(db):
    d = NullDestination(db)
    emit(db, "e1")
    eventually(lambda: d.delivered() == ["e1"])
    db.sql("SELECT outbox_pause('d')")
    eventually(lambda: not d.status()["holders"])
    emit(db, "e2")
    db.sql("SELECT outbox_alter_destination('d', '{\"refuse\": \"e3\"}')")
    db.sql("SELECT outbox_resume('d')")
    emit(db, "e3", "e4")
    eventually(lambda: d.delivered() == ["e1", "e2", "e4"])
    assert d.status()["dead"] == 1
    db.sql("SELECT outbox_drop_destination('d')")
    eventually(lambda: db.value("SELECT shards FROM outbox_workers WHERE database = current_database()") == 0)


def test_publish_off_stops_and_on_starts(own_db):
    d = NullDestination(own_db)
    own_db.server.set("retrysafe.publish", "off")
    try:
        eventually(lambda: own_db.value("SELECT state FROM outbox_workers WHERE database = current_database()")
                   == "suspended")
        emit(own_db, "e1")
        let_look(own_db)
        assert d.delivered() == []
    finally:
        own_db.server.set("retrysafe.publish", None)
    eventually(lambda: d.delivered() == ["e1"])


def test_commit_prepared_is_found_by_polling(own_db):
    d = NullDestination(own_db)
    session = own_db.connect(autocommit=False)
    run(session, "SELECT outbox_emit(NULL, 'prepared', 't', '1')")
    run(session, "PREPARE TRANSACTION 'p1'")
    emit(own_db, "later")
    eventually(lambda: d.delivered() == ["later"])
    eventually(lambda: is_idle(own_db))  # whatever the commit of `later` rang for has been looked at
    own_db.sql("COMMIT PREPARED 'p1'")
    eventually(lambda: d.delivered() == ["later", "prepared"], timeout=10)


@pytest.mark.parametrize("prepared", ["SELECT outbox_resume('d')",
                                      "SELECT outbox_emit(NULL, 'e2', 't', '1', deliver_after => clock_timestamp() + '1 s')"])
def test_what_draws_no_position_is_found_after_commit_prepared(own_db, prepared):
    """Nobody rings for it, and the counter by which a poll knows events does not move."""
    d = NullDestination(own_db)
    emit(own_db, "e1")
    eventually(lambda: d.delivered() == ["e1"])
    if "resume" in prepared:
        own_db.sql("SELECT outbox_pause('d')")
        emit(own_db, "e2")
    eventually(lambda: is_idle(own_db))  # it has seen no transaction open
    session = own_db.connect(autocommit=False)
    run(session, prepared)
    run(session, "PREPARE TRANSACTION 'silent'")
    eventually(lambda: is_idle(own_db))
    own_db.sql("COMMIT PREPARED 'silent'")
    eventually(lambda: d.delivered() == ["e1", "e2"], timeout=10)
