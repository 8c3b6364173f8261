"""Idempotent writes: the cases from the field, with real concurrent sessions."""
import time

import psycopg2
import pytest

from conftest import Pending, eventually, load_factor, run
from payments import (  # noqa: F401 (the fixture shop)
    ISOLATION_LEVELS, begin, begin_pending, complete, error_of, in_threads, insert_order, orders, pay, pay_in_new_session,
    shop)


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
