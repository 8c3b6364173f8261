"""Delayed events: every fetch first moves due ones into the log, whatever else goes on with them."""
import contextlib
import os
import random
import threading
import time

import psycopg2
import pytest

from conftest import Pending, cluster, eventually, load_factor, run
from rings import setting

FETCH = "SELECT count(*) FROM outbox_fetch('{}')"


@pytest.fixture(scope="module")
def server():
    """Without workers: they would move due events too."""
    with cluster("retrysafe.workers_per_database = 0") as own:
        yield own


@pytest.fixture
def movers(db):
    """Two sessions that move due events by fetching, each with a destination of its own."""
    for name in ("one", "two"):
        db.sql("SELECT outbox_create_destination(%s, 'pull')", name)
    return [(db.connect(autocommit=False), FETCH.format(name)) for name in ("one", "two")]


def move(mover):
    connection, fetch = mover
    run(connection, fetch)


def schedule(db, event_key, ordering_key=None, seconds=0):
    """A delayed event that came due `seconds` ago, or comes due then when negative."""
    db.sql("SELECT outbox_emit(null, %s, 't', '1', %s, deliver_after => '2100-01-01')", event_key, ordering_key)
    db.sql("UPDATE outbox_scheduled SET deliver_after = clock_timestamp() - make_interval(secs => %s) WHERE event_key = %s",
           seconds, event_key)


def in_log(db):
    return [row[0] for row in db.sql("SELECT event_key FROM outbox_log ORDER BY id")]


def test_a_long_key_that_is_held_up_holds_up_no_other(db, movers):
    db.sql("SELECT outbox_emit(null, 'k' || i, 't', '1', 'k', deliver_after => '2100-01-01') FROM generate_series(1, 2500) i")
    db.sql("UPDATE outbox_scheduled SET deliver_after = '2000-01-01'::timestamptz"
           " + make_interval(secs => substr(event_key, 2)::int)")
    schedule(db, "other", "z", seconds=1)
    canceller = db.connect(autocommit=False)
    run(canceller, "SELECT outbox_cancel('k1')")
    move(movers[0])
    movers[0][0].commit()
    assert in_log(db) == ["other"]
    canceller.rollback()
    move(movers[1])
    movers[1][0].commit()
    assert in_log(db) == ["other"] + [f"k{i}" for i in range(1, 2501)]


def schedule_many(db, count, ordering_key="k"):
    """k1, k2 … of one key, due one after the other an hour ago."""
    db.sql("""INSERT INTO outbox_scheduled (deliver_after, created_at, scope, event_key, event_type, ordering_key, payload)
              SELECT clock_timestamp() - interval '1 hour' + make_interval(secs => n * 1e-3), clock_timestamp(), '', 'k' || n, 't', %s, '{}'
                FROM generate_series(1, %s) AS n""", ordering_key, count)


def patient(connection, seconds=2):
    """No statement of it takes longer."""
    run(connection, f"SET statement_timeout = '{int(1000 * seconds * float(os.environ.get('RETRYSAFE_SLOWNESS', 1)))}ms'")


def test_a_very_long_key_that_is_held_up_costs_little(db, movers):
    """Each event is looked at, none of the key is locked: who cancels another one of it does not wait."""
    schedule_many(db, 100000)
    schedule(db, "other", "z", seconds=1)
    canceller = db.connect(autocommit=False)
    run(canceller, "SELECT outbox_cancel('k1')")
    connection, fetch = movers[0]
    patient(connection)
    eventually(lambda: run(connection, fetch) and run(connection, "SELECT id FROM outbox_log"))
    patient(canceller)
    assert run(canceller, "SELECT outbox_cancel('k2'), outbox_cancel('k1001')") == [(True, True)]
    connection.commit()
    assert in_log(db) == ["other"]


def test_a_pass_is_gone_on_with_where_it_met_only_what_is_held(db, movers):
    schedule_many(db, 2500)
    schedule(db, "other", "z", seconds=1)
    canceller = db.connect(autocommit=False)
    run(canceller, "SELECT outbox_cancel('k1')")
    connection, fetch = movers[0]
    connection.autocommit = True
    run(connection, "SET retrysafe.fault_points = 'moving.time_is_up'")
    eventually(lambda: run(connection, fetch) and in_log(db))
    assert in_log(db) == ["other"]
    canceller.rollback()
    run(connection, "SET retrysafe.fault_points = ''")
    eventually(lambda: run(connection, fetch) and db.value("SELECT count(*) FROM outbox_scheduled") == 0)
    assert in_log(db) == ["other"] + [f"k{i}" for i in range(1, 2501)]


def test_what_comes_behind_the_place_of_a_pass_is_not_overtaken(db, movers):
    schedule_many(db, 1500)
    canceller = db.connect(autocommit=False)
    run(canceller, "SELECT outbox_cancel('k1')")
    connection, fetch = movers[0]
    connection.autocommit = True
    run(connection, "SET retrysafe.fault_points = 'moving.time_is_up'")
    run(connection, fetch)
    run(connection, fetch)
    schedule(db, "a1", "a", 7200)
    schedule(db, "a2", "a", 1800)
    schedule(db, "other", "z", 1800)
    eventually(lambda: run(connection, fetch) and len(in_log(db)) == 3)
    assert in_log(db) == ["other", "a1", "a2"]
    canceller.rollback()


@pytest.mark.parametrize("end", ["ROLLBACK", "ROLLBACK TO s", "PREPARE TRANSACTION 'moved'"])
def test_what_a_transaction_gives_back_is_before_what_followed(db, movers, end):
    """It moves a1, and passes a part of k, which is held, in a second call."""
    db.sql("SELECT outbox_emit(null, 'first', 't', '1')")  # the indexes of the log begin, which all sessions hear of
    schedule(db, "a1", "a", 7200)
    schedule_many(db, 1500)
    schedule(db, "a2", "a", 1)
    canceller = db.connect(autocommit=False)
    run(canceller, "SELECT outbox_cancel('k1')")
    connection, fetch = movers[0]
    run(connection, "SET retrysafe.fault_points = 'moving.time_is_up'")
    connection.commit()
    run(connection, "SAVEPOINT s")
    run(connection, fetch)
    run(connection, fetch)
    run(connection, end)
    for _ in range(8):
        run(connection, fetch)
        if end != "ROLLBACK TO s":
            connection.commit()
    if end.startswith("PREPARE"):
        assert in_log(db) == ["first"]
        db.sql("COMMIT PREPARED 'moved'")
        connection.commit()
        connection.autocommit = True
        eventually(lambda: run(connection, fetch) and len(in_log(db)) == 3)
    connection.commit()
    assert in_log(db) == ["first", "a1", "a2"]
    canceller.rollback()


def test_large_ones_come_bit_by_bit(db, movers):
    """A single one, however large, does come. The disk is slow: a trigger."""
    db.sql("""INSERT INTO outbox_scheduled (deliver_after, created_at, scope, event_key, event_type, payload)
              SELECT clock_timestamp() - interval '1 hour' + make_interval(secs => n * 1e-3), clock_timestamp(), '', 'e' || n, 't',
                     (SELECT to_jsonb(string_agg(md5((m * 1000 + n)::text), ''))
                        FROM generate_series(1, CASE n WHEN 1 THEN 100000 ELSE 1600 END) AS m)
                FROM generate_series(1, 300) AS n""")
    db.sql("CREATE FUNCTION public.slow() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN PERFORM pg_sleep(0.02); RETURN OLD; END $$")
    db.sql("CREATE TRIGGER slow BEFORE DELETE ON outbox_scheduled FOR EACH ROW EXECUTE FUNCTION public.slow()")
    connection, fetch = movers[0]
    connection.autocommit = True
    patient(connection, 4)
    run(connection, fetch)
    assert 1 <= len(in_log(db)) < 300
    db.sql("DROP TRIGGER slow ON outbox_scheduled")
    eventually(lambda: run(connection, fetch) and db.value("SELECT count(*) FROM outbox_scheduled") == 0)
    assert in_log(db) == [f"e{i}" for i in range(1, 301)]


def test_moved_when_due_in_order_of_delivery_times(db, movers):
    schedule(db, "late", seconds=1)
    schedule(db, "early", seconds=100)
    schedule(db, "middle", seconds=50)
    schedule(db, "not yet", seconds=-3600)
    created = db.sql("SELECT event_key, created_at FROM outbox_scheduled WHERE event_key <> 'not yet' ORDER BY 1")
    connection, _ = movers[0]
    move(movers[0])
    mover = run(connection, "SELECT pg_current_xact_id()::text")[0][0]
    connection.commit()
    assert in_log(db) == ["early", "middle", "late"]
    assert db.sql("SELECT event_key, created_at FROM outbox_log ORDER BY 1") == created
    assert db.sql("SELECT DISTINCT txid::text FROM outbox_log") == [(mover,)]
    assert db.sql("SELECT event_key FROM outbox_scheduled") == [("not yet",)]


def test_the_age_counts_from_when_it_was_due(db, movers):
    """In the table of delayed events, where nobody moves it; in the log; and parked."""
    def age():
        return db.sql("SELECT DISTINCT oldest_pending_age BETWEEN '1 minute' AND '1 hour' FROM outbox_status")

    schedule(db, "e", "k", seconds=60)
    db.sql("UPDATE outbox_scheduled SET created_at = created_at - interval '30 days'")
    assert age() == [(True,)]
    for connection, fetch in movers:
        connection.autocommit = True
        run(connection, fetch)
    assert in_log(db) == ["e"] and age() == [(True,)]
    for (connection, _), name in zip(movers, ("one", "two")):
        batch, event_id = run(connection, "SELECT batch, event_id FROM outbox_fetch(%s)", name)[0]
        run(connection, "SELECT outbox_nack(%s, %s, retry_after => '1 hour')", batch, event_id)
    assert db.sql("SELECT state FROM outbox_parked") == [("retry",)] * 2 and age() == [(True,)]
    assert db.value("SELECT clock_timestamp() - created_at > interval '29 days' FROM outbox_events")


def test_many_of_one_time_keep_the_order_of_the_emits(db, movers):
    db.sql("SELECT count(outbox_emit(null, 'e' || i, 't', to_jsonb(i), 'key', deliver_after => '2100-01-01')) "
           "FROM generate_series(1, 5000) i")
    db.sql("UPDATE outbox_scheduled SET deliver_after = clock_timestamp()")
    move(movers[0])
    movers[0][0].commit()
    assert db.sql("SELECT count(*), bool_and(payload = to_jsonb(n)) "
                  "FROM (SELECT *, row_number() OVER (ORDER BY id) n FROM outbox_log) l") == [(5000, True)]


def test_many_that_came_due_come_bit_by_bit(db, movers):
    """Nobody who fetches has to move all of them first: it would take longer than he may wait, each time anew."""
    db.sql("""INSERT INTO outbox_scheduled (deliver_after, created_at, scope, event_key, event_type, payload)
              SELECT clock_timestamp() - interval '1 hour' + make_interval(secs => n * 1e-3), clock_timestamp(), '', 'e' || n, 't', '{}'
                FROM generate_series(1, 300000) AS n""")
    connection, fetch = movers[0]
    connection.autocommit = True
    patient(connection)
    eventually(lambda: run(connection, fetch)[0][0] > 0)
    assert db.value("SELECT count(*) FROM outbox_scheduled") > 0
    assert in_log(db)[:3] == ["e1", "e2", "e3"]


def test_comes_due_by_itself(db, movers):
    db.sql("SELECT outbox_emit(null, 'soon', 't', '1', deliver_after => clock_timestamp() + interval '300 ms')")
    connection, fetch = movers[0]
    connection.commit()
    connection.autocommit = True
    run(connection, fetch)
    assert in_log(db) == []
    eventually(lambda: run(connection, fetch) and in_log(db) == ["soon"])


@pytest.mark.parametrize("end", ["commit", "rollback"])
def test_emit_and_cancel_wait_for_a_move(db, movers, end):
    schedule(db, "e", seconds=1)
    schedule(db, "f", seconds=1)
    move(movers[0])
    emit = Pending(db, "SELECT outbox_emit(null, 'e', 't', '1')")
    cancel = Pending(db, "SELECT outbox_cancel('f')")
    assert emit.blocks() and cancel.blocks()
    getattr(movers[0][0], end)()
    if end == "commit":
        assert emit.result() == db.sql("SELECT id FROM outbox_log WHERE event_key = 'e'")
        assert cancel.result() == [(False,)]
        assert sorted(in_log(db)) == ["e", "f"]
    else:
        assert emit.result() == [(None,)]
        assert cancel.result() == [(True,)]
        assert db.sql("SELECT event_key FROM outbox_scheduled") == [("e",)]
    emit.close()
    cancel.close()


def test_a_cancellation_under_way_is_passed_over(db, movers):
    for event_key, ordering_key, seconds in (("a1", "a", 3), ("a2", "a", 2), ("b1", "b", 1), ("free", None, 1)):
        schedule(db, event_key, ordering_key, seconds)
    c = db.connect(autocommit=False)
    assert run(c, "SELECT outbox_cancel('a1')") == [(True,)]
    move(movers[0])
    movers[0][0].commit()
    # a2 must not overtake a1, which may still stay.
    assert sorted(in_log(db)) == ["b1", "free"]
    c.rollback()
    move(movers[0])
    movers[0][0].commit()
    assert in_log(db)[2:] == ["a1", "a2"]


def test_two_movers_keep_the_order_of_a_key(db, movers):
    schedule(db, "a1", "a", 3)
    move(movers[0])  # and stays uncommitted
    schedule(db, "a2", "a", 2)
    schedule(db, "b1", "b", 1)
    move(movers[1])
    movers[1][0].commit()
    assert in_log(db) == ["b1"]
    movers[0][0].commit()
    move(movers[1])
    movers[1][0].commit()
    assert in_log(db) == ["a1", "b1", "a2"]  # by position: a1 was drawn first, and committed before a2 was drawn


@pytest.mark.parametrize("isolation", ["READ COMMITTED", "SERIALIZABLE"])
def test_what_is_due_when_it_is_emitted_comes_behind_what_was_due_before(db, movers, isolation):
    schedule(db, "a1", "a", 100)
    emit = "SELECT outbox_emit(null, %s, 't', '1', %s, deliver_after => clock_timestamp() - make_interval(secs => %s)) IS NULL"
    c = db.connect()
    c.set_session(isolation_level=isolation)
    assert run(c, emit, "a2", "a", 50) == [(True,)]
    assert run(c, emit, "a0", "a", 150) == [(False,)]
    assert run(c, emit, "free", None, 50) == [(False,)]
    assert run(c, emit, "other", "z", 50) == [(False,)]  # what waits of other keys is nothing to it
    move(movers[0])
    # Being moved, it is still there.
    assert run(c, emit, "a3", "a", 40) == [(True,)]
    movers[0][0].commit()
    move(movers[1])
    movers[1][0].commit()
    assert in_log(db) == ["a0", "free", "other", "a1", "a2", "a3"]
    assert run(c, emit, "a4", "a", 30) == [(False,)]


def test_everything_at_once(db, movers):
    """Emits at once and delayed, cancellations, roll-backs and moves of the same event keys, at every isolation
    level: each key that somebody committed is in the log once, at the position that callers were told."""
    deadline = time.monotonic() + 6 * load_factor()
    start = time.monotonic()
    told, errors, failures = [], set(), []

    def client(number):
        c = db.connect(autocommit=False)
        c.set_session(isolation_level=("READ COMMITTED", "REPEATABLE READ", "SERIALIZABLE")[number % 3])
        choice = random.Random(number)
        while time.monotonic() < deadline:
            key = f"e{int((time.monotonic() - start) * 300) + choice.randrange(5)}"
            kind = choice.choice(["emit"] * 3 + ["delay"] * 4 + ["cancel"] * 2)
            try:
                if kind == "emit":
                    result = run(c, "SELECT outbox_emit(null, %s, 't', '1')", key)
                elif kind == "delay":
                    result = run(c, "SELECT outbox_emit(null, %s, 't', '1', deliver_after => "
                                    "clock_timestamp() + make_interval(secs => %s))", key, choice.random() / 30)
                else:
                    result = run(c, "SELECT outbox_cancel(%s)", key)
                if choice.random() < 0.2:
                    c.rollback()
                else:
                    c.commit()
                    told.append((key, kind, result[0][0]))
            except psycopg2.Error as error:
                errors.add(error.pgcode)
                c.rollback()

    def mover(number):
        c, _ = movers[number]
        while time.monotonic() < deadline:
            try:
                move(movers[number])
                c.rollback() if random.random() < 0.2 else c.commit()
            except psycopg2.Error as error:
                errors.add(error.pgcode)
                c.rollback()

    def guarded(function, number):
        try:
            function(number)
        except BaseException as failure:  # raised below
            failures.append(failure)

    threads = [threading.Thread(target=guarded, args=(client, n)) for n in range(9)]
    threads += [threading.Thread(target=guarded, args=(mover, n)) for n in range(2)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    if failures:
        raise failures[0]

    c, fetch = movers[0]
    c.autocommit = True
    eventually(lambda: run(c, fetch) and db.value("SELECT count(*) FROM outbox_scheduled") == 0)
    assert errors <= {"40001", "40P01"}
    log = dict(db.sql("SELECT event_key, id FROM outbox_log"))
    positions = {(key, result) for key, kind, result in told if kind != "cancel" and result is not None}
    assert positions and all(log.get(key) == position for key, position in positions)
    cancelled = {key for key, kind, result in told if kind == "cancel" and result}
    emitted = {key for key, kind, _ in told if kind != "cancel"}
    assert cancelled and emitted - cancelled <= set(log)


@contextlib.contextmanager
def busy_worker(server, db):
    """Kind `function` calls a function that comes back when the block lets it, by the lock that is yielded, or at its end.
    What its destination got is in public.got."""
    db.sql("CREATE TABLE public.got (event_key text)")
    db.sql("""CREATE FUNCTION public.take(e jsonb) RETURNS void LANGUAGE plpgsql AS $$ BEGIN
                INSERT INTO public.got VALUES (e ->> 'key');
                IF e ->> 'key' = 'long' THEN PERFORM pg_advisory_xact_lock(7); END IF;
              END $$""")
    db.sql("SELECT outbox_create_destination('f', 'function', '{\"function\": \"public.take(jsonb)\"}')")
    db.sql("SELECT outbox_create_destination('p', 'pull', event_types => '{none,late}')")
    lock = db.connect()
    run(lock, "SELECT pg_advisory_lock(7)")
    with setting(server, "retrysafe.workers_per_database", "1", db.connect()):
        db.sql("SELECT outbox_emit(null, 'long', 't', '1')")
        eventually(lambda: db.value("SELECT count(*) FROM pg_stat_activity WHERE datname = current_database()"
                                    " AND backend_type = 'retrysafe worker' AND wait_event = 'advisory'"))
        yield lock
        lock.close()


def test_a_fetch_leaves_what_is_due_to_a_worker(server, db):
    """Else its open transaction would keep the event from all destinations, although there was nothing in it for its own."""
    schedule(db, "e", "k", seconds=-3600)
    with busy_worker(server, db) as lock:
        client = db.connect()
        run(client, "UPDATE retrysafe.outbox_scheduled SET deliver_after = clock_timestamp(); COMMIT; BEGIN;" + FETCH.format("p"))
        lock.close()
        eventually(lambda: db.sql("SELECT event_key FROM public.got ORDER BY 1") == [("e",), ("long",)])
        run(client, "COMMIT")


def test_a_worker_that_is_busy_is_not_waited_for_long(server, db):
    with busy_worker(server, db), setting(server, "retrysafe.poll_interval", "1h", db.connect()):
        db.sql("SELECT outbox_emit(null, 'e', 'late', '1', deliver_after => clock_timestamp() + interval '300 ms')")
        client = db.connect()

        def fetched():
            run(client, "CALL outbox_wait('{p}', '1 hour')")
            return run(client, FETCH.format("p"))[0][0]

        run(client, "SET statement_timeout = '20s'")
        eventually(fetched)
        assert db.sql("SELECT event_key FROM public.got") == []


def test_who_waits_hears_of_what_its_own_fetch_has_moved(server, db, movers):
    """The fetch does not hand it out: it is of its own transaction."""
    fetch = FETCH.format("one")
    with setting(server, "retrysafe.poll_interval", "1h", db.connect()):
        schedule(db, "a")
        client = Pending(db, "CALL retrysafe.outbox_wait('{one}', '1 hour')")  # which tells that it is due
        assert client.result() is None
        assert client.run(fetch) == [(0,)]
        client.run("CALL retrysafe.outbox_wait('{one}', '1 hour')")
        assert client.run(fetch) == [(1,)]


def test_who_waits_hears_of_what_comes_due_behind_what_is_held(server, db, movers):
    with setting(server, "retrysafe.poll_interval", "1h", db.connect()):
        schedule(db, "held", seconds=3600)
        canceller = db.connect(autocommit=False)
        run(canceller, "SELECT outbox_cancel('held')")
        client = Pending(db, "CALL retrysafe.outbox_wait('{one}', '1 hour')")
        client.result()
        db.sql("SELECT outbox_emit(null, 'e', 't', '1', deliver_after => clock_timestamp() + interval '1 s')")

        def fetched():
            client.run("CALL retrysafe.outbox_wait('{one}', '1 hour')")
            return client.run(FETCH.format("one")) == [(1,)]

        eventually(fetched)
        assert in_log(db) == ["e"]


def test_a_trigger_that_fetches_moves_nothing_while_others_are_moved(db, movers):
    """Somebody's own, on our table. Where the move fails, the next one of the session does move."""
    for n in (1, 2, 3):
        schedule(db, f"a{n}", "a", 10 - n)
    db.sql("CREATE TABLE public.left_there (events bigint)")
    db.sql("""CREATE FUNCTION public.fetch_too() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
                PERFORM FROM retrysafe.outbox_fetch('two');
                INSERT INTO public.left_there SELECT count(*) FROM retrysafe.outbox_scheduled;
                PERFORM 1 / current_setting('test.divisor')::int;
                RETURN NULL;
              END $$""")
    db.sql("CREATE TRIGGER fetch_too AFTER DELETE ON outbox_scheduled EXECUTE FUNCTION public.fetch_too()")
    connection, fetch = movers[0]
    run(connection, "SET test.divisor = 0; SAVEPOINT s")
    with pytest.raises(psycopg2.errors.DivisionByZero):
        run(connection, fetch)
    run(connection, "ROLLBACK TO s; SET test.divisor = 1")
    run(connection, fetch)
    connection.commit()
    assert in_log(db) == ["a1", "a2", "a3"]
    assert db.sql("SELECT events FROM public.left_there") == [(2,), (0,)]


def test_who_waits_goes_on_with_a_pass(server, db, movers):
    """One that met only what is held, and ran out of time."""
    with setting(server, "retrysafe.poll_interval", "1h", db.connect()):
        schedule_many(db, 2500)
        schedule(db, "other", "z", seconds=1)
        canceller = db.connect(autocommit=False)
        run(canceller, "SELECT outbox_cancel('k1')")
        client = Pending(db, "SET retrysafe.fault_points = 'moving.time_is_up'", "CALL retrysafe.outbox_wait('{one}', '1 hour')")
        client.result()
        client.run(FETCH.format("one"))

        def fetched():
            client.run("CALL retrysafe.outbox_wait('{one}', '1 hour')")
            return client.run(FETCH.format("one")) == [(1,)]

        eventually(fetched)
        assert in_log(db) == ["other"]


def test_no_pass_is_gone_on_with_after_sleep(server, db, movers):
    """What comes due meanwhile is not part of it, and whoever slept was told of that once only."""
    wait, fetch = "CALL retrysafe.outbox_wait('{one}', '1 hour')", FETCH.format("one")
    with setting(server, "retrysafe.poll_interval", "1h", db.connect()):
        schedule_many(db, 2500)
        canceller = db.connect(autocommit=False)
        run(canceller, "SELECT outbox_cancel('k1')")
        client = Pending(db, "SET retrysafe.fault_points = 'moving.time_is_up'", wait, fetch)
        assert client.result() == [(0,)]
        client.run(wait)
        canceller.rollback()
        db.sql("DELETE FROM outbox_scheduled")
        client.run(fetch)
        emitter = db.connect(autocommit=False)
        run(emitter, "SELECT outbox_emit(NULL, 'late', 't', '1', deliver_after => clock_timestamp() + '100 ms')")
        client.send(wait)
        if not client.blocks():  # commits from before
            client.send(wait)
        assert client.blocks()
        emitter.commit()
        client.result()
        client.run(fetch)
        assert in_log(db) == ["late"]
    client.close()
