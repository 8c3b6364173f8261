"""The pull API, batch by batch: outbox_fetch, outbox_ack, outbox_renew, outbox_release, and the lease that they stand on."""
import json

import pytest

from conftest import eventually, run
from pull_client import INVALID, NOT_IN_BATCH, STALE, Client, create, emit, expire, refused


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
    db.sql("UPDATE outbox_shards SET token = 7, holder = 'worker', holder_pid = %s, timeline = 1,"
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


def test_a_shard_that_is_locked_is_kept_for_now(db):
    """The client does not wait for who has its row locked, though it is to let the shard go."""
    create(db, shards=2)
    emit(db, *(f"e{n}" for n in range(20)))
    client = Client(db)
    run(client.connection, "SET lock_timeout = '10 s'")
    while db.value("SELECT count(holder) FROM outbox_shards") < 2:
        assert client.fetch(1)
        client.ack()
    db.sql("UPDATE outbox_shards SET lease_until = clock_timestamp() + interval '10 s'")
    other = db.connect(autocommit=False)
    run(other, "SELECT FROM outbox_shards FOR UPDATE")
    assert client.fetch(1) == []
    other.rollback()
    assert client.fetch(1)


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


def test_acknowledging_up_to_an_event_again_when_a_later_window_has_begun(db):
    """In which positions are lower: its transaction drew them before, and ended behind the others."""
    create(db)
    slow = db.connect(autocommit=False)
    run(slow, "SELECT outbox_emit(NULL, key, 't', '{}') FROM unnest('{a1,a2}'::text[]) key")
    emit(db, "b")
    client = Client(db)
    assert client.fetch() == ["b"] and client.ack() == 1
    old, up_to = client.batch, client.ids()["b"]
    slow.commit()
    assert client.fetch(1) == ["a1"] and client.ack() == 1
    assert client.ids()["a1"] < up_to
    assert db.value("SELECT outbox_ack(%s, %s)", old, up_to) == 0


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


def test_programs_that_share_a_session_share_its_leases(db):
    """To whom a transaction pooler lends it in turn: the same events twice, in order, and none lost."""
    create(db)
    emit(db, *"abcd", ordering_key="k")
    session = Client(db)

    def fetched_by_two():
        assert session.fetch(2)
        keys, batch = [row[4] for row in session.rows], session.batch
        run(session.connection, "DISCARD ALL")
        assert session.fetch(2) == keys
        return keys, batch
    keys, batch = fetched_by_two()
    assert (keys, session.ack(batch=batch), session.ack()) == (["a", "b"], 2, 0)
    keys, batch = fetched_by_two()
    assert (keys, Client(db).ack(batch=batch)) == (["c", "d"], 2)
    refused(STALE, session.ack)  # the other session has given the shard back
    assert session.fetch() == []


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
    assert client.fetch(max_bytes=1) == ["a", "e"], "one that comes again, and one of the log"
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
    refused(STALE, client.ack, batch=f"{destination}.{shard}.{token}.77.{start}.{to}.{check}")
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
