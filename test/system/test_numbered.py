"""Events without event keys: numbered within their request, published as IDEMPOTENCY_KEY~NUMBER."""
import contextlib
import hashlib
import json
import signal
import uuid

import pytest

import closing
from conftest import cluster, eventually, kill, make_database, run
from null_destination import NullDestination
from pull_client import Client, create
from receiver import Answer, Receiver
from relay_process import Relay
from test_http import key_of


def begin(connection, key, scope=""):
    return run(connection, "SELECT outcome FROM idem_begin(%s, 'digest', %s)", key, scope)[0][0]


def emit(connection, key, payload="1", scope="", **options):
    extra = "".join(f", {name} => %s" for name in options)
    return run(connection, f"SELECT outbox_emit(%s, NULL, 't', %s, scope => %s{extra})", key, payload, scope,
               *options.values())[0][0]


def complete(connection, key, scope=""):
    run(connection, "SELECT idem_complete(%s, '1', %s)", key, scope)


def request(db, key, *payloads, scope="", **options):
    """One request, a transaction of its own."""
    connection = db.connect(autocommit=False)
    assert begin(connection, key, scope) == "new"
    for payload in payloads:
        emit(connection, key, payload, scope, **options)
    complete(connection, key, scope)
    connection.commit()
    connection.close()


def log(db):
    """(text, number, payload) in the order of positions; the view and the function agree on the ids."""
    rows = db.sql("""SELECT coalesce(event_key, idempotency_key || '~' || event_number), event_number, payload::text, event_id, scope
                       FROM outbox_events ORDER BY id""")
    for key, _, _, event_id, scope in rows:
        assert db.value("SELECT outbox_event_id(%s, %s)", key, scope) == event_id
    return [row[:3] for row in rows]


def forget(db, key):
    db.sql("SELECT idem_forget(%s)", key)


# -- what consumers see --

def test_a_pull_client_sees_the_text(db):
    create(db)
    request(db, "pay-1", "1", "2", scope="shop", ordering_key="a")
    client = Client(db)
    assert client.fetch() == ["pay-1~1", "pay-1~2"]
    assert [str(row[1]) for row in client.rows] == [
        str(i) for (i,) in db.sql("SELECT outbox_event_id('pay-1~' || n, 'shop') FROM generate_series(1, 2) n")]
    assert client.ack() == 2
    assert client.fetch() == []


@contextlib.contextmanager
def publishing(db, publisher, receiver, start_at="now", max_attempts=10):
    """A destination `d` of a worker, or of a relay."""
    db.sql("SELECT outbox_create_destination('d', 'http', %s, %s, workers => %s, max_attempts => %s, backoff => '10 ms',"
           " backoff_max => '20 ms')", json.dumps({"url": receiver.url}), start_at, publisher == "worker", max_attempts)
    if publisher == "worker":
        yield
    else:
        with Relay(db, "--allowed-addresses", "127.0.0.1, ::1", "d") as relay:
            yield
            assert relay.stop() == 0, relay.log()


@pytest.mark.parametrize("publisher", ["worker", "relay"])
def test_a_sink_sees_the_text(db, publisher):
    with Receiver() as receiver, publishing(db, publisher, receiver):
        request(db, "pay é ~7", '"x"', '"y"', ordering_key="o")
        longest = "k" * 255
        request(db, longest, *["1"] * 12)
        wanted = ["pay é ~7~1", "pay é ~7~2"] + [f"{longest}~{n}" for n in range(1, 13)]
        eventually(lambda: len(receiver.requests) >= len(wanted))
        assert sorted(key_of(r) for r in receiver.requests) == sorted(wanted)
        assert {key_of(r): r.header("ce-id") for r in receiver.requests} == {
            key: db.value("SELECT outbox_event_id(%s)::text", key) for key in wanted}
        eventually(lambda: db.value("SELECT delivered FROM outbox_status") == len(wanted))
        closing.balance(db, "d", receiver.ids)


def test_a_function_sees_the_text(db):
    db.sql("CREATE TABLE public.seen (event jsonb)")
    db.sql("CREATE FUNCTION public.see(event jsonb) RETURNS void LANGUAGE sql AS 'INSERT INTO public.seen VALUES (event)'")
    db.sql("""SELECT outbox_create_destination('d', 'function', '{"function": "public.see"}')""")
    request(db, "pay-1", "1")
    eventually(lambda: db.sql("SELECT event ->> 'key', event ->> 'id' FROM public.seen") == db.sql(
        "SELECT 'pay-1~1', outbox_event_id('pay-1~1')::text"))


def test_failed_ones_keep_their_text(db):
    """Parked, tried again, dead, and sent again by hand, with a key of 255 bytes."""
    key = "k" * 253 + "é"
    create(db, max_attempts=2, backoff="1 ms", backoff_max="1 ms")
    request(db, key, "1", "2", "3", ordering_key="o")
    client = Client(db)
    assert client.fetch() == [f"{key}~{n}" for n in (1, 2, 3)]
    ids = {row[4]: row[1] for row in client.rows}
    client.nack(f"{key}~2")
    client.ack()
    eventually(lambda: client.fetch() == [f"{key}~2", f"{key}~3"])
    assert {row[4]: row[1] for row in client.rows}.items() <= ids.items()
    client.nack(f"{key}~2", "broken")
    eventually(lambda: client.fetch() == [f"{key}~3"])
    client.ack()
    assert db.sql("SELECT event_key, event_id, idempotency_key, reason FROM outbox_dead_letters") == [
        (f"{key}~2", ids[f"{key}~2"], key, "broken")]
    assert db.value("SELECT outbox_retry('d', event_id => %s)", ids[f"{key}~2"]) == 1
    eventually(lambda: client.fetch() == [f"{key}~2"])
    assert client.rows[0][1] == ids[f"{key}~2"]
    client.ack()
    assert client.fetch() == []
    closing.balance(db, "d", [str(i) for i in ids.values()])


# -- numbers are those of what is committed --

def ids(db, key=None):
    return [i for (i,) in db.sql("SELECT event_id::text FROM outbox_events WHERE %s::text IS NULL OR idempotency_key = %s"
                                 " ORDER BY id", key, key)]


def test_a_repeated_request_gives_the_same_ids(db):
    """After a transaction that was lost, whatever its savepoints did."""
    create(db)
    c = db.connect(autocommit=False)
    lost = []
    for attempt in range(3):
        assert begin(c, "k") == "new"
        emit(c, "k", '"first"')
        for i in range(attempt):
            run(c, "SAVEPOINT s")
            emit(c, "k", '"undone"')
            run(c, "ROLLBACK TO s")
        run(c, "SAVEPOINT kept")
        emit(c, "k", '"second"')
        run(c, "RELEASE kept")
        complete(c, "k")
        lost.append(run(c, "SELECT event_id, payload FROM outbox_events ORDER BY id"))
        c.rollback()
    assert lost[0] == lost[1] == lost[2]
    request(db, "k", '"first"', '"second"')
    assert db.sql("SELECT event_id, payload FROM outbox_events ORDER BY id") == lost[0]
    assert begin(c, "k") == "replay", "the answer was lost, and nothing else"
    c.commit()
    assert [number for _, number, _ in log(db)] == [1, 2]


@pytest.fixture(scope="module")
def own():
    with cluster("wal_writer_delay = 10s", "retrysafe.workers_per_database = 0", "retrysafe.outbox_retention = 0",
                 "autovacuum = off") as server:
        yield server


def test_a_request_that_was_lost_with_the_last_wal(own_db):
    db = own_db
    create(db)
    request(db, "other", "1")
    c = db.connect(autocommit=False)
    run(c, "SET synchronous_commit = off")
    c.commit()
    begin(c, "k")
    emit(c, "k")
    emit(c, "k")
    complete(c, "k")
    lost = run(c, "SELECT event_id::text FROM outbox_events WHERE idempotency_key = 'k' ORDER BY id")
    c.commit()
    kill(db.server.pid, signal.SIGQUIT)  # an immediate stop
    db.close()
    eventually(lambda: not (db.server.directory / "data/postmaster.pid").exists())
    db.server.pg_ctl("start")
    assert db.value("SELECT count(*) FROM outbox_events") == 1, "the request was not lost: the test shows nothing"
    request(db, "k", "1", "1")
    assert ids(db, "k") == [i for (i,) in lost]


def test_prepared_and_restarted(own_db):
    db = own_db
    create(db)
    c = db.connect()
    for name in ("good", "bad"):
        run(c, "BEGIN")
        begin(c, name)
        emit(c, name)
        run(c, "SAVEPOINT s")
        emit(c, name)
        run(c, "ROLLBACK TO s")
        emit(c, name, "2")
        emit(c, name, deliver_after="2001-01-01")
        complete(c, name)
        run(c, f"PREPARE TRANSACTION '{name}'")
    db.close()
    db.server.pg_ctl("restart", "-m", "immediate")
    db.sql("COMMIT PREPARED 'good'")
    db.sql("ROLLBACK PREPARED 'bad'")
    assert log(db) == [("good~1", 1, "1"), ("good~2", 2, "2"), ("good~3", 3, "1")]
    request(db, "bad", "1")
    assert Client(db).fetch() == ["good~1", "good~2", "good~3", "bad~1"]


def test_two_sessions_of_one_key(db):
    """Whoever comes second gets the answer; if the first rolls back its numbers are free again."""
    first = db.connect(autocommit=False)
    begin(first, "k")
    emit(first, "k", '"lost"')
    second = db.connect(autocommit=False)
    run(second, "SET lock_timeout = '100 ms'")
    assert run(second, "SELECT outcome FROM idem_try_begin('k', 'digest')") == [("in_progress",)]
    first.rollback()
    assert begin(second, "k") == "new"
    emit(second, "k", '"kept"')
    complete(second, "k")
    second.commit()
    assert log(db) == [("k~1", 1, '"kept"')]
    assert begin(first, "k") == "replay"


# -- delayed ones --

def test_delayed_ones_are_known_by_their_text(own_db):
    db = own_db
    create(db)
    c = db.connect(autocommit=False)
    begin(c, "k")
    emit(c, "k", "1")
    for n in (2, 3):
        assert emit(c, "k", str(n), deliver_after="2100-01-01") is None
    emit(c, "k", "4")
    complete(c, "k")
    c.commit()
    wanted = db.sql("SELECT event_id FROM outbox_scheduled_events ORDER BY event_key")
    assert wanted == db.sql("SELECT outbox_event_id('k~' || n) FROM generate_series(2, 3) n")
    assert db.value("SELECT outbox_cancel('k~3')")
    db.sql("UPDATE outbox_scheduled SET deliver_after = clock_timestamp()")
    client = Client(db)
    assert client.drain() == ["k~1", "k~4", "k~2"]
    assert log(db) == [("k~1", 1, "1"), ("k~4", 4, "4"), ("k~2", 2, "2")]


@pytest.mark.parametrize("again", ["1", "2"])
def test_delayed_ones_of_a_key_that_is_used_again(own_db, again):
    """Delayed or not, they are not looked for: not while the first one waits, not when it has been moved, whatever they say."""
    db = own_db
    create(db)
    client = Client(db)

    def delayed(payload):
        request(db, "k", payload, ordering_key="o", deliver_after="2100-01-01")
        forget(db, "k")

    def come_due():
        db.sql("UPDATE outbox_scheduled SET deliver_after = clock_timestamp()")
        assert client.fetch() == [], "it moves them: they are there when it has committed"
        return client.drain()

    delayed("1")
    assert come_due() == ["k~1"]
    delayed(again)
    delayed("1")
    assert db.sql("SELECT event_key, payload::text FROM outbox_scheduled_events ORDER BY created_at") == [("k~1", again), ("k~1", "1")]
    assert come_due() == ["k~1"] * 2
    assert log(db) == [("k~1", 1, "1"), ("k~1", 1, again), ("k~1", 1, "1")]
    delayed("1")
    delayed(again)
    assert db.value("SELECT outbox_cancel('k~1')"), "all that have the key"
    assert not db.value("SELECT outbox_cancel('k~1')")
    assert come_due() == []
    request(db, "k", again)
    assert client.drain() == ["k~1"]


# -- rings, indexes, encodings --

def test_no_entry_in_the_index_of_event_keys(db):
    """That is what makes them cheap; and no look-up needs one."""
    size = "SELECT pg_relation_size('outbox_log_event_key_1')"
    request(db, "warm", "1")
    before = db.value(size)
    request(db, "k", *["1"] * 1000)
    assert db.value(size) == before
    db.sql("SELECT outbox_emit(NULL, 'own', 't', '1')")
    assert db.value(size) > before
    session = db.connect()
    run(session, "CREATE EXTENSION amcheck SCHEMA public")
    for index in ("event_key", "pkey", "txid"):
        run(session, "SELECT public.bt_index_check(%s::regclass, true)", f"outbox_log_{index}_1")



def test_a_turn_in_the_middle_of_a_request(own_db):
    db = own_db
    create(db)
    request(db, "before", "1")
    c = db.connect(autocommit=False)
    begin(c, "k")
    emit(c, "k")
    def turned():
        db.sql("SELECT outbox_cleanup()")
        return db.value("SELECT max(generation) FROM ring_pieces WHERE ring = 'log'") == 2
    eventually(turned)
    emit(c, "k")
    complete(c, "k")
    c.commit()
    assert db.sql("SELECT tableoid::regclass::text, event_number FROM outbox_log WHERE idempotency_key = 'k' ORDER BY id") == [
        ("outbox_log_1", 1), ("outbox_log_2", 2)]
    assert Client(db).fetch() == ["before~1", "k~1", "k~2"]


@pytest.mark.parametrize("encoding, key", [("LATIN1", "clé"), ("EUC_JP", "鍵")])
def test_encodings(server, encoding, key):
    db = make_database(server, options=f"ENCODING '{encoding}' LOCALE 'C' TEMPLATE template0")
    create(db)
    c = db.connect(autocommit=False)
    c.set_client_encoding("UTF8")
    begin(c, key)
    emit(c, key, '"é"' if encoding == "LATIN1" else '"鍵"')
    complete(c, key)
    c.commit()
    (shown, event_id), = run(c, "SELECT event_key, event_id::text FROM outbox_fetch('d')")
    assert shown == f"{key}~1"
    assert [event_id] == ids(db)
    log_id = uuid.UUID(db.value("SELECT log::text FROM outbox_eras"))
    digest = hashlib.sha256(log_id.bytes + b"\0" + f"{key}~1".encode()).digest()
    assert uuid.UUID(event_id) == uuid.UUID(bytes=digest[:6] + bytes([digest[6] & 15 | 128, digest[7], digest[8] & 63 | 128])
                                            + digest[9:16])
    c.rollback()
    db.close()


# -- a key that is used again --

def used_again(db, *payloads, ordering_key=None):
    """Two requests of one key, the second after the record of the first is gone; both have the event id of k~1."""
    for payload in payloads:
        request(db, "k", payload, ordering_key=ordering_key)
        forget(db, "k")
    (same,), = db.sql("SELECT count(DISTINCT event_id) FROM outbox_events")
    assert same == 1
    return db.value("SELECT DISTINCT event_id FROM outbox_events")


def test_numbers_begin_again_when_a_key_is_used_again(db):
    create(db)
    used_again(db, '"old"', '"new"')
    assert log(db) == [("k~1", 1, '"old"'), ("k~1", 1, '"new"')]
    client = Client(db)
    assert client.fetch() == ["k~1", "k~1"]
    assert client.ack(batch=client.batch, up_to=None) == 2
    assert client.fetch() == []


def test_acknowledging_between_two_with_one_id(db):
    create(db)
    used_again(db, "1", "2")
    client = Client(db)
    client.fetch()
    assert run(client.connection, "SELECT outbox_ack(%s, %s)", client.batch, client.rows[0][2]) == [(1,)]
    assert client.fetch() == ["k~1"]
    assert run(client.connection, "SELECT payload FROM outbox_fetch('d')") == [(2,)]


def test_refusing_one_of_two_with_one_id(db):
    """The id does not tell which of them it was: both come again. Naming it for each of them is no error."""
    create(db)
    event_id = used_again(db, "1", "2")
    client = Client(db)
    client.fetch()
    refuse = "SELECT outbox_nack(%s, %s, 'no', '0 s')"
    assert run(client.connection, refuse, client.batch, event_id) == [(2,)]
    assert run(client.connection, refuse, client.batch, event_id) == [(0,)]
    client.ack()
    eventually(lambda: len(client.fetch()) == 2)
    assert run(client.connection, "SELECT payload FROM outbox_fetch('d')") == [(1,), (2,)]
    client.ack()
    assert client.fetch() == []


@pytest.mark.parametrize("status, left", [("retry", 2), ("not tried", 2), ("dead", 0)])
def test_recording_two_with_one_id(db, status, left):
    create(db, backoff="1 ms", backoff_max="1 ms")
    event_id = used_again(db, "1", "2")
    client = Client(db)
    client.fetch()
    run(client.connection, "SELECT outbox_record(%s, %s)", client.batch, json.dumps({str(event_id): {"status": status}}))
    eventually(lambda: len(client.fetch()) == left)
    assert db.value("SELECT count(*) FROM outbox_dead_letters") == (2 if status == "dead" else 0)


@pytest.mark.parametrize("ordering_key", [None, "o"])
@pytest.mark.parametrize("publisher", ["worker", "relay"])
@pytest.mark.parametrize("failing", ["old", "new"])
def test_one_of_two_with_one_id_fails(db, publisher, failing, ordering_key):
    """Whichever it is comes again, until it is through."""
    create(db, "first")  # event ids begin with it
    used_again(db, '"old"', '"new"', ordering_key=ordering_key)
    with Receiver() as receiver:
        refused = []

        def answer(request):
            if json.loads(request.body) == failing and len(refused) < 2:
                refused.append(request)
                return Answer(500)
            return 204

        receiver.behave(answer)
        with publishing(db, publisher, receiver, "earliest"):
            eventually(lambda: db.sql("SELECT backlog, parked_retry, dead FROM outbox_status WHERE name = 'd'") == [(0, 0, 0)])
            assert len(refused) == 2
            bodies = [json.loads(request.body) for request in receiver.requests]
            assert bodies.count(failing) >= 3 and set(bodies) == {"old", "new"}


@pytest.mark.parametrize("publisher", ["worker", "relay"])
def test_one_of_two_with_one_id_fails_with_an_attempt_for_each_time(db, publisher):
    create(db, "first")
    used_again(db, '"old"', '"new"', ordering_key="o")
    with Receiver() as receiver:
        receiver.behave(lambda request: Answer(500) if json.loads(request.body) == "old" else 204)
        with publishing(db, publisher, receiver, "earliest", max_attempts=3):
            eventually(lambda: db.sql("SELECT backlog, parked_retry, parked_blocked, dead FROM outbox_status WHERE name = 'd'")
                       == [(0, 0, 0, 1)])
        assert [json.loads(request.body) for request in receiver.requests] == ["old"] * 3 + ["new"]


@pytest.mark.parametrize("publisher", ["worker", "relay"])
def test_two_with_one_id_come_to_different_ends(db, publisher):
    """None of them is lost, and none comes again for ever; a relay can record one outcome for an id."""
    create(db, "first")
    used_again(db, '"old"', '"new"')
    with Receiver() as receiver:
        receiver.behave(lambda request: Answer(422) if json.loads(request.body) == "old" else 204)
        with publishing(db, publisher, receiver, "earliest", max_attempts=3):
            eventually(lambda: db.sql("SELECT backlog, parked_retry, parked_blocked FROM outbox_status WHERE name = 'd'")
                       == [(0, 0, 0)])
        bodies = [json.loads(request.body) for request in receiver.requests]
        assert set(bodies) == {"old", "new"}
        assert ('"old"',) in db.sql("SELECT payload::text FROM outbox_dead_letters")
        if publisher == "worker":
            assert bodies == ["old", "new"] or bodies == ["new", "old"]


def test_many_in_one_transaction(db):
    """More subtransactions than anybody wants, and the memory of a claim does not grow with its events."""
    d = NullDestination(db, options='"parallel": 64', batch_events=1000)
    c = db.connect(autocommit=False)
    begin(c, "k")
    run(c, "DO $$ BEGIN FOR i IN 1..20000 LOOP PERFORM retrysafe.outbox_emit('k', NULL, 't', to_jsonb(i));"
           " END LOOP; FOR i IN 1..2000 LOOP BEGIN PERFORM retrysafe.outbox_emit('k', NULL, 't', to_jsonb(i));"
           " PERFORM 1 / (i % 2); EXCEPTION WHEN division_by_zero THEN NULL; END; END LOOP; END $$")
    complete(c, "k")
    c.commit()
    assert db.sql("SELECT count(*), max(event_number), count(DISTINCT event_number) FROM outbox_log") == [(21000,) * 3]
    eventually(lambda: len(d.ids()) >= 21000, 60)
    assert set(d.delivered()) == {f"k~{n}" for n in range(1, 21001)}
    closing.balance(db, "d", d.ids())
