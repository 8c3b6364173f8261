"""What is kept for a destination, for how long, and what a destination costs that takes nothing."""
from conftest import eventually, run
from operating import (  # noqa: F401 (the fixture no_retention)
    bury, clean_up, dead, drain, emit, kept, no_retention, pass_a_minute, refused, sent_at, status)


def test_retention_keeps_what_a_destination_has_not_had(db, no_retention):
    db.sql("SELECT outbox_create_destination('fast', 'pull', shards => 2)")
    db.sql("SELECT outbox_create_destination('slow', 'pull')")
    for i in range(10):
        emit(db, f"k{i}")
    assert len(drain(db, "fast")) == 10
    db.sql("SELECT outbox_cleanup()")
    assert len(kept(db)) == 10
    assert len(drain(db, "slow")) == 10
    db.sql("SELECT pg_current_xact_id()")
    eventually(lambda: db.sql("SELECT outbox_cleanup()") and drain(db, "fast") == drain(db, "slow") == kept(db) == [],
               timeout=40)
    emit(db, "next")
    assert drain(db, "fast") == drain(db, "slow") == ["next"]


def test_retention_by_age_without_a_destination(db, no_retention):
    emit(db, "a")
    clean_up(db)
    assert kept(db) == []


def test_retention_time_counts(db):
    emit(db, "a")
    db.sql("SELECT outbox_create_destination('d', 'pull')")
    emit(db, "b")
    drain(db, "d")
    assert db.value("SELECT outbox_cleanup()") == 0
    assert kept(db) == ["a", "b"]


def test_a_destination_that_holds_back_too_much_is_lost_loudly(db, no_retention):
    db.sql("SELECT outbox_create_destination('fast', 'pull')")
    db.sql("SELECT outbox_create_destination('slow', 'pull', shards => 2)")
    db.sql("""SELECT outbox_emit(NULL, 'k' || i, 't', to_jsonb(encode(sha512(i::text::bytea), 'hex') || repeat('x', 900)))
                FROM generate_series(1, 2000) AS i""")
    assert len(drain(db, "fast")) == 2000
    clean_up(db, "fast")
    assert len(kept(db)) == 2000 and status(db, "slow")["holds_back_bytes"] > 2 << 20
    assert status(db, "fast")["holds_back_bytes"] == 0
    db.server.set("retrysafe.max_retained_bytes", "2MB")
    try:
        eventually(lambda: db.value("SHOW retrysafe.max_retained_bytes") == "2MB")
        clean_up(db, "fast")
        assert status(db, "slow")["state"] != "lost", "it gets a minute to look"
        pass_a_minute(db)
        clean_up(db, "fast")
        clean_up(db)
    finally:
        db.server.set("retrysafe.max_retained_bytes", None)
    assert kept(db) == []
    assert status(db, "slow")["state"] == "lost" and status(db, "fast")["state"] != "lost"
    assert 'destination "slow" is lost' in db.server.log()
    session = db.connect()
    refused(session, "RS218", "SELECT * FROM outbox_fetch('slow')")
    refused(session, "RS218", "SELECT outbox_resume('slow')")
    db.sql("SELECT outbox_drop_destination('slow')")
    db.sql("SELECT outbox_create_destination('slow', 'pull', start_at => 'earliest')")
    emit(db, "after")
    assert drain(db, "slow") == drain(db, "fast") == ["after"]


def test_nothing_is_taken_away_while_publishing_is_suspended(db, no_retention):
    db.sql("SELECT outbox_create_destination('d', 'pull')")
    db.sql("SELECT outbox_emit(NULL, 'k' || i, 't', to_jsonb(repeat(i::text, 900))) FROM generate_series(1, 2000) AS i")
    settings = {"retrysafe.publish": "off", "retrysafe.max_retained_bytes": "1MB"}
    for name, value in settings.items():
        db.server.set(name, value)
    try:
        eventually(lambda: db.value("SHOW retrysafe.max_retained_bytes") == "1MB")
        for _ in range(4):
            assert db.value("SELECT outbox_cleanup()") == 0
            pass_a_minute(db)
    finally:
        for name in settings:
            db.server.set(name, None)
    assert len(drain(db, "d")) == 2000


def test_a_clock_that_was_ahead_for_a_moment_keeps_nothing(db, no_retention):
    emit(db, "a")
    while db.value("SELECT count(*) FROM ring_pieces WHERE ring = 'log' AND sealed_at IS NOT NULL") == 0:
        assert db.value("SELECT outbox_cleanup()") == 1
    db.sql("UPDATE ring_pieces SET since = since + interval '5 years', sealed_at = sealed_at + interval '5 years'")
    clean_up(db)
    assert kept(db) == []
    emit(db, "b")
    clean_up(db)
    assert kept(db) == []


def test_progress_rows_do_not_grow_for_ever(db, no_retention):
    db.sql("SELECT outbox_create_destination('d', 'pull')")
    for i in range(50):
        emit(db, f"k{i}")
        assert drain(db, "d") == [f"k{i}"]
    clean_up(db, "d")
    clean_up(db)
    assert len(kept(db)) <= 1
    assert db.value("SELECT count(*) FROM outbox_batches") <= 3
    assert db.value("SELECT count(*) FROM outbox_windows") <= 3
    emit(db, "next")
    assert drain(db, "d") == ["next"]


def test_progress_rows_stay_while_kept_events_need_them(db, no_retention):
    db.sql("SELECT outbox_create_destination('d', 'pull')")
    db.sql("SELECT outbox_create_destination('slow', 'pull')")
    for i in range(20):
        emit(db, f"k{i}")
        drain(db, "d")
    db.sql("SELECT outbox_drop_destination('slow')")
    before = sent_at(db)
    assert None not in before.values()
    db.sql("SELECT outbox_create_destination('slow', 'pull', start_at => 'earliest')")
    db.sql("SELECT outbox_cleanup()")
    db.sql("SELECT outbox_drop_destination('slow')")
    assert sent_at(db) == before


def test_dead_letters_outlive_the_log(db, no_retention):
    db.sql("SELECT outbox_create_destination('d', 'pull')")
    emit(db, "a")
    bury(db, "d")
    emit(db, "b")
    drain(db, "d")
    eventually(lambda: db.sql("SELECT outbox_cleanup()") and drain(db, "d") == kept(db) == [], timeout=40)
    assert dead(db) == ["a"]
    db.sql("SELECT outbox_retry('d')")
    assert drain(db, "d") == ["a"]
    db.sql("SELECT outbox_cleanup()")
    assert db.value("SELECT count(*) FROM outbox_parked") == 0


def test_retention_does_not_remove_what_commits_late(db, no_retention):
    db.sql("SELECT outbox_create_destination('d', 'pull')")
    late = db.connect(autocommit=False)
    run(late, "SELECT outbox_emit(NULL, 'late', 't', '{}')")
    for i in range(5):
        emit(db, f"k{i}")
        drain(db, "d")
    db.sql("SELECT outbox_cleanup()")
    late.commit()
    db.sql("SELECT outbox_cleanup()")
    assert "late" in kept(db)
    assert drain(db, "d") == ["late"]
