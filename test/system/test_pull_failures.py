"""The pull API where events fail: outbox_nack, attempts, what waits behind a failed event, and the end of patience."""
import json
import signal

import pytest

import closing
from conftest import cluster, eventually, kill, make_database, run
from pull_client import NOT_IN_BATCH, Client, create, emit, expire, refused


def test_a_refused_event_comes_again_with_its_attempts(db):
    create(db)
    emit(db, "a", "b")
    client = Client(db)
    client.fetch()
    assert client.nack("a") == 1
    assert client.ack() == 1  # b
    assert client.fetch() == ["a"]
    assert client.rows[0][3] == 2
    assert client.ack() == 1
    assert client.fetch() == []
    assert db.sql("SELECT state, attempts, settled_at IS NOT NULL FROM outbox_parked") == [("delivered", 1, True)]


def test_a_refused_event_is_safe_without_an_acknowledgement(db):
    """The client dies between the two."""
    create(db)
    emit(db, "a", "b")
    client = Client(db)
    client.fetch()
    client.nack("a", retry_after="1 h")
    client.connection.close()
    expire(db)
    other = Client(db)
    assert other.fetch() == ["b"]
    assert other.ack() == 1
    assert other.fetch() == []
    assert db.sql("SELECT state, reason FROM outbox_parked") == [("retry", "refused")]
    assert db.value("SELECT total_parked FROM outbox_batches ORDER BY seq DESC LIMIT 1") == 1


def test_a_refused_event_survives_an_acknowledgement_that_is_repeated_after_a_crash():
    """Though the session waits for nothing, and the server writes WAL in the background only every ten seconds."""
    with cluster("wal_writer_delay = 10s", "retrysafe.workers_per_database = 0", "autovacuum = off") as server:
        db = make_database(server, "crash")
        create(db)
        emit(db, "a", "b")
        client = Client(db)
        assert client.fetch(lease="1 h") == ["a", "b"]
        emit(db, "durable")  # so that what was handed out is
        run(client.connection, "SET synchronous_commit = off")
        client.nack("a")
        kill(server.pid, signal.SIGQUIT)  # an immediate stop
        db.close()
        eventually(lambda: not (server.directory / "data/postmaster.pid").exists())
        server.pg_ctl("start")
        other = Client(db)
        assert other.ack(batch=client.batch) == 1  # b
        assert sorted(other.drain()) == ["a", "durable"]


def test_later_events_of_the_key_wait(db):
    create(db)
    emit(db, "a1", "a2", ordering_key="a")
    emit(db, "b1", ordering_key="b")
    emit(db, "free")
    client = Client(db)
    assert client.fetch() == ["a1", "a2", "b1", "free"]
    assert client.nack("a1", retry_after="1 h") == 2
    refused(NOT_IN_BATCH, client.nack, "a2")  # it is given back already
    assert client.ack() == 2
    emit(db, "a3", ordering_key="a")
    emit(db, "b2", ordering_key="b")
    assert client.fetch() == ["b2"]
    client.ack()
    assert db.sql("SELECT event_key, state FROM outbox_parked ORDER BY id") == [
        ("a1", "retry"), ("a2", "blocked"), ("a3", "blocked")]
    db.sql("UPDATE outbox_parked SET retry_at = clock_timestamp() WHERE event_key = 'a1'")
    assert client.fetch() == ["a1", "a2", "a3"]
    assert client.nack("a2", retry_after="1 h") == 2
    assert client.ack() == 1  # a1
    assert client.fetch() == []
    db.sql("UPDATE outbox_parked SET retry_at = clock_timestamp() WHERE event_key = 'a2'")
    emit(db, "a4", ordering_key="a")
    assert client.fetch() == ["a2", "a3"]
    assert client.ack() == 2
    assert client.drain() == ["a4"]


@pytest.mark.parametrize("come_again", [False, True], ids=["first attempt", "second attempt"])
@pytest.mark.parametrize("later", ["a2", "a3"])
def test_an_earlier_event_can_fail_after_a_later_one(db, later, come_again):
    """Only the first of the key has a time at which who waits for it wakes."""
    create(db)
    emit(db, "a1", "a2", "a3", ordering_key="a")
    client = Client(db)
    client.fetch()
    if come_again:
        client.nack("a1")
        client.ack()
        client.fetch()
    client.nack(later)
    client.nack("a1")
    assert db.sql("SELECT event_key, state FROM outbox_parked ORDER BY id") == [
        ("a1", "retry"), ("a2", "blocked"), ("a3", "blocked")]
    assert client.ack() == 0
    assert client.fetch() == ["a1", "a2", "a3"]


@pytest.mark.parametrize("goes_on", ["it", "another after a release", "another after the lease"])
@pytest.mark.parametrize("most", [1, 100])
def test_a_refused_event_does_not_overtake_what_was_not_sent(db, goes_on, most):
    """A client looks through its batch before it sends, and gives back what it finds; then it does not send."""
    create(db)
    emit(db, "k1", "k2", "k3", ordering_key="k")
    client = Client(db)
    client.fetch()
    assert client.nack("k2") == 2
    if goes_on != "it":
        if goes_on.endswith("release"):
            run(client.connection, "SELECT outbox_release(%s)", client.batch)
        else:
            expire(db)
        client = Client(db)
    assert client.drain(most) == ["k1", "k2", "k3"]
    assert db.sql("SELECT delivered, parked_retry, parked_blocked FROM outbox_status") == [(3, 0, 0)]


def test_what_waits_behind_a_dead_event_does_not_overtake_what_was_not_sent(db):
    create(db)
    emit(db, "k1", "k2", "k3", ordering_key="k")
    client = Client(db)
    client.fetch()
    assert client.nack("k2", dead=True) == 2
    assert client.drain() == ["k1", "k3"]


@pytest.mark.parametrize("on_exhausted", ["dead_letter", "block"])
def test_a_dead_event_that_is_sent_again_does_not_overtake_what_was_not_sent(db, on_exhausted):
    create(db, on_exhausted=on_exhausted)
    emit(db, "k1", "k2", "k3", ordering_key="k")
    client = Client(db)
    client.fetch()
    client.nack("k2", dead=True)
    db.sql("SELECT outbox_retry('d')")
    assert client.drain() == ["k1", "k2", "k3"]


def test_an_event_behind_one_that_is_sent_again_does_not_overtake_what_was_not_sent(db):
    create(db)
    emit(db, "k1", "k2", "k3", ordering_key="k")
    client = Client(db)
    assert client.fetch(1) == ["k1"]
    client.nack("k1", dead=True)
    client.ack()
    assert client.fetch() == ["k2", "k3"]
    client.nack("k3")
    db.sql("SELECT outbox_retry('d')")
    assert client.drain() == ["k1", "k2", "k3"]


def test_a_large_event_does_not_wait_until_no_retry_is_due(db):
    create(db, max_attempts=1000)
    emit(db, "refused")
    client = Client(db)
    client.fetch()
    client.nack("refused")
    client.ack()
    emit(db, "large", payload=json.dumps("x" * 20000))
    emit(db, "small")
    came = []
    for _ in range(3):
        came += [key for key in client.fetch(max_bytes=2048) if key != "refused"]
        client.nack("refused")
        client.ack()
    assert came == ["large", "small"]


def test_a_fetch_that_finds_only_what_waits_takes_no_lease(db):
    create(db)
    emit(db, "k1", ordering_key="k")
    client = Client(db)
    client.fetch()
    client.nack("k1", retry_after="1 h")
    client.ack()
    run(client.connection, "SELECT outbox_release(%s)", client.batch)
    emit(db, "k2", ordering_key="k")
    assert Client(db).fetch() == []
    assert db.sql("SELECT event_key, state FROM outbox_parked ORDER BY id") == [("k1", "retry"), ("k2", "blocked")]
    assert db.sql("SELECT token, holder FROM outbox_shards") == [(1, None)]


def test_a_refused_event_keeps_its_time_behind_one_that_comes_again(db):
    create(db)
    emit(db, "k1", "k2", "k3", ordering_key="k")
    client = Client(db)
    client.fetch()
    client.nack("k2", retry_after="1 h")
    client.nack("k1")
    client.ack()
    assert client.drain() == ["k1"]
    assert db.sql("SELECT event_key, state, retry_at > now() + interval '30 min' FROM outbox_parked WHERE state <> 'delivered'"
                  " ORDER BY id") == [("k2", "retry", True), ("k3", "blocked", None)]


def test_acknowledging_one_by_one_while_events_of_the_key_come_again(db):
    create(db)
    emit(db, "a1", "a2", "a3", ordering_key="a")
    client = Client(db)
    client.fetch()
    client.nack("a1")
    client.ack()
    assert client.fetch() == ["a1", "a2", "a3"]
    assert [client.ack(up_to=key) for key in ("a1", "a2", "a3")] == [1, 1, 1]
    assert client.fetch() == []


def test_exhausted_events_die_and_the_rest_of_the_key_goes_on(db):
    create(db, max_attempts=2)
    emit(db, "a1", "a2", ordering_key="a")
    client = Client(db)
    for _ in range(2):
        assert client.fetch() == ["a1", "a2"]
        client.nack("a1", reason="no such account")
        client.ack()
    assert client.drain() == ["a2"]
    assert db.sql("SELECT event_key, state, attempts, reason FROM outbox_parked WHERE state = 'dead'") == [
        ("a1", "dead", 2, "no such account")]


def test_exhausted_events_block_their_key_where_that_is_wanted(db):
    create(db, on_exhausted="block")
    emit(db, "a1", "a2", ordering_key="a")
    emit(db, "b1", ordering_key="b")
    client = Client(db)
    client.fetch()
    assert client.nack("a1", dead=True) == 2
    assert client.ack() == 1
    emit(db, "a3", ordering_key="a")
    emit(db, "b2", ordering_key="b")
    assert client.drain() == ["b2"]
    assert db.sql("SELECT event_key, state FROM outbox_parked ORDER BY id") == [
        ("a1", "dead"), ("a2", "blocked"), ("a3", "blocked")]
    db.sql("SELECT outbox_discard('d')")
    assert client.drain() == ["a2", "a3"]


def test_a_head_that_is_discarded_while_its_key_is_in_flight(db):
    """The event that was held back when the batch was fetched was not handed out, and is not lost."""
    create(db)
    emit(db, "a1", ordering_key="a")
    client = Client(db)
    client.fetch()
    client.nack("a1", retry_after="1 h")
    client.ack()
    emit(db, "a2", ordering_key="a")
    emit(db, "b")
    assert client.fetch() == ["b"]
    db.sql("UPDATE outbox_parked SET state = 'discarded', settled_at = now() WHERE event_key = 'a1'")
    client.ack()
    db.sql("UPDATE outbox_parked SET state = 'retry', retry_at = now() WHERE event_key = 'a2'")
    assert client.drain() == ["a2"]


def test_a_dead_event_blocks_what_is_behind_it_whatever_comes_before(db):
    create(db, on_exhausted="block")
    emit(db, *"abc", ordering_key="k")
    client = Client(db)
    assert client.fetch() == list("abc")
    client.nack("b", dead=True)
    client.nack("a")
    assert client.fetch() == ["a"]
    client.ack()
    assert client.drain() == []
    db.sql("SELECT outbox_discard('d')")
    assert client.drain() == ["c"]


@pytest.mark.parametrize("waiting_event_failed", [False, True])
def test_whether_dead_events_block_can_be_changed(db, waiting_event_failed):
    create(db, on_exhausted="dead_letter" if waiting_event_failed else "block")
    emit(db, *"abc", ordering_key="k")
    client = Client(db)
    assert client.fetch() == list("abc")
    client.nack("a", dead=True)
    if waiting_event_failed:
        assert client.fetch() == ["b", "c"]
        client.nack("b")
        db.sql("SELECT outbox_alter_destination('d', on_exhausted => 'block')")
        assert db.sql("SELECT parked_retry, parked_blocked FROM outbox_status") == [(0, 2)]
    assert client.fetch() == []
    db.sql("SELECT outbox_alter_destination('d', on_exhausted => 'dead_letter')")
    assert client.drain() == ["b", "c"]


def test_reason_is_cut_to_its_limit(db):
    create(db)
    emit(db, "a")
    client = Client(db)
    client.fetch()
    client.nack("a", reason="é" * 2000)
    assert db.value("SELECT reason FROM outbox_parked") == "é" * 500
    for retry_after in ("-1 s", "2 years"):
        refused("RS214", client.nack, "a", retry_after=retry_after)


def test_many_failing_keys(db):
    """Case 17 for a pull client, 1,000 keys of 20 events: P is refused for good, and T until the others are done, as the
    60 s of the case would have it. A client can be as slow as it likes, so what counts is not time but how often it has
    to fetch: at most 20 % more than in a clean run. T comes in order afterwards. P's first event is a dead letter with its
    reason; the rest of P comes without it, as the manual says, and is refused as well. The way back is by filter."""
    keys, each = 998, 20
    others, every = [f"k{g}" for g in range(1, keys + 1)], range(1, each + 1)
    client = Client(db)
    refusing = set()

    def start():
        create(db, shards=3, max_attempts=1000, start_at="now")
        db.sql("SELECT outbox_emit(NULL, format('%%s-%%s-%%s', k, i, %s), 't', to_jsonb(i), k) FROM generate_series(1, %s) i,"
               " (SELECT 'k' || g AS k FROM generate_series(1, %s) g UNION ALL VALUES ('P'), ('T')) keys", len(refusing),
               each, keys)

    def work():
        """One fetch, of which all is taken but for what is refused; later events of a refused key are given back with
        it. False when there was nothing."""
        if not client.fetch(500):
            return False
        given_back = set()
        for _, event_id, _, _, key, ordering_key in client.rows:
            if ordering_key in given_back:
                continue
            if ordering_key in refusing:
                given_back.add(ordering_key)
                if ordering_key == "P":
                    client.nack(key, reason="P is closed", dead=True)
                else:
                    client.nack(key, retry_after="0 s")
            else:
                arrived.setdefault(ordering_key, []).append(int(key.split("-")[1]))
                ids.append(event_id)
        client.ack()
        return True

    def rounds(most):
        count = 0
        while not all(len(arrived.get(key, ())) == each for key in others):
            work()
            count += 1
            assert count <= most
        return count

    arrived, ids = {}, []
    start()
    clean = rounds(most=1000)
    eventually(lambda: not work())
    closing.balance(db, "d", ids)
    db.sql("SELECT outbox_drop_destination('d')")

    arrived, ids = {}, []
    refusing |= {"P", "T"}
    start()
    rounds(most=clean * 1.2)
    assert set(arrived) == set(others)
    eventually(lambda: db.value("SELECT dead FROM outbox_status") == each or work() and False)
    refusing.remove("T")
    eventually(lambda: not work() and len(arrived.get("T", ())) == each)
    assert all(arrived[key] == list(every) for key in [*others, "T"])
    assert "P" not in arrived
    assert db.sql("SELECT event_key, reason, attempts FROM outbox_dead_letters ORDER BY id") == [
        (f"P-{n}-2", "P is closed", 1) for n in every]
    closing.balance(db, "d", ids)

    refusing.clear()
    assert db.value("SELECT outbox_retry('d', ordering_key => 'no such key')") == 0
    assert db.value("SELECT outbox_retry('d', ordering_key => 'P', reason_like => 'P is %%')") == each
    eventually(lambda: not work() and len(arrived.get("P", ())) == each)
    assert arrived["P"] == list(every)
    closing.balance(db, "d", ids)
    assert db.sql("SELECT backlog, parked_retry, parked_blocked, dead FROM outbox_status") == [(0, 0, 0, 0)]


# -- a fetch that is rolled back --

def test_what_only_a_rolled_back_fetch_had_parked_is_not_delivered(db):
    """It holds back an event of a key with a dead one, and hands out the rest: without it nothing was held back."""
    create(db, on_exhausted="block")
    emit(db, "dead", ordering_key="k")
    client = Client(db)
    client.fetch()
    client.nack("dead", dead=True)
    client.ack()
    db.sql("""SELECT outbox_emit(NULL, 'a', 't', '{}'), outbox_emit(NULL, 'behind', 't', '{}', 'k'),
                     outbox_emit(NULL, 'b', 't', '{}')""")
    assert client.fetch(1) == ["a"]
    client.ack()
    run(client.connection, "BEGIN")
    assert client.fetch() == ["b"]
    run(client.connection, "ROLLBACK")
    refused("RS210", client.ack)
    db.sql("SELECT outbox_discard('d')")
    assert sorted(client.drain()) == ["b", "behind"]


def test_a_batch_whose_parked_event_is_another_one_by_now(db):
    """As after a failover that lost WAL: positions, tokens and turns come again."""
    create(db)
    emit(db, "a")
    client = Client(db)
    client.fetch()
    client.nack("a")
    client.ack()
    assert client.fetch() == ["a"]
    db.sql("UPDATE outbox_parked SET event_key = 'another'")
    assert client.ack() == 0
    assert client.fetch() == ["another"]
    assert client.ack() == 1


@pytest.mark.parametrize("call", [Client.ack, lambda client: client.nack("a"),
                                  lambda client: run(client.connection, "SELECT outbox_release(%s)", client.batch)])
@pytest.mark.parametrize("end", ["ROLLBACK", "ROLLBACK TO s; COMMIT"])
def test_the_batch_of_a_rolled_back_fetch_is_nobodys(db, call, end):
    """The next one gets the same fencing token."""
    create(db)
    emit(db, "a")
    late, holder = Client(db), Client(db)
    run(late.connection, "BEGIN; SAVEPOINT s")
    assert late.fetch() == ["a"]
    run(late.connection, end)
    assert holder.fetch() == ["a"]
    refused("RS210", call, late)
    assert Client(db).fetch() == []
    assert holder.ack() == 1


def test_a_batch_is_acknowledged_where_it_was_fetched(db):
    create(db)
    emit(db, "a", "b")
    client = Client(db)
    run(client.connection, "BEGIN; SAVEPOINT s")
    assert client.fetch() == ["a", "b"]
    assert client.ack("a") == 1
    run(client.connection, "RELEASE s")
    assert client.ack() == 1
    run(client.connection, "COMMIT")
    assert client.fetch() == []


@pytest.mark.parametrize("call", ["outbox_retry('d')", "outbox_discard('d')", "outbox_alter_destination('d', on_exhausted => 'dead_letter')"])
@pytest.mark.parametrize("isolation", ["REPEATABLE READ", "SERIALIZABLE"])
def test_dead_letters_are_settled_by_what_is_there_now(db, call, isolation):
    """An older snapshot does not show what has come to wait behind them."""
    create(db, on_exhausted="block")
    session = db.connect(autocommit=False)
    session.set_session(isolation_level=isolation)
    refused("RS207", run, session, f"SELECT {call}")
