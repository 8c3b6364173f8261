"""What the cases of idempotent writes imply: what a claim and a replay cost, how long a claim lives through savepoints and
errors, what is remembered, whoever asks and in whatever encoding."""
import hashlib
import itertools
import random
import time

import psycopg2
import pytest

from conftest import Database, eventually, load_factor, run
from payments import (  # noqa: F401 (the fixture shop)
    ISOLATION_LEVELS, begin, begin_pending, complete, error_of, in_threads, insert_order, orders, pay, shop)
from rings import stopped_at


def test_a_replay_writes_nothing(shop):
    connection = shop.connect(autocommit=False)
    pay(connection, "k")
    pay(connection, "k")  # hint bits are set now
    assert begin(connection, "k")[0] == "replay"
    assert begin(connection, "k", "b")[0] == "conflict"
    assert run(connection, "SELECT outcome FROM idem_peek('k', 'a')") == [("replay",)]
    assert run(connection, "SELECT pg_current_xact_id_if_assigned()") == [(None,)]
    # Other processes may write WAL in between; a replay that writes would do so each time.
    eventually(lambda: run(connection, """
      WITH start AS MATERIALIZED (SELECT pg_current_wal_insert_lsn() AS lsn),
           call AS MATERIALIZED (SELECT outcome, lsn
                                   FROM start, LATERAL idem_begin('k', 'a', CASE WHEN lsn IS NULL THEN 'x' ELSE '' END))
      SELECT pg_current_wal_insert_lsn() = lsn FROM call WHERE outcome = 'replay'""")[0][0], timeout=10)


def test_waiters_get_no_transaction_id(shop):
    owner = shop.connect(autocommit=False)
    begin(owner, "k")
    assert run(owner, "SELECT pg_current_xact_id_if_assigned()") == [(None,)]
    waiter = begin_pending(shop, "k")
    assert waiter.blocks()
    complete(owner, "k", 1)
    owner.commit()
    assert waiter.result() == [("replay",)]
    assert waiter.run("SELECT pg_current_xact_id_if_assigned()") == [(None,)]
    waiter.close()


def test_a_replay_gives_the_lock_back(shop):
    """Waiters behind an owner do not line up behind each other's transactions."""
    owner = shop.connect(autocommit=False)
    begin(owner, "k")
    waiters = [begin_pending(shop, "k") for _ in range(3)]
    assert all(w.blocks() for w in waiters)
    complete(owner, "k", 1)
    owner.commit()
    for waiter in waiters:  # all of them answer while their transactions stay open
        assert waiter.result() == [("replay",)]
    assert shop.value("SELECT count(*) FROM pg_locks WHERE locktype = 'advisory'") == 0
    for waiter in waiters:
        waiter.close()


def test_peek_does_not_miss_an_answer_that_comes_between_its_looks(shop):
    owner = shop.connect(autocommit=False)
    begin(owner, "k")
    complete(owner, "k", 1)
    with stopped_at(shop, "idem.peek_at_lock", [["SELECT outcome FROM idem_peek('k', 'a')"]]) as (peek,):
        owner.commit()
    assert peek.result() == [("replay",)]
    peek.close()


def test_nobody_can_make_a_key_that_waits_for_another(shop):
    """As it was easy with the server's hash for tables: these two have one."""
    mine, theirs = ("abc)`ed{BS&Ipmw", "tenant-a"), ("theirs", "tenant-b")
    hashes = "SELECT hashtextextended(chr(octet_length(scope)) || scope || key, 0) FROM (VALUES (%s, %s), (%s, %s)) AS k (key, scope)"
    assert len(shop.sql(hashes, *mine, *theirs)) == 2 and len(set(shop.sql(hashes, *mine, *theirs))) == 1
    owner = shop.connect(autocommit=False)
    run(owner, "SELECT idem_begin(%s, 'h', %s)", *mine)
    with shop.connect(autocommit=False) as other:
        assert run(other, "SELECT outcome FROM idem_try_begin(%s, 'h', %s)", *theirs) == [("new",)]
        other.rollback()


def test_advisory_locks_of_users_are_another_matter(shop):
    owner = shop.connect(autocommit=False)
    begin(owner, "k")
    high, low = run(owner, """SELECT classid::bigint, objid::bigint FROM pg_locks
                               WHERE locktype = 'advisory' AND objsubid = 21075""")[0]
    other = shop.connect()
    user_lock = "pg_try_advisory_lock((%s::bit(32) || %s::bit(32))::bit(64)::bigint)"
    assert run(other, f"SELECT {user_lock}", high, low) == [(True,)]
    run(owner, "SELECT pg_advisory_unlock_all()")
    assert begin(other, "k", function="idem_try_begin")[0] == "in_progress"


def test_cursor_used_in_a_savepoint_that_is_rolled_back(shop):
    """The key is free when the claim is lost, although the cursor lives on."""
    first = shop.connect(autocommit=False)
    run(first, """DECLARE c CURSOR FOR
                  SELECT (SELECT outcome FROM idem_begin('k' || i, 'a')) FROM generate_series(1, 3) AS i""")
    assert run(first, "FETCH c") == [("new",)]
    run(first, "SAVEPOINT s")
    assert run(first, "FETCH c") == [("new",)]
    run(first, "ROLLBACK TO s")
    other = shop.connect(autocommit=False)
    assert begin(other, "k2", function="idem_try_begin")[0] == "new"
    assert begin(other, "k1", function="idem_try_begin")[0] == "in_progress"


def test_cursor_that_fails_in_a_savepoint_keeps_earlier_claims(shop):
    first = shop.connect(autocommit=False)
    run(first, """DECLARE c CURSOR FOR
                  SELECT (SELECT outcome FROM idem_begin('k' || i, 'a')), 1 / (i - 2)
                    FROM generate_series(1, 3) AS i""")
    assert run(first, "FETCH c") == [("new", -1)]
    run(first, "SAVEPOINT s")
    assert error_of(run, first, "FETCH c") == "22012"
    run(first, "ROLLBACK TO s")
    other = shop.connect(autocommit=False)
    assert begin(other, "k1", function="idem_try_begin")[0] == "in_progress"
    complete(first, "k1", 1)


def test_nested_savepoints(shop):
    connection = shop.connect(autocommit=False)
    run(connection, "SAVEPOINT a")
    begin(connection, "outer")
    run(connection, "SAVEPOINT b")
    begin(connection, "inner")
    run(connection, "SELECT idem_complete('inner'), idem_complete('outer')")
    run(connection, "RELEASE b")
    assert begin(connection, "inner")[0] == "replay"
    run(connection, "SAVEPOINT c")
    begin(connection, "third")
    run(connection, "ROLLBACK TO c")
    assert begin(connection, "inner")[0] == "replay"
    run(connection, "ROLLBACK TO a")
    for key in ("outer", "inner", "third"):
        run(connection, "SAVEPOINT e")
        assert error_of(run, connection, "SELECT idem_complete(%s)", key) == "RS007"
        run(connection, "ROLLBACK TO e")
        assert begin(connection, key)[0] == "new"
        run(connection, "SELECT idem_complete(%s)", key)
    connection.commit()


def test_complete_in_a_savepoint_that_is_rolled_back(shop):
    """The key is still owned: it has to be completed again, and no one else gets in between."""
    connection = shop.connect(autocommit=False)
    begin(connection, "k")
    run(connection, "SAVEPOINT s")
    complete(connection, "k", 1)
    run(connection, "ROLLBACK TO s")
    other = shop.connect()
    assert begin(other, "k", function="idem_try_begin")[0] == "in_progress"
    complete(connection, "k", 2)
    connection.commit()
    assert begin(other, "k")[1] == {"id": 2}


def test_an_expired_record_is_replaced(shop):
    connection = shop.connect(autocommit=False)
    begin(connection, "k", ttl="1 millisecond")
    complete(connection, "k", 1)
    connection.commit()
    eventually(lambda: shop.value("SELECT expires_at < clock_timestamp() FROM idempotency_records WHERE key = 'k'"))
    assert begin(connection, "k", "another")[0] == "new"
    complete(connection, "k", 2)
    connection.commit()
    assert begin(connection, "k", "another")[1] == {"id": 2}
    assert shop.value("SELECT count(*) FROM idempotency_records") == 1


def test_within_its_transaction_a_completed_key_does_not_expire(shop):
    connection = shop.connect(autocommit=False)
    begin(connection, "k", ttl="1 microsecond")
    complete(connection, "k", 1)
    expired = "SELECT expires_at < clock_timestamp() FROM idempotency_records WHERE key = 'k'"
    eventually(lambda: run(connection, expired)[0][0])
    assert begin(connection, "k") == ("replay", {"id": 1}, "completed")
    connection.commit()


def test_large_answers_are_toasted_and_replay(shop):
    connection = shop.connect(autocommit=False)
    begin(connection, "k")
    run(connection, "SELECT idem_complete('k', (SELECT jsonb_agg(md5(i::text)) FROM generate_series(1, 20000) AS i))")
    connection.commit()
    assert run(connection, "SELECT jsonb_array_length(response) FROM idem_begin('k', 'a')") == [(20000,)]


def test_long_session_does_not_grow(shop):
    """Claims are freed with their transaction."""
    connection = shop.connect()
    measure = "SELECT sum(total_bytes)::bigint FROM pg_backend_memory_contexts"

    def rounds(count):
        run(connection, f"""
          DO $$ BEGIN
            FOR i IN 1..{count} LOOP
              PERFORM idem_begin('k' || i, 'a');
              PERFORM idem_complete('k' || i);
              ROLLBACK;
            END LOOP;
          END $$""")

    rounds(200)
    before = run(connection, measure)[0][0]
    rounds(5000)
    assert run(connection, measure)[0][0] - before < 256 * 1024


def test_many_exception_blocks_in_one_transaction(shop):
    """Each completes and is rolled back: the key stays owned until the last one."""
    connection = shop.connect(autocommit=False)
    run(connection, "SET retrysafe.on_lost_claim = 'error'")
    run(connection, """
      DO $$ BEGIN
        PERFORM idem_begin('k', 'a');
        FOR i IN 1..5000 LOOP
          BEGIN
            PERFORM idem_complete('k', to_jsonb(i));
            IF i < 5000 THEN RAISE division_by_zero; END IF;
          EXCEPTION WHEN division_by_zero THEN
          END;
        END LOOP;
      END $$""")
    connection.commit()
    assert begin(connection, "k")[1] == 5000


def random_requests(db, seed, keys, deadline):
    """Requests that are rolled back, wholly or to savepoints, wherever that can happen; the answers seen."""
    dice = random.Random(seed)
    connection = db.connect(autocommit=False)
    isolation = dice.choice(("READ COMMITTED", *ISOLATION_LEVELS))
    connection.set_session(isolation_level=isolation)
    seen = []

    def request(key):
        outcome, response, _ = begin(connection, key, function=dice.choice(("idem_begin", "idem_try_begin")))
        if outcome != "new":
            return response and response["id"]
        order = insert_order(connection, key)
        for _ in range(dice.randrange(3)):
            run(connection, "SAVEPOINT inside")
            complete(connection, key, order)
            run(connection, "ROLLBACK TO inside")
        run(connection, "SAVEPOINT inside")
        complete(connection, key, order)
        run(connection, "RELEASE inside")
        return order

    while time.monotonic() < deadline:
        try:
            answers = []
            for key in sorted(dice.sample(keys, dice.randint(1, 3))):
                if dice.random() < 0.3:
                    run(connection, "SAVEPOINT outside")
                    request(key)
                    run(connection, "ROLLBACK TO outside")
                answers.append((key, request(key)))
            if dice.random() < 0.6:
                connection.commit()
                seen += [answer for answer in answers if answer[1]]
            else:
                connection.rollback()
        except psycopg2.Error as error:
            # Keys are locked in order, but a savepoint that is rolled back breaks that order.
            assert error.pgcode in ("40001", "40P01"), error
            connection.rollback()
    return seen


def test_random_histories(shop):
    """However requests are rolled back and interleaved: a key has one order, and every answer names it."""
    deadline = time.monotonic() + 8 * load_factor()
    keys = [f"k{i}" for i in range(int(400 * load_factor()))]
    results = in_threads([lambda n=n: random_requests(shop, n, keys, deadline) for n in range(8)])
    committed = dict(shop.sql("SELECT key, id FROM public.orders"))
    assert orders(shop) == len(committed), "a key has two orders"
    answers = set(itertools.chain(*results))
    assert answers <= set(committed.items())
    assert committed == dict(shop.sql("SELECT key, (response_json ->> 'id')::bigint FROM idempotency_records"))
    assert len(committed) == len(keys), "not all keys were used: the test shows little"


@pytest.mark.parametrize("encoding", ["LATIN1", "SQL_ASCII"])
def test_other_encodings(server, encoding):
    """Digests are the same in every encoding, and keys are bytes."""
    name = f"idem_{encoding.lower()}"
    admin = server.connect()
    run(admin, f"CREATE DATABASE {name} ENCODING '{encoding}' LOCALE 'C' TEMPLATE template0")
    try:
        db = Database(server, name)
        db.sql("CREATE SCHEMA retrysafe; CREATE EXTENSION retrysafe SCHEMA retrysafe")
        connection = db.connect(autocommit=False)
        connection.set_client_encoding("UTF8")
        run(connection, "SET search_path = retrysafe, public")
        wanted = hashlib.sha256('{"a": "é"}'.encode()).digest()
        assert bytes(run(connection, "SELECT idem_hash(%s)", '{"a":"é"}')[0][0]) == wanted
        assert begin(connection, "clé", "é")[0] == "new"
        run(connection, "SELECT idem_complete('clé')")
        assert begin(connection, "clé", psycopg2.Binary("é".encode()))[0] == "replay"
        connection.commit()
        if encoding == "SQL_ASCII":  # bytes that are no UTF-8
            broken = "convert_from('\\xff'::bytea, 'SQL_ASCII')"
            assert run(connection, f"SELECT outcome FROM idem_begin({broken}, {broken})") == [("new",)]
            run(connection, f"SELECT idem_complete({broken})")
            assert run(connection, f"SELECT outcome FROM idem_begin({broken}, '\\xff'::bytea)") == [("replay",)]
        db.close()
    finally:
        run(admin, f"DROP DATABASE {name} WITH (FORCE)")
        admin.close()


@pytest.mark.parametrize("call", ["idem_begin(k, 'h')", "outbox_emit(NULL, k, 't', '1')"])
def test_parallel_workers_own_nothing(db, call):
    """The processes of one query share their locks: two of them would both be new."""
    db.sql("CREATE TABLE many AS SELECT 'k' AS k FROM generate_series(1, 1000); ALTER TABLE many SET (parallel_workers = 2);"
           "CREATE FUNCTION wrapped(k text) RETURNS text LANGUAGE plpgsql PARALLEL SAFE AS"
           f" $$ BEGIN RETURN (SELECT {call}); END $$")
    session = db.connect()
    run(session, "SET parallel_setup_cost = 0; SET parallel_tuple_cost = 0; SET min_parallel_table_scan_size = 0")
    assert "Gather" in str(run(session, "EXPLAIN SELECT max(wrapped(k)) FROM many"))
    assert error_of(run, session, "SELECT max(wrapped(k)) FROM many") == "25000"
    run(session, "BEGIN READ WRITE; SELECT idem_begin('k', 'h'); SELECT idem_complete('k', '1'); COMMIT")
    if call.startswith("idem"):  # what is known already is answered
        assert run(session, "SELECT max(wrapped(k)) FROM many") == [("(replay,1,completed)",)]


def test_handler_runs_as_the_caller(shop):
    shop.sql("""
      CREATE ROLE clerk_of_{0} LOGIN;
      SELECT retrysafe_grant('clerk_of_{0}', 'write');
      CREATE FUNCTION public.who(jsonb) RETURNS jsonb LANGUAGE sql AS $$ SELECT to_jsonb(current_user::text) $$;
      CREATE FUNCTION public.secret(jsonb) RETURNS jsonb LANGUAGE sql AS $$ SELECT $1 $$;
      REVOKE ALL ON FUNCTION public.secret FROM PUBLIC""".format(shop.name))
    try:
        clerk = shop.connect(user=f"clerk_of_{shop.name}")
        assert run(clerk, "SELECT idem_run('k', '{}', 'public.who(jsonb)')") == [(f"clerk_of_{shop.name}",)]
        assert error_of(run, clerk, "SELECT idem_run('s', '{}', 'public.secret(jsonb)')") == "42501"
        # Knows the digest: gets the answer. Does not: may not even ask.
        assert run(clerk, "SELECT outcome FROM idem_peek('k', idem_hash('{}'))") == [("replay",)]
        assert run(clerk, "SELECT outcome, response FROM idem_peek('k', 'guess')") == [("conflict", None)]
        assert error_of(run, clerk, "SELECT * FROM idem_peek('k')") == "42501"
        assert error_of(run, clerk, "SELECT * FROM idempotency_records") == "42501"
        assert error_of(run, clerk, "SELECT idem_cleanup()") == "42501"
        clerk.close()
    finally:
        shop.sql(f"DROP OWNED BY clerk_of_{shop.name}")
        shop.sql(f"DROP ROLE clerk_of_{shop.name}")


def test_record_written_past_the_lock_is_not_overwritten(shop):
    """The unique constraint stays the net below the lock."""
    connection = shop.connect(autocommit=False)
    begin(connection, "k")
    shop.sql("INSERT INTO idem_records_1 VALUES ('k', '', 'a', 'completed', '1', now(), now(), now() + interval '1 day', '1')")
    assert error_of(complete, connection, "k", 1) == "40001"
    connection.rollback()
    assert begin(connection, "k") == ("replay", 1, "completed")
