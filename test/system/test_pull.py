"""The pull API: outbox_fetch, outbox_ack, outbox_nack, outbox_renew, outbox_release."""
import datetime
import json

import psycopg2
import pytest

import closing
from conftest import eventually, run

STALE, INVALID, NOT_IN_BATCH = "RS210", "RS209", "RS211"


def create(db, name="d", **options):
    arguments = {"start_at": "earliest", **options}
    db.sql(f"SELECT outbox_create_destination(%s, 'pull', {', '.join(k + ' => %s' for k in arguments)})",
           name, *arguments.values())


def emit(db, *keys, ordering_key=None, event_type="t", payload="{}"):
    for key in keys:
        db.sql("SELECT outbox_emit(NULL, %s, %s, %s, %s)", key, event_type, payload, ordering_key)


class Client:
    """A publisher that speaks the pull API over one connection."""

    def __init__(self, db, destination="d"):
        self.connection, self.destination = db.connect(), destination

    def fetch(self, most=100, lease="30 s", **options):
        extra = "".join(f", {name} => {value}" for name, value in options.items())
        self.rows = run(self.connection, "SELECT batch, event_id, id, attempt, event_key, ordering_key FROM"
                                         f" outbox_fetch(%s, %s, lease => %s{extra})", self.destination, most, lease)
        self.batch = self.rows[0][0] if self.rows else None
        return [row[4] for row in self.rows]

    def ids(self):
        return {row[4]: row[2] for row in self.rows}

    def ack(self, up_to=None, batch=None):
        return run(self.connection, "SELECT outbox_ack(%s, %s)", batch or self.batch,
                   None if up_to is None else self.ids()[up_to])[0][0]

    def nack(self, key, reason="refused", retry_after="0 s", dead=False, batch=None):
        event_id = {row[4]: row[1] for row in self.rows}[key]
        return run(self.connection, "SELECT outbox_nack(%s, %s, %s, %s::interval, %s)", batch or self.batch, event_id,
                   reason, retry_after, dead)[0][0]

    def drain(self, most=100):
        keys = []
        while self.fetch(most):
            keys += [row[4] for row in self.rows]
            self.ack()
        return keys


def refused(code, call, *arguments, **options):
    with pytest.raises(psycopg2.Error) as error:
        call(*arguments, **options)
    assert error.value.pgcode == code, error.value
    return error.value


def expire(db):
    """The lease ends now, as time would end it."""
    db.sql("UPDATE outbox_shards SET lease_until = clock_timestamp()")


def test_events_come_in_order_and_once(db):
    create(db)
    emit(db, "a", "b", "c")
    client = Client(db)
    assert client.fetch(2) == ["a", "b"]
    assert [row[3] for row in client.rows] == [1, 1]
    assert client.ack() == 2
    assert client.fetch() == ["c"]
    assert client.ack() == 1
    assert client.fetch() == []


def test_an_unacknowledged_batch_comes_again_to_its_holder(db):
    create(db)
    emit(db, "a", "b")
    client = Client(db)
    first = client.fetch()
    emit(db, "c")
    assert client.fetch() == first  # the window does not grow
    client.ack()
    assert client.fetch() == ["c"]


def test_a_fetch_under_a_live_lease_writes_nothing(db):
    create(db)
    emit(db, *"abcdef")
    client = Client(db)
    client.fetch(2)
    client.ack()
    before = db.sql("SELECT ctid, xmin FROM outbox_shards"), db.value("SELECT count(*) FROM outbox_windows")
    xid = db.value("SELECT pg_snapshot_xmax(pg_current_snapshot())::text")
    assert client.fetch(2) == ["c", "d"]
    assert db.value("SELECT pg_snapshot_xmax(pg_current_snapshot())::text") == xid
    client.ack()
    assert (db.sql("SELECT ctid, xmin FROM outbox_shards"), db.value("SELECT count(*) FROM outbox_windows")) == before


def test_a_renewal_is_written_once_per_half_lease(db):
    create(db)
    emit(db, *"abc")
    client = Client(db)
    client.fetch(1)
    client.ack()
    db.sql("UPDATE outbox_shards SET lease_until = clock_timestamp() + interval '14 s'")
    client.fetch(1)
    assert db.value("SELECT lease_until > clock_timestamp() + interval '25 s' FROM outbox_shards")
    client.ack()
    assert db.value("SELECT token FROM outbox_shards") == 1


def test_half_a_batch_is_acknowledged_then_the_lease_expires(db):
    """Case 26: only what was acknowledged under a live lease is recorded, also when nobody took the shard over."""
    create(db)
    emit(db, *"abcdef")
    old = Client(db)
    old.fetch()
    assert old.ack(up_to="c") == 3
    emit(db, "g")
    expire(db)
    assert refused(STALE, old.ack).diag.message_hint
    refused(STALE, old.nack, "d")
    new = Client(db)
    assert new.fetch(2) == ["d", "e"]
    refused(STALE, old.ack)  # nor afterwards
    assert new.ack() == 2
    assert new.drain() == ["f", "g"]
    assert db.value("SELECT sum(delivered) FROM outbox_batches") == 7


def test_the_lease_of_the_same_session_can_end_too(db):
    create(db)
    emit(db, "a")
    client = Client(db)
    client.fetch()
    old = client.batch
    expire(db)
    assert client.fetch() == ["a"]
    assert client.batch != old
    refused(STALE, client.ack, batch=old)
    assert client.ack() == 1


def test_a_live_lease_keeps_others_out(db):
    create(db)
    emit(db, "a")
    first, second = Client(db), Client(db)
    first.fetch()
    assert second.fetch() == []
    first.connection.close()
    assert second.fetch() == []  # only time ends the lease of a client
    expire(db)
    assert second.fetch() == ["a"]


def test_a_dead_workers_shard_is_taken_over_at_once(db):
    create(db)
    emit(db, "a")
    client, other = Client(db), db.connect()
    pid = run(other, "SELECT pg_backend_pid()")[0][0]
    db.sql("UPDATE outbox_shards SET token = 7, holder = 'worker', holder_pid = %s,"
           " lease_until = clock_timestamp() + interval '1 h'", pid)
    assert client.fetch() == []
    other.close()
    assert eventually(client.fetch) == ["a"]
    assert db.sql("SELECT token, holder_pid FROM outbox_shards") == [(8, None)]


def test_a_client_with_several_shards_lets_others_have_some(db):
    """When the renewal of one is due, it goes to whoever fetches next."""
    create(db, shards=4)
    emit(db, *(f"e{n}" for n in range(40)))
    first, second = Client(db), Client(db)
    while db.value("SELECT count(holder) FROM outbox_shards") < 4:
        assert first.fetch(1)
        first.ack()
    assert second.fetch(1) == []
    db.sql("UPDATE outbox_shards SET lease_until = clock_timestamp() + interval '10 s'")
    first.fetch(1)
    first.ack()
    assert len(second.fetch(1)) == 1
    second.ack()
    assert sorted(first.drain() + second.drain())


def test_acknowledging_again_changes_nothing(db):
    create(db)
    emit(db, "a", "b")
    client = Client(db)
    client.fetch()
    assert (client.ack(), client.ack()) == (2, 0)
    assert client.ack(up_to="a") == 0
    emit(db, "c")
    old = client.batch
    client.fetch()
    assert client.ack() == 1
    assert client.ack(batch=old) == 0


def test_prefixes(db):
    create(db)
    emit(db, *"abcd")
    client = Client(db)
    client.fetch()
    assert client.ack(up_to="b") == 2
    assert client.ack(up_to="b") == 0
    assert client.fetch() == ["c", "d"]  # the rest, as a new batch
    client.nack("c", retry_after="1 h")
    assert client.ack(up_to="c") == 0  # up to one that was given back
    assert client.ack() == 1
    assert db.value("SELECT total_parked FROM outbox_batches ORDER BY seq DESC LIMIT 1") == 1
    refused(NOT_IN_BATCH, run, client.connection, "SELECT outbox_ack(%s, 999)", client.batch)


def test_another_session_acknowledges_and_sets_the_shard_free(db):
    """As behind a transaction pooler, where every call may run in another session."""
    create(db)
    emit(db, *"abc")
    calls = [Client(db) for _ in range(3)]
    for n, key in enumerate("abc"):
        fetcher, acker = calls[n % 3], calls[(n + 1) % 3]
        assert fetcher.fetch(1) == [key]
        assert acker.ack(batch=fetcher.batch) == 1
    assert calls[0].fetch() == []


def test_fetch_and_ack_in_one_transaction(db):
    create(db)
    emit(db, "a")
    client = Client(db)
    run(client.connection, "BEGIN")
    client.fetch()
    client.ack()
    run(client.connection, "ROLLBACK")
    assert client.fetch() == ["a"]
    run(client.connection, "BEGIN")
    client.ack()
    assert client.fetch() == []
    run(client.connection, "COMMIT")
    assert client.fetch() == []


def test_a_rolled_back_acknowledgement_is_not_remembered(db):
    """What a transaction saw as done must not be taken for done when it has rolled back."""
    create(db)
    emit(db, "a", "b")
    client = Client(db)
    client.fetch()
    batch, first = client.batch, client.ids()["a"]
    run(client.connection, "BEGIN")
    client.ack()
    assert client.fetch() == []
    run(client.connection, "ROLLBACK")
    assert run(client.connection, "SELECT outbox_ack(%s, %s)", batch, first) == [(1,)]
    assert client.fetch() == ["b"]


def test_renew_and_release(db):
    create(db)
    emit(db, "a")
    client, other = Client(db), Client(db)
    client.fetch(lease="10 s")
    until = run(client.connection, "SELECT outbox_renew(%s, '1 h') > clock_timestamp() + interval '59 min'", client.batch)
    assert until == [(True,)]
    before = db.sql("SELECT xmin FROM outbox_shards")
    run(client.connection, "SELECT outbox_renew(%s, '1 h')", client.batch)
    assert db.sql("SELECT xmin FROM outbox_shards") == before
    run(client.connection, "SELECT outbox_release(%s)", client.batch)
    refused(STALE, client.ack)
    refused(STALE, run, client.connection, "SELECT outbox_renew(%s)", client.batch)
    refused(STALE, run, client.connection, "SELECT outbox_release(%s)", client.batch)
    assert other.fetch() == ["a"]


def test_batch_limits(db):
    create(db)
    emit(db, *"abc", payload=json.dumps("x" * 1000))
    client = Client(db)
    assert client.fetch(max_bytes=2500) == ["a", "b"]
    client.ack()
    assert client.fetch(max_bytes=1) == ["c"]  # a single event may be larger


def test_batch_limits_count_events_that_come_again(db):
    create(db)
    emit(db, *"abcd", payload=json.dumps("x" * 1000))
    client = Client(db)
    client.fetch()
    for key in "abcd":
        client.nack(key)
    client.ack()
    emit(db, "e", payload=json.dumps("x" * 1000))
    assert client.fetch(max_bytes=1) == ["a"]
    assert client.fetch(max_bytes=2500) == ["a", "e"]
    assert client.fetch(max_bytes=4500) == ["a", "b", "e"]
    client.ack()
    assert client.drain() == ["c", "d"]


def test_an_event_that_keeps_failing_does_not_starve_the_others_in_batches_of_one(db):
    create(db, max_attempts=1000000)
    emit(db, "bad", *"abc")
    client = Client(db)
    delivered = []
    for _ in range(200):
        for key in client.fetch(1):
            if key == "bad":
                client.nack(key, retry_after="0 s")
            else:
                delivered.append(key)
            client.ack()
    assert delivered == list("abc")
    assert client.fetch(1) == ["bad"]


@pytest.mark.parametrize("batch", ["", "x", "1.0.1.1.0", "-1.0.1.1.0.1.1", "99999999999999999999.0.1.1.0.1.1"])
def test_a_batch_that_fetch_did_not_return(db, batch):
    for call in ("outbox_ack(%s)", "outbox_nack(%s, gen_random_uuid())", "outbox_renew(%s)", "outbox_release(%s)"):
        refused(INVALID, db.sql, f"SELECT {call}", batch)
        refused(INVALID, db.sql, f"SELECT {call.replace('%s', 'NULL')}")


def test_a_batch_of_a_window_that_was_never_handed_out(db):
    create(db)
    emit(db, "a")
    client = Client(db)
    client.fetch()
    destination, shard, token, window, start, to, check = client.batch.split(".")
    refused(INVALID, client.ack, batch=f"{destination}.{shard}.{token}.77.{start}.{to}.{check}")
    refused(INVALID, client.ack, batch=f"{destination}.{shard}.{token}.{window}.{start}.{int(to) + 1}.{check}")
    refused(STALE, client.ack, batch=f"{destination}.{shard}.{token}.{window}.{start}.{to}.1")
    refused(STALE, client.ack, batch=f"{destination}.{shard}.{int(token) + 1}.{window}.{start}.{to}.{check}")
    refused(STALE, client.ack, batch=f"99.{shard}.{token}.{window}.{start}.{to}.{check}")
    assert client.ack() == 1


def test_where_fetch_refuses_to_run(db):
    create(db)
    emit(db, "a")
    c = db.connect()
    for level in ("REPEATABLE READ", "SERIALIZABLE"):
        run(c, f"BEGIN ISOLATION LEVEL {level}")
        refused("RS207", run, c, "SELECT * FROM outbox_fetch('d')")
        run(c, "ROLLBACK")
    run(c, "BEGIN READ ONLY")
    refused("25006", run, c, "SELECT * FROM outbox_fetch('d')")
    run(c, "ROLLBACK")
    run(c, "BEGIN")
    run(c, "SELECT outbox_emit(NULL, 'b', 't', '{}')")
    refused("RS208", run, c, "SELECT * FROM outbox_fetch('d')")
    run(c, "ROLLBACK")
    refused("RS201", run, c, "SELECT * FROM outbox_fetch('nowhere')")
    refused("RS201", run, c, "SELECT * FROM outbox_fetch(NULL)")
    for arguments in ("0", "-1", "10001", "NULL", "1, 0", "1, NULL", "1, 1, '0 s'", "1, 1, '2 days'", "1, 1, '1 month'",
                      "1, 1, NULL"):
        refused("RS214", run, c, f"SELECT * FROM outbox_fetch('d', {arguments})")
    assert Client(db).fetch() == ["a"]


def test_a_paused_destination_hands_out_nothing(db):
    create(db)
    emit(db, "a")
    client = Client(db)
    db.sql("SELECT outbox_pause('d')")
    assert client.fetch() == []
    db.sql("SELECT outbox_resume('d')")
    assert client.fetch() == ["a"]


def test_event_types(db):
    create(db, "all")
    create(db, "orders", event_types=["order.*", "invoice"])
    for key, event_type in (("1", "order.placed"), ("2", "audit"), ("3", "invoice"), ("4", "invoice.paid"), ("5", "order.")):
        emit(db, key, event_type=event_type)
    assert Client(db, "all").drain() == list("12345")
    assert Client(db, "orders").drain() == list("135")


def test_changed_event_types_do_not_lose_a_batch_in_flight(db):
    """What the acknowledged range holds now was never handed out."""
    create(db, event_types=["x"])
    emit(db, "1", event_type="x")
    emit(db, "2", event_type="y")
    emit(db, "3", event_type="x")
    client = Client(db)
    assert client.fetch() == ["1", "3"]
    db.sql("SELECT outbox_alter_destination('d', event_types => '{x,y}')")
    refused(STALE, client.ack)
    assert client.fetch() == ["1", "2", "3"]
    assert client.ack() == 3


def test_what_was_passed_over_for_other_event_types_is_looked_at_again(db):
    """The session remembers what it passed over. That must not outlive the event types that it was passed over for."""
    create(db, event_types=["x"])
    client = Client(db)
    emit(db, "1", event_type="y")
    assert client.fetch() == []
    db.sql("SELECT outbox_alter_destination('d', event_types => '{x,y}')")
    emit(db, "2", event_type="y")
    assert client.fetch() == ["1", "2"]


def test_an_alteration_that_is_rolled_back_loses_nothing(db):
    create(db, event_types=["x"])
    client = Client(db)
    emit(db, "1", event_type="x")
    run(client.connection, "BEGIN")
    run(client.connection, "SELECT outbox_alter_destination('d', event_types => '{other}')")
    assert client.fetch() == []
    run(client.connection, "ROLLBACK")
    assert client.fetch() == ["1"]


def test_settings_of_the_session_do_not_matter(db):
    create(db, shards=2)
    emit(db, *"abcd")
    client = Client(db)
    for setting in ("enable_indexscan", "enable_bitmapscan", "enable_seqscan", "enable_sort", "enable_nestloop"):
        run(client.connection, f"SET {setting} = off")
    for name, value in (("search_path", "pg_temp"), ("default_transaction_isolation", "read committed"),
                        ("DateStyle", "German"), ("IntervalStyle", "iso_8601"), ("TimeZone", "Asia/Tokyo"),
                        ("bytea_output", "escape"), ("jit_above_cost", "0"), ("plan_cache_mode", "force_generic_plan")):
        run(client.connection, f"SET {name} = '{value}'")
    keys = []
    while rows := run(client.connection, "SELECT batch, event_key FROM retrysafe.outbox_fetch('d')"):
        keys += [row[1] for row in rows]
        run(client.connection, "SELECT retrysafe.outbox_ack(%s)", rows[0][0])
    assert sorted(keys) == list("abcd")


# --- failures ---


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


def test_an_earlier_event_can_fail_after_a_later_one(db):
    create(db)
    emit(db, "a1", "a2", "a3", ordering_key="a")
    client = Client(db)
    client.fetch()
    client.nack("a2")
    client.nack("a1")
    assert db.sql("SELECT event_key, state FROM outbox_parked ORDER BY id") == [
        ("a1", "retry"), ("a2", "blocked"), ("a3", "blocked")]
    assert client.ack() == 0
    assert client.fetch() == ["a1", "a2", "a3"]


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


def test_event_ids_are_those_of_the_view(db):
    create(db)
    emit(db, "a", "b")
    client = Client(db)
    client.fetch()
    assert db.sql("SELECT event_id FROM outbox_events ORDER BY id") == [(row[1],) for row in client.rows]


# --- delayed events, durability, progress ---


def test_delayed_events_come_when_they_are_due(db):
    create(db)
    db.sql("SELECT outbox_emit(NULL, 'later', 't', '{}', deliver_after => now() + interval '1 h')")
    client = Client(db)
    assert client.fetch() == []
    db.sql("UPDATE outbox_scheduled SET deliver_after = now()")
    # Due ones are moved by the fetch, and handed out when that has committed.
    assert eventually(client.fetch) == ["later"]


def test_nothing_is_handed_out_before_its_commit_is_durable(db):
    create(db)
    client = Client(db)
    for n in range(20):
        c = db.connect()
        run(c, "SET synchronous_commit = off")
        run(c, "SELECT outbox_emit(NULL, %s, 't', '{}')", f"e{n}")
        commit = run(c, "SELECT pg_current_wal_insert_lsn()")[0][0]
        assert client.fetch() == [f"e{n}"]
        assert db.value("SELECT pg_current_wal_flush_lsn() >= %s::pg_lsn", commit)
        client.ack()


def test_fetching_where_wal_ends_at_a_page(db):
    """The insert position is then behind a page header that nobody wrote yet: a flush up to there fails."""
    create(db)
    client, filler = Client(db), db.connect()

    def position():
        return int(run(filler, "SELECT pg_current_wal_insert_lsn() - '0/0'")[0][0])

    def write(size):
        run(filler, "SELECT pg_logical_emit_message(false, 'x', repeat('y', %s))", size)

    def overhead_of_one():
        start = position()
        write(504)
        return position() - start - 504

    # One that crosses a page has a page header as well.
    overhead = min(overhead_of_one() for _ in range(3))
    hits = 0
    for n in range(30):
        emit(db, f"e{n}")
        left = -position() % 8192
        if left > overhead + 8:
            write(left - overhead)
        hits += position() % 8192 in (24, 40)
        assert client.fetch() == [f"e{n}"]
        client.ack()
    assert hits > 0
    assert "request to flush past end" not in db.server.log()
    assert "is not satisfied" not in db.server.log()


def test_progress_over_events_of_others_is_stored(db):
    """Windows without an event for the destination are passed over in memory, and stored now and then."""
    try:
        db.sql("SET retrysafe.fault_points = 'reader.store_progress'")
    except psycopg2.Error:
        pytest.skip("the build has no fault points")
    create(db, event_types=["wanted"])
    emit(db, "a", "b", event_type="other")
    client = Client(db)
    assert client.fetch() == []
    emit(db, "c", event_type="other")
    assert client.fetch() == []
    assert db.sql("SELECT seq, window_no FROM outbox_batches") == [(0, 0)]
    run(client.connection, "SET retrysafe.fault_points = 'reader.store_progress'")
    assert client.fetch() == []
    assert db.sql("SELECT seq, window_no, delivered FROM outbox_batches ORDER BY seq") == [(0, 0, 0), (1, 1, 0)]
    assert db.value("SELECT ceiling FROM outbox_windows WHERE window_no = 1") == 3
    emit(db, "d", event_type="wanted")
    assert Client(db).fetch() == ["d"]


@pytest.mark.parametrize("table, said", [("outbox_batches", "the progress of shard 0"), ("outbox_windows", "window 0 of shard 0")])
def test_missing_progress_is_an_error(db, table, said):
    """Never a beginning from zero: events that were delivered would all be sent again."""
    create(db)
    emit(db, "a")
    db.sql(f"DELETE FROM {table}")
    error = refused("RS212", Client(db).fetch)
    assert said in str(error) and f"Restore table {table}" in error.diag.message_hint


def test_a_destination_that_is_dropped_while_a_batch_is_out(db):
    create(db)
    emit(db, "a")
    client = Client(db)
    client.fetch()
    db.sql("SELECT outbox_drop_destination('d')")
    refused(STALE, client.ack)
    refused("RS201", client.fetch)
    create(db)
    assert client.fetch() == ["a"]


def test_long_logs_are_read_in_short_transactions(db):
    """Many rows for others: the fetch gets on by itself and finds what is behind them."""
    create(db, event_types=["wanted"])
    db.sql("SELECT outbox_emit(NULL, 'o' || i, 'other', '{}') FROM generate_series(1, 45000) i")
    emit(db, "w", event_type="wanted")
    client = Client(db)
    assert client.fetch() == ["w"]
    client.ack()
    assert db.value("SELECT count(*) FROM outbox_batches") == 4  # the start, two of nothing but progress, and this


def test_a_bulk_writer_that_was_prepared(db):
    create(db)
    client = Client(db)
    c = db.connect()
    run(c, "BEGIN")
    run(c, "SELECT outbox_emit(NULL, 'bulk' || i, 't', '{}') FROM generate_series(1, 1000) i")
    run(c, "PREPARE TRANSACTION 'bulk'")
    emit(db, "a")
    assert client.drain() == ["a"]
    emit(db, "b")
    assert client.drain() == ["b"]
    run(c, "COMMIT PREPARED 'bulk'")
    emit(db, "c")
    keys = client.drain(300)
    assert keys == [f"bulk{i}" for i in range(1, 1001)] + ["c"]


def test_times_of_events(db):
    create(db)
    emit(db, "a")
    created = run(db.connect(), "SELECT created_at FROM outbox_fetch('d')")[0][0]
    assert abs(created - datetime.datetime.now(datetime.timezone.utc)) < datetime.timedelta(minutes=1)
