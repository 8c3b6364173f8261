"""How workers hold shards: shared, leased, and given back with what was delivered recorded once."""
import json

import pytest

from conftest import cluster, eventually, in_spite_of_crashes, make_database, run
from null_destination import NullDestination, emit, worker_pids
from receiver import Hang, Receiver
from workers import can_connect, fault, fault_of_the_next_worker, own  # noqa: F401 (the fixture own)


@pytest.mark.alone
def test_several_workers_share_the_shards():
    """A7: no event is sent by two, and all work. When one dies the others take over at once."""
    with cluster("retrysafe.workers_per_database = 3") as server:
        db = make_database(server)
        d = NullDestination(db, shards=6, options='"delay_ms": 20')
        eventually(lambda: len(worker_pids(db)) == 3)
        eventually(lambda: db.sql("SELECT shards FROM outbox_workers WHERE process = 'worker'") == [(2,)] * 3)
        session = db.connect()
        run(session, "SELECT outbox_emit(NULL, 'e' || i, 't', '1', 'o' || i) FROM generate_series(1, 600) i")
        eventually(lambda: len(d.delivered()) == 600)
        assert len(set(d.delivered())) == 600
        assert len({a.pid for a in d.attempts()}) == 3

        db.sql("SELECT pg_terminate_backend(%s)", worker_pids(db)[0])
        run(session, "SELECT outbox_emit(NULL, 'f' || i, 't', '1', 'o' || i) FROM generate_series(1, 60) i")
        eventually(lambda: len(d.delivered()) == 660, timeout=5)
        eventually(lambda: db.sql("SELECT shards FROM outbox_workers WHERE process = 'worker'") == [(2,)] * 3)
        assert len(set(d.delivered())) == 660

        server.set("retrysafe.workers_per_database", 1)
        eventually(lambda: db.sql("SELECT shards FROM outbox_workers WHERE process = 'worker'") == [(6,)])


def test_a_worker_claims_the_shard_it_lacks_not_its_own_again(own_db):
    """One worker holds idle shards whose leases ran out; a pull client gives back the one that it lacks."""
    d = NullDestination(own_db, shards=3, lease="interval '1 s'")
    eventually(lambda: own_db.value("SELECT count(*) FROM outbox_shards WHERE holder LIKE 'worker%%'") == 3)
    own_db.sql("SELECT outbox_pause('d')")
    eventually(lambda: own_db.value("SELECT count(*) FROM outbox_shards WHERE holder IS NOT NULL") == 0)
    own_db.sql("UPDATE outbox_shards SET holder = 'somebody', lease_until = clock_timestamp() + interval '3 s' "
               "WHERE shard = 0")
    own_db.sql("SELECT outbox_resume('d')")
    session = own_db.connect()
    run(session, "SELECT outbox_emit(NULL, 'e' || i, 't', '1', 'o' || i) FROM generate_series(1, 60) i")
    eventually(lambda: len(d.delivered()) == 60, timeout=15)
    assert len(set(d.delivered())) == 60


def test_a_shard_that_could_not_be_given_back_is_not_lost(own_db):
    """Somebody had its row locked when the worker was to leave it. It is the worker's for the server until it has given it back."""
    d = NullDestination(own_db)
    emit(own_db, "a")
    eventually(lambda: d.delivered() == ["a"])
    pid, = worker_pids(own_db)
    client = own_db.connect(autocommit=False)
    run(client, "SELECT outbox_discard('d')")
    own_db.server.set("retrysafe.publish", "off")
    eventually(lambda: own_db.value("SELECT state FROM outbox_workers WHERE pid = %s", pid) == "suspended")
    eventually(lambda: own_db.value("SELECT query FROM pg_stat_activity WHERE pid = %s", pid) == "idle")
    client.rollback()
    own_db.server.set("retrysafe.publish", None)
    emit(own_db, "b")
    eventually(lambda: d.delivered() == ["a", "b"], timeout=40)
    assert worker_pids(own_db) == [pid]


def test_a_lease_is_kept_while_sending_takes_longer(own_db):
    d = NullDestination(own_db, options='"delay_ms": 3500', lease="interval '1 s'")
    emit(own_db, "e1")
    eventually(lambda: own_db.value("SELECT sent_at IS NOT NULL FROM outbox_events"))
    assert d.delivered() == ["e1"]
    assert "while sending to it" not in own_db.server.log()


def take_away(db):
    """Its shard, as another process does when the lease has ended."""
    db.sql("UPDATE outbox_shards SET token = token + 1, holder = 'somebody', lease_until = clock_timestamp() + interval '1 s'")


def test_a_batch_is_given_up_when_its_shard_is_lost_while_sending(own_db):
    d = NullDestination(own_db, lease="interval '1 s'")
    d.tell("hang")
    emit(own_db, "e1")
    eventually(lambda: own_db.value("SELECT state FROM outbox_workers WHERE database = current_database()") == "publishing")
    take_away(own_db)
    eventually(lambda: 'lost shard 0 of destination "d" while sending to it' in own_db.server.log())
    d.tell("ok")
    eventually(lambda: d.status()["delivered"] == 1)
    assert d.delivered() == ["e1"], "what was in flight is gone with its sink"


@pytest.mark.parametrize("word, sent", [("ok", ["e1", "e1"]), ("unreachable", ["e1"])])
def test_a_late_record_of_the_worker_is_refused(own_db, word, sent):
    """The batch comes again, with the same ids, and no failure is counted for what somebody else answers for now."""
    d = NullDestination(own_db, lease="interval '1 s'", backoff="interval '1 h'", backoff_max="interval '1 h'")
    d.tell(word)
    before = own_db.server.log().count("before its batch was recorded")
    with fault(own_db.server, "worker.after_ack=wait"):
        emit(own_db, "e1")
        eventually(lambda: d.attempts())
        take_away(own_db)
    eventually(lambda: own_db.server.log().count("before its batch was recorded") > before)
    d.tell("ok")
    eventually(lambda: d.status()["delivered"] == 1)
    assert d.delivered() == sent and len(set(d.ids())) == 1
    assert d.status()["failures"] == 0


def test_outcomes_that_could_not_be_recorded_are_not_sent_again(own_db):
    d = NullDestination(own_db)
    with fault(own_db.server, "record.before_commit=error"):
        emit(own_db, "e1")
        eventually(lambda: own_db.value("SELECT last_error IS NOT NULL FROM outbox_workers "
                                        "WHERE database = current_database()"))
        assert own_db.value("SELECT sent_at FROM outbox_events") is None
    eventually(lambda: own_db.value("SELECT sent_at IS NOT NULL FROM outbox_events"))
    assert d.delivered() == ["e1"]


def test_stopped_in_the_middle_of_a_batch_it_repeats_nothing_that_was_delivered(own_db):
    """The first event hangs, and the second one behind it in its key was not sent."""
    with Receiver() as far:
        far.behave(lambda r: Hang() if r.header("ce-eventkey") == "a1" else 204)
        own_db.sql("SELECT outbox_create_destination('d', 'http', %s)", json.dumps({"url": far.url, "timeout": "60s"}))
        own_db.sql("SELECT outbox_emit(NULL, k, 't', '{}', left(k, 1)) FROM unnest(ARRAY['a1', 'b1', 'a2', 'b2', 'c1']) k")
        eventually(lambda: len(far.requests) == 4)
        far.behave(204)
        own_db.sql("SELECT pg_terminate_backend(%s)", worker_pids(own_db)[0])
        eventually(lambda: own_db.value("SELECT delivered FROM outbox_status") == 5)
        sent = [r.header("ce-eventkey") for r in far.requests]
        assert sorted(sent) == ["a1", "a1", "a2", "b1", "b2", "c1"]
        assert sent[-2:] == ["a1", "a2"]


def test_killed_between_ack_and_record_sends_again_with_the_same_id(own_db):
    """A6, as far as the worker goes."""
    d = NullDestination(own_db)
    fault_of_the_next_worker(own_db, "worker.after_ack=kill")
    in_spite_of_crashes(lambda: emit(own_db, "e1"))
    eventually(lambda: d.delivered() == ["e1", "e1"], timeout=30)
    eventually(lambda: can_connect(own_db.server))
    eventually(lambda: own_db.value("SELECT sent_at IS NOT NULL FROM outbox_events"))
    assert d.delivered() == ["e1", "e1"]
    assert len({a.id for a in d.attempts()}) == 1
    assert len({a.pid for a in d.attempts()}) == 2
