"""What the views tell of destinations and events, and at what cost."""
import re

import pytest

from conftest import run
from operating import drain, emit, fail_first, fetch, sent_at, status


def test_sent_at_is_when_the_last_interested_destination_has_it(db):
    emit(db, "before")
    db.sql("SELECT outbox_create_destination('all', 'pull')")
    db.sql("SELECT outbox_create_destination('orders', 'pull', event_types => '{order.*}', shards => 3)")
    emit(db, "other", "invoice")
    emit(db, "order", "order.made", "k")
    assert sent_at(db) == {"before": None, "other": None, "order": None}
    assert drain(db, "all") == ["other", "order"]
    first = sent_at(db)
    assert first["before"] is None and first["other"] is not None and first["order"] is None
    assert drain(db, "orders") == ["order"]
    second = sent_at(db)
    assert second["other"] == first["other"]
    assert second["order"] >= first["other"]


def timed_drain(db, destination, max_events=100, batches=1000):
    """Event keys with the times between which they were acknowledged."""
    delivered = {}
    for _ in range(batches):
        batch, some = fetch(db, destination, max_events)
        if not some:
            break
        before = db.value("SELECT clock_timestamp()")
        db.sql("SELECT outbox_ack(%s)", batch)
        after = db.value("SELECT clock_timestamp()")
        delivered |= {key: (before, after) for key in some}
    return delivered


def test_sent_at_is_found_among_many_batches_and_late_commits(db):
    db.sql("SELECT outbox_create_destination('d', 'pull')")
    delivered = {}
    for i in range(20):
        late = db.connect(autocommit=False)
        run(late, "SELECT outbox_emit(NULL, %s, 't', '{}')", f"late{i}")
        for key in "abc":
            emit(db, f"{key}{i}")
        delivered |= timed_drain(db, "d", max_events=1, batches=2)
        late.commit()
        delivered |= timed_drain(db, "d", max_events=1)
    times = sent_at(db)
    assert times.keys() == delivered.keys() == {f"{k}{i}" for i in range(20) for k in ("a", "b", "c", "late")}
    for key, (before, after) in delivered.items():
        assert before <= times[key] <= after, key


def test_sent_at_of_a_parked_event_is_when_it_was_delivered(db):
    db.sql("SELECT outbox_create_destination('d', 'pull')")
    emit(db, "a")
    fail_first(db, "d", reason="no", retry_after="0")
    assert sent_at(db) == {"a": None}
    assert status(db, "d")["parked_retry"] == 1
    delivered = timed_drain(db, "d")
    before, after = delivered["a"]
    assert before <= sent_at(db)["a"] <= after


def test_status_tells_depth_and_age_without_reading_the_log(db):
    db.sql("SELECT outbox_create_destination('d', 'pull', shards => 2)")
    assert status(db, "d")["state"] == "idle"
    db.sql("SELECT outbox_emit(NULL, 'k' || i, 't', '{}', 'o' || i) FROM generate_series(1, 1000) AS i")
    now = status(db, "d")
    assert now["state"] == "unclaimed" and now["backlog"] == 1000 and now["oldest_pending_age"].total_seconds() > 0
    fetch(db, "d")
    now = status(db, "d")
    assert now["state"] == "publishing" and now["holders"]
    plan = "\n".join(row[0] for row in db.sql("EXPLAIN (ANALYZE, COSTS OFF, TIMING OFF, SUMMARY OFF) SELECT * FROM outbox_status"))
    log = [line for line in plan.splitlines() if "on outbox_log" in line and "id_seq" not in line and "(never executed)" not in line]
    rows = [int(re.search(r"rows=(\d+)", line)[1]) for line in log]
    assert sum(rows) == 1, plan
    assert all("Index Scan" in line for line, n in zip(log, rows) if n), plan


def test_status_reads_one_of_many_delayed_events(db):
    db.sql("SELECT outbox_create_destination('d', 'pull')")
    db.sql("""INSERT INTO outbox_scheduled (deliver_after, created_at, scope, event_key, event_type)
              SELECT now() + make_interval(days => 1, secs => i), now(), '', 'k' || i, 't' FROM generate_series(1, 1000) AS i""")
    assert status(db, "d")["oldest_pending_age"] is None
    plan = "\n".join(row[0] for row in db.sql("EXPLAIN (ANALYZE, COSTS OFF, TIMING OFF, SUMMARY OFF) SELECT * FROM outbox_status"))
    assert re.search(r"outbox_scheduled_deliver_after on outbox_scheduled .*rows=1\b", plan), plan


@pytest.mark.parametrize("view", ["idem_status", "outbox_dead_letters", "outbox_kind_options", "outbox_status", "outbox_workers",
                                  "ring_status"])
def test_what_is_polled_is_not_compiled_first(db, view):
    """A plan that seems dear, without statistics as here, is compiled for seconds by a server that can."""
    plan, = db.value(f"EXPLAIN (FORMAT json) SELECT * FROM {view}")
    assert plan["Plan"]["Total Cost"] < float(db.value("SHOW jit_above_cost"))


def test_status_shows_a_broken_off_shard(db):
    db.sql("SELECT outbox_create_destination('d', 'pull')")
    db.sql("UPDATE outbox_shards SET retry_at = now() + '1 hour', failures = 3, last_error = 'refused', error_at = now()")
    now = status(db, "d")
    assert (now["state"], now["failures"], now["last_error"]) == ("backing off", 3, "refused")
