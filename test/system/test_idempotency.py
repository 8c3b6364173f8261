"""Idempotent writes: the cases from the field, with real concurrent sessions."""
import hashlib
import itertools
import os
import random
import shutil
import subprocess
import time

import psycopg2
import pytest

from conftest import Database, Pending, Server, cluster, eventually, load_factor, make_database, run
from payments import (announce_orders, assert_orders_in_balance, begin, complete, error_of, in_threads, insert_order,
                      make_orders, orders, pay, pay_in_new_session)

ISOLATION_LEVELS = ("REPEATABLE READ", "SERIALIZABLE")


@pytest.fixture
def shop(db):
    make_orders(db)
    announce_orders(db)
    yield db
    assert_orders_in_balance(db)


def begin_pending(db, key, digest="a", *before):
    return Pending(db, *before, "BEGIN", f"SELECT outcome FROM idem_begin('{key}', '{digest}')")


# --- the cases --------------------------------------------------------------------------------------------------


def test_case_01_twenty_connections_one_key(shop):
    connections = [shop.connect(autocommit=False) for _ in range(20)]
    for number in range(50):
        key = f"demo-{number:03}"
        results = in_threads([lambda c=c: pay(c, key, work="SELECT pg_sleep(0.2)") for c in connections])
        outcomes = sorted(outcome for outcome, _ in results)
        assert outcomes == ["new"] + ["replay"] * 19
        assert len({order for _, order in results}) == 1
    assert orders(shop) == 50


@pytest.mark.parametrize("owner_commits", [True, False])
def test_case_02_other_digest_in_flight(shop, owner_commits):
    a = shop.connect(autocommit=False)
    assert begin(a, "k", "a")[0] == "new"
    b = begin_pending(shop, "k", "b")
    assert b.blocks()
    if owner_commits:
        complete(a, "k", insert_order(a, "k"))
        a.commit()
        assert b.result() == [("conflict",)]
        assert b.run("SELECT 1") == [(1,)]
    else:
        a.rollback()
        assert b.result() == [("new",)]
    b.close()


@pytest.mark.alone
def test_case_03_five_waiters_behind_a_rollback(shop):
    owner = shop.connect(autocommit=False)
    begin(owner, "k")
    waiters = [begin_pending(shop, "k") for _ in range(5)]
    assert all(w.blocks() for w in waiters)
    owner.rollback()
    started = time.monotonic()
    first = eventually(lambda: next((w for w in waiters if w._wait(0)), None), timeout=2)
    assert time.monotonic() - started < 2
    assert first.result() == [("new",)]
    others = [w for w in waiters if w is not first]
    assert all(w.blocks() for w in others)
    first.run("SELECT idem_complete('k', '{\"id\": 7}')")
    first.run("COMMIT")
    for waiter in others:
        assert waiter.result() == [("replay",)]
        assert waiter.run("SELECT response FROM idem_begin('k', 'a')") == [({"id": 7},)]
    for waiter in waiters:
        waiter.close()


def test_case_04_expiry_and_clean_up_under_load(shop):
    shop.sql("CREATE TABLE public.work (id bigint, key text, begun timestamptz, completing timestamptz)")
    deadline = time.monotonic() + 8 * load_factor()

    def use(number):
        connection = shop.connect(autocommit=False)
        answers = []
        while time.monotonic() < deadline:
            key = f"k{number % 4}"
            outcome, response, _ = begin(connection, key, ttl="1 second")
            if outcome == "new":
                begun = run(connection, "SELECT clock_timestamp()")[0][0]
                order = insert_order(connection, key)
                run(connection, "INSERT INTO public.work VALUES (%s, %s, %s, clock_timestamp())", order, key, begun)
                complete(connection, key, order)
            else:
                assert outcome == "replay" and response is not None
                order = response["id"]
            connection.commit()
            answers.append((key, order))
        return answers

    def clean_up():
        connection = shop.connect()
        removed = 0
        while time.monotonic() < deadline:
            removed += run(connection, "SELECT idem_cleanup(2)")[0][0]
        return removed

    results = in_threads([lambda n=n: use(n) for n in range(8)] + [clean_up])
    assert results.pop() > 0, "the clean-up had nothing to do: the test shows nothing"
    known = {(key, order) for order, key in shop.sql("SELECT id, key FROM public.orders")}
    assert {answer for answers in results for answer in answers} <= known
    assert len(known) > 8
    too_early = shop.sql("""
      SELECT * FROM (SELECT key, begun, lag(completing) OVER (PARTITION BY key ORDER BY begun) AS previous
                       FROM public.work) AS w
       WHERE begun < previous + interval '1 second'""")
    assert too_early == []


@pytest.mark.alone
def test_case_05_lock_timeout_and_try(shop):
    owner = shop.connect(autocommit=False)
    begin(owner, "k")
    other = shop.connect(autocommit=False)
    run(other, "SET LOCAL lock_timeout = '200ms'")
    assert error_of(begin, other, "k") == "55P03"
    other.rollback()
    started = time.monotonic()
    assert begin(other, "k", function="idem_try_begin") == ("in_progress", None, None)
    assert time.monotonic() - started < 0.5
    assert run(other, "SELECT 1") == [(1,)]
    complete(owner, "k", insert_order(owner, "k"))
    owner.commit()
    assert begin(other, "k", function="idem_try_begin")[0] == "replay"


@pytest.mark.alone
@pytest.mark.parametrize("how", ["terminated", "vanished"])
def test_case_06_the_owner_dies(shop, how):
    owner = shop.connect(autocommit=False)
    run(owner, "SET idle_in_transaction_session_timeout = '1s'" if how == "vanished" else "SELECT 1")
    begin(owner, "k")
    insert_order(owner, "k")
    waiter = begin_pending(shop, "k")
    assert waiter.blocks()
    if how == "terminated":
        shop.sql("SELECT pg_terminate_backend(%s)", owner.info.backend_pid)
    assert waiter.result(timeout=2) == [("new",)]
    assert orders(shop) == 0
    waiter.close()


def test_case_07_savepoint_rolled_back(shop):
    first = shop.connect(autocommit=False)
    run(first, "SAVEPOINT s")
    begin(first, "k")
    run(first, "ROLLBACK TO s")
    assert pay_in_new_session(shop, "k")[0] == "new"
    order = insert_order(first, "k")
    assert error_of(complete, first, "k", order) == "RS007"
    first.commit()  # of a failed transaction: the server rolls it back
    assert orders(shop) == 1


def test_case_08_exception_block_rolled_back(shop):
    first = shop.connect(autocommit=False)
    run(first, """
      DO $$
      BEGIN
        PERFORM idem_begin('k', 'a');
        PERFORM 1 / 0;
      EXCEPTION WHEN division_by_zero THEN
      END $$""")
    assert pay_in_new_session(shop, "k")[0] == "new"
    order = insert_order(first, "k")
    assert error_of(complete, first, "k", order) == "RS007"
    first.rollback()
    assert orders(shop) == 1


@pytest.mark.parametrize("setting", ["warning", "error"])
def test_case_08_commit_after_a_lost_claim(shop, setting):
    first = shop.connect(autocommit=False)
    run(first, f"SET retrysafe.on_lost_claim = '{setting}'")
    first.commit()
    run(first, "SAVEPOINT s")
    begin(first, "k")
    run(first, "ROLLBACK TO s")
    insert_order(first, "k")
    if setting == "warning":
        first.commit()
        assert any("was rolled back and the key was not begun again" in notice for notice in first.notices)
    else:
        assert error_of(first.commit) == "RS015"
    assert orders(shop) == (1 if setting == "warning" else 0)


def test_case_08_begun_again_after_a_lost_claim(shop):
    """Whoever begins again learns who did the work, and nothing is lost any more."""
    first = shop.connect(autocommit=False)
    run(first, "SET retrysafe.on_lost_claim = 'error'")
    first.commit()
    run(first, "SAVEPOINT s")
    begin(first, "k")
    run(first, "ROLLBACK TO s")
    order = pay_in_new_session(shop, "k")[1]
    assert begin(first, "k") == ("replay", {"id": order}, "completed")
    first.commit()


def test_case_09_business_failure_and_transient_failure(shop):
    connection = shop.connect(autocommit=False)
    begin(connection, "k")
    run(connection, "SAVEPOINT work")
    assert error_of(run, connection, "SELECT 1 / 0") == "22012"
    run(connection, "ROLLBACK TO work")
    run(connection, "SELECT idem_complete('k', '{\"error\": \"no funds\"}', status => 'failed')")
    connection.commit()
    for _ in range(3):
        assert begin(connection, "k") == ("replay", {"error": "no funds"}, "failed")
        connection.commit()

    begin(connection, "t")
    connection.rollback()
    assert begin(connection, "t")[0] == "new"


def test_case_10_commit_without_complete(shop):
    connection = shop.connect(autocommit=False)
    begin(connection, "k")
    insert_order(connection, "k")
    assert error_of(connection.commit) == "RS008"
    assert orders(shop) == 0
    assert begin(connection, "k")[0] == "new"


@pytest.mark.parametrize("level", ISOLATION_LEVELS)
def test_case_11_snapshot_older_than_the_record(shop, level):
    old = shop.connect(autocommit=False)
    old.set_session(isolation_level=level)
    assert run(old, "SELECT count(*) FROM public.orders") == [(0,)]
    order = pay_in_new_session(shop, "k")[1]
    assert error_of(begin, old, "k") == "40001"
    old.rollback()
    assert begin(old, "k") == ("replay", {"id": order}, "completed")
    old.commit()


@pytest.mark.parametrize("level", ISOLATION_LEVELS)
def test_case_11_waiter_whose_snapshot_cannot_see_the_answer(shop, level):
    owner = shop.connect(autocommit=False)
    begin(owner, "k")
    waiter = Pending(shop, f"BEGIN ISOLATION LEVEL {level}", "SELECT outcome FROM idem_begin('k', 'a')")
    assert waiter.blocks()
    complete(owner, "k", insert_order(owner, "k"))
    owner.commit()
    assert error_of(waiter.result) == "40001"
    waiter.run("ROLLBACK")
    assert waiter.run("SELECT outcome FROM idem_begin('k', 'a')") == [("replay",)]
    waiter.close()


@pytest.mark.parametrize("level", ISOLATION_LEVELS)
def test_case_11_expired_record_that_the_snapshot_cannot_see(shop, level):
    old = shop.connect(autocommit=False)
    old.set_session(isolation_level=level)
    run(old, "SELECT 1")
    short = shop.connect(autocommit=False)
    begin(short, "k", ttl="1 microsecond")
    complete(short, "k", 1)
    short.commit()
    assert error_of(begin, old, "k") == "40001"
    old.rollback()
    assert begin(old, "k")[0] == "new"


@pytest.mark.parametrize("level", ISOLATION_LEVELS)
def test_case_11_twenty_connections_retrying(shop, level):
    def request():
        connection = shop.connect(autocommit=False)
        connection.set_session(isolation_level=level)
        for _ in range(50):
            try:
                return pay(connection, "k", work="SELECT pg_sleep(0.05)")
            except psycopg2.Error as error:
                assert error.pgcode == "40001"
                connection.rollback()
        raise AssertionError("50 retries were not enough")

    results = in_threads([request] * 20)
    assert sorted(outcome for outcome, _ in results) == ["new"] + ["replay"] * 19
    assert len({order for _, order in results}) == 1
    assert orders(shop) == 1


def test_case_11_serializable_sessions_with_distinct_keys_do_not_meet(shop):
    """Neither on empty tables nor on full ones: look-ups take no predicate locks."""
    sessions = [shop.connect(autocommit=False) for _ in range(2)]
    for session in sessions:
        session.set_session(isolation_level="SERIALIZABLE")
    for round_number in range(20):
        keys = [f"{round_number}-{i}" for i in range(2)]
        for session, key in zip(sessions, keys):
            assert begin(session, key)[0] == "new"
        for session, key in zip(sessions, keys):
            complete(session, key, 1)
        for session in sessions:
            session.commit()
    # Replays mixed with new work, crosswise: the shape of a write skew.
    for round_number in range(19):
        for i, session in enumerate(sessions):
            assert begin(session, f"{round_number}-{1 - i}")[0] == "replay"
            assert begin(session, f"x{round_number}-{i}")[0] == "new"
        for i, session in enumerate(sessions):
            complete(session, f"x{round_number}-{i}", 1)
        for session in sessions:
            session.commit()


def test_case_14_digests_of_json(shop):
    def digest(json):
        return bytes(shop.value("SELECT idem_hash(%s::jsonb)", json))

    assert digest('{"a":1,"b":2}') == digest('{ "b" : 2, "a" : 1 }')
    assert digest("9007199254740993") != digest("9007199254740992")
    assert digest('"0.1"') != digest("0.1")
    assert digest("1.5") != digest("1.50")
    assert digest('"\\u00e9"') == digest('"é"')
    assert len(digest("null")) == 32


@pytest.mark.parametrize("function", [
    "idem_begin(%s, 'a')", "idem_try_begin(%s, 'a')", "idem_complete(%s)", "idem_peek(%s, 'a')", "idem_forget(%s)",
    "idem_run(%s, '{}', 'public.answer(jsonb)')"])
def test_case_15_bad_keys(shop, function):
    shop.sql("CREATE FUNCTION public.answer(jsonb) RETURNS jsonb LANGUAGE sql AS 'SELECT $1'")
    connection = shop.connect(autocommit=False)
    for key in (None, "", "k" * 256, "k" * 3200, "k" * 400_000, "é" * 128):
        run(connection, "SAVEPOINT s")
        assert error_of(run, connection, f"SELECT {function}", key) == "RS002"
        run(connection, "ROLLBACK TO s")
    assert run(connection, "SELECT 1") == [(1,)]


def test_case_15_keys_are_bytes(shop):
    connection = shop.connect(autocommit=False)
    keys = ("K", "k", "k ", "\u00e9", "e\u0301", "k" * 255, "é" * 127)
    for key in keys:
        assert pay(connection, key)[0] == "new"
    for key in keys:
        assert pay(connection, key)[0] == "replay"


def test_case_16_response_too_large(shop):
    connection = shop.connect(autocommit=False)
    run(connection, "SET retrysafe.max_response_bytes = 1000")
    connection.commit()
    fits, too_large = '"%s"' % ("x" * 998), '"%s"' % ("x" * 999)
    begin(connection, "k")
    insert_order(connection, "k")
    assert error_of(run, connection, "SELECT idem_complete('k', %s)", too_large) == "RS004"
    connection.rollback()
    assert orders(shop) == 0
    assert begin(connection, "k")[0] == "new"
    run(connection, "SELECT idem_complete('k', %s)", fits)
    connection.commit()


@pytest.mark.parametrize("answer", ["null", "0", "false", '""', "[]", "1.50", None])
def test_case_16_answers_replay_exactly(shop, answer):
    connection = shop.connect(autocommit=False)
    begin(connection, "k")
    run(connection, "SELECT idem_complete('k', %s)", answer)
    connection.commit()
    assert run(connection, "SELECT response::text FROM idem_begin('k', 'a')") == [(answer,)]


# --- what the cases imply ---------------------------------------------------------------------------------------


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


def test_inbox_two_copies_at_once(shop):
    first = shop.connect(autocommit=False)
    assert run(first, "SELECT inbox_accept('billing', 'e1')") == [(True,)]
    second = Pending(shop, "BEGIN", "SELECT inbox_accept('billing', 'e1')")
    assert second.blocks()
    first.commit()
    assert second.result() == [(False,)]
    second.close()


def test_inbox_rolled_back_copy_counts_for_nothing(shop):
    first = shop.connect(autocommit=False)
    run(first, "SELECT inbox_accept('billing', 'e1')")
    second = Pending(shop, "BEGIN", "SELECT inbox_accept('billing', 'e1')")
    assert second.blocks()
    first.rollback()
    assert second.result() == [(True,)]
    second.close()


def test_inbox_bulk_consumers_do_not_deadlock(shop):
    ids = [f"e{i}" for i in range(300)]

    def consume(order):
        connection = shop.connect(autocommit=False)
        accepted = [row[0] for row in run(connection, "SELECT * FROM inbox_accept('billing', %s)", order)]
        connection.commit()
        return accepted

    results = in_threads([lambda: consume(ids), lambda: consume(ids[::-1]), lambda: consume(ids[150:] + ids[:150])])
    assert sorted(itertools.chain(*results)) == sorted(ids)


# --- servers of their own ---------------------------------------------------------------------------------------


@pytest.fixture
def own_server():
    with cluster() as own:
        yield own


@pytest.mark.parametrize("end", ["COMMIT PREPARED", "ROLLBACK PREPARED"])
def test_case_12_prepared_owner_survives_a_restart(own_server, end):
    db = make_database(own_server)
    make_orders(db)
    announce_orders(db)
    owner = db.connect()
    run(owner, "BEGIN")
    begin(owner, "k")
    complete(owner, "k", insert_order(owner, "k"))
    run(owner, "PREPARE TRANSACTION 'p'")
    assert run(owner, "SELECT outcome FROM idem_peek('k', 'a')") == [("in_progress",)]
    db.close()
    own_server.pg_ctl("restart", "-m", "immediate")

    other = db.connect(autocommit=False)
    run(other, "SET LOCAL lock_timeout = '200ms'")
    assert error_of(begin, other, "k") == "55P03"
    other.rollback()
    assert begin(other, "k", function="idem_try_begin")[0] == "in_progress"
    other.rollback()
    waiter = begin_pending(db, "k")
    assert waiter.blocks()
    db.sql(f"{end} 'p'")
    assert waiter.result() == [("replay" if end == "COMMIT PREPARED" else "new",)]
    assert orders(db) == (1 if end == "COMMIT PREPARED" else 0)
    assert_orders_in_balance(db)
    waiter.close()
    db.close()


def test_case_12_prepare_without_complete(shop):
    connection = shop.connect()
    run(connection, "BEGIN")
    begin(connection, "k")
    assert error_of(run, connection, "PREPARE TRANSACTION 'p'") == "RS008"
    assert shop.value("SELECT count(*) FROM pg_prepared_xacts") == 0
    assert shop.value("SELECT outcome FROM idem_peek('k', 'a')") == "unknown"


def test_case_13_read_only_transaction(shop):
    order = pay_in_new_session(shop, "k")[1]
    connection = shop.connect(autocommit=False)
    connection.set_session(readonly=True)
    assert begin(connection, "k") == ("replay", {"id": order}, "completed")
    assert begin(connection, "k", "b") == ("conflict", None, None)
    assert run(connection, "SELECT * FROM idem_peek('unknown', 'a')") == [("unknown", None, None)]
    assert run(connection, "SELECT * FROM idem_peek('k', 'a')") == [("replay", {"id": order}, "completed")]
    for function in ("idem_begin", "idem_try_begin"):
        run(connection, "SAVEPOINT s")
        assert error_of(begin, connection, "unknown", "a", function) == "RS010"
        run(connection, "ROLLBACK TO s")


class Standby(Server):
    """A hot standby of another server, in the folder next to it."""

    def __init__(self, primary):
        self.directory = primary.directory.with_name("standby")
        self.directory.mkdir()
        if os.getuid() == 0:
            shutil.chown(self.directory, "postgres")
        self._as_user(self.bindir() / "pg_basebackup", "-D", self.directory / "data", "-R", "-c", "fast",
                      "-d", primary.dsn())
        with open(self.directory / "data/postgresql.auto.conf", "a") as conf:
            conf.write(f"unix_socket_directories = '{self.directory}'\nport = {primary.port}\nlisten_addresses = ''\n")
        self.pg_ctl("start")

    @staticmethod
    def _as_user(*command):
        prefix = ["runuser", "-u", "postgres", "--"] if os.getuid() == 0 else []
        subprocess.run(prefix + [str(c) for c in command], check=True)

    def stop(self):
        self.end()


def test_case_13_standby(own_server):
    db = make_database(own_server)
    make_orders(db)
    announce_orders(db)
    order = pay_in_new_session(db, "k")[1]
    standby = Standby(own_server)
    try:
        there = Database(standby, db.name)
        connection = there.connect(autocommit=False)
        assert begin(connection, "k") == ("replay", {"id": order}, "completed")
        assert begin(connection, "k", "b")[0] == "conflict"
        assert run(connection, "SELECT * FROM idem_peek('unknown', 'a')") == [("unknown", None, None)]
        assert run(connection, "SELECT * FROM idem_peek('k', 'a')") == [("replay", {"id": order}, "completed")]
        for function in ("idem_begin", "idem_try_begin"):
            run(connection, "SAVEPOINT s")
            assert error_of(begin, connection, "unknown", "a", function) == "RS010"
            run(connection, "ROLLBACK TO s")
        connection.rollback()

        # What the primary commits later is seen too; what it is still doing is not.
        owner = db.connect(autocommit=False)
        begin(owner, "later")
        assert run(connection, "SELECT outcome FROM idem_peek('later', 'a')") == [("unknown",)]
        complete(owner, "later", 1)
        owner.commit()
        eventually(lambda: run(connection, "SELECT outcome FROM idem_peek('later', 'a')") == [("replay",)])
        there.close()
        assert_orders_in_balance(db)
    finally:
        standby.stop()
        db.close()
