"""A worker sends what committed, and nothing else, whatever way a transaction took to its end (case 25).

What was sent is what the destination wrote down. That something was not sent shows in what comes behind it: a later
event of the same ordering key can only arrive after it, and then the whole list is compared.
"""
import contextlib
import signal
from collections import defaultdict

import psycopg2
import pytest

import closing
from conftest import cluster, eventually, kill, run
from null_destination import NullDestination
from receiver import Receiver
from resident import memory
from workers import can_connect

KEY = "one key"  # the ordering key of everything here


def emit(connection, *event_keys, ordering_key=KEY):
    for event_key in event_keys:
        run(connection, "SELECT outbox_emit(NULL, %s, 't', '{}', %s)", event_key, ordering_key)


def error_code(function, *arguments, **options):
    with pytest.raises(psycopg2.Error) as caught:
        function(*arguments, **options)
    return caught.value.pgcode


class Log:
    """A destination, and the list of what was sent to it."""

    def __init__(self, db):
        self.db, self.destination, self.markers = db, NullDestination(db), 0

    def sent(self, timeout=20):
        """Event keys in their order, when everything that was committed before has been sent."""
        self.markers += 1
        marker = f"marker-{self.markers}"
        connection = self.db.server.connect(self.db.name)
        emit(connection, marker)
        connection.close()
        eventually(lambda: marker in self.destination.delivered(), timeout)
        keys = self.destination.delivered()
        assert keys.pop() == marker
        return [key for key in keys if not key.startswith("marker-")]


    def close(self):
        closing.balance(self.db, "d", self.destination.ids())


@pytest.fixture
def log(db):
    one = Log(db)
    yield one
    one.close()


# -- rolled back --

def test_savepoints(db, log):
    c = db.connect(autocommit=False)
    emit(c, "kept-1")
    run(c, "SAVEPOINT a")
    emit(c, "undone-1")
    run(c, "SAVEPOINT b")
    emit(c, "undone-2")
    run(c, "RELEASE b")
    run(c, "ROLLBACK TO a")
    emit(c, "kept-2")
    run(c, "SAVEPOINT c")
    emit(c, "kept-3")
    run(c, "RELEASE c")
    c.commit()
    assert log.sent() == ["kept-1", "kept-2", "kept-3"]

    # Nothing is left of it but an order.
    run(c, "CREATE TABLE public.orders (id int)")
    run(c, "SAVEPOINT a")
    emit(c, "undone-3")
    run(c, "ROLLBACK TO a")
    run(c, "INSERT INTO public.orders VALUES (1)")
    c.commit()
    assert log.sent() == ["kept-1", "kept-2", "kept-3"]

    # A key that was taken back is free again, also within the transaction.
    run(c, "SAVEPOINT a")
    emit(c, "undone-1")
    run(c, "ROLLBACK TO a")
    emit(c, "undone-1")
    c.commit()
    assert log.sent() == ["kept-1", "kept-2", "kept-3", "undone-1"]


def end_by_rollback(db, c):
    c.rollback()


def end_by_commit_of_a_failed_one(db, c):
    assert error_code(run, c, "SELECT 1 / 0") == "22012"
    assert error_code(emit, c, "undone-late") == "25P02"
    c.commit()  # the server rolls back


def end_by_an_error_in_the_statement_that_emits(db, c):
    statement = "SELECT outbox_emit(NULL, 'undone-late', 't', '{}', %s), 1 / (random() * 0)::int"
    assert error_code(run, c, statement, KEY) == "22012"
    c.rollback()


def end_by_a_deferred_constraint(db, c):
    run(c, "CREATE TEMP TABLE parent (id int PRIMARY KEY)")
    run(c, "CREATE TEMP TABLE child (id int REFERENCES parent DEFERRABLE INITIALLY DEFERRED)")
    run(c, "INSERT INTO child VALUES (1)")
    assert error_code(c.commit) == "23503"


def end_by_a_key_that_is_not_completed(db, c):
    run(c, "SELECT idem_begin('k', '\\x00'::bytea)")
    assert error_code(c.commit) == "RS008"


def end_by_a_cancelled_statement(db, c):
    run(c, "SET LOCAL statement_timeout = 10")
    assert error_code(run, c, "SELECT pg_sleep(60)") == "57014"
    c.commit()


def end_by_termination(db, c):
    db.sql("SELECT pg_terminate_backend(%s, 10000)", c.info.backend_pid)
    with pytest.raises(psycopg2.OperationalError):
        run(c, "COMMIT")


def end_by_disconnect(db, c):
    c.close()


def end_by_rollback_prepared(db, c):
    run(c, "PREPARE TRANSACTION 'undone'")
    db.sql("ROLLBACK PREPARED 'undone'")


def end_by_prepare_of_a_failed_one(db, c):
    assert error_code(run, c, "SELECT 1 / 0") == "22012"
    run(c, "PREPARE TRANSACTION 'undone'")  # the server rolls back
    assert error_code(db.sql, "COMMIT PREPARED 'undone'") == "42704"


ENDS = {name.removeprefix("end_by_"): end for name, end in list(globals().items()) if name.startswith("end_by_")}


@pytest.mark.parametrize("end", ENDS)
@pytest.mark.parametrize("within", ["the transaction", "a savepoint"])
def test_transactions_that_fail(db, log, end, within):
    emit(db.connect(), "before")
    c = db.connect(autocommit=False)
    emit(c, "undone-1", "undone-2")
    if within == "a savepoint":
        run(c, "SAVEPOINT a")
        emit(c, "undone-3")
        run(c, "RELEASE a")
        run(c, "SAVEPOINT b")
        emit(c, "undone-4")
    ENDS[end](db, c)
    assert log.sent() == ["before"]
    emit(db.connect(), "undone-1", "undone-4")
    assert log.sent() == ["before", "undone-1", "undone-4"]


def test_a_serialization_failure(db, log):
    """The same work again is sent once."""
    db.sql("CREATE TABLE public.counter (n int)")
    db.sql("INSERT INTO public.counter VALUES (0), (0)")
    sessions = [db.connect(autocommit=False) for _ in range(2)]
    for c in sessions:
        c.set_session(isolation_level="SERIALIZABLE")
        run(c, "SELECT sum(n) FROM public.counter")
    for number, c in enumerate(sessions):
        run(c, "UPDATE public.counter SET n = n + 1 WHERE ctid = %s::tid", f"(0,{number + 1})")
        emit(c, f"e{number}")
    sessions[0].commit()
    assert error_code(sessions[1].commit) == "40001"
    assert log.sent() == ["e0"]
    emit(sessions[1], "e1")
    sessions[1].commit()
    assert log.sent() == ["e0", "e1"]


def test_exception_blocks(db, log):
    db.sql("""
        DO $$
        BEGIN
          PERFORM retrysafe.outbox_emit(NULL, 'before', 't', '{}', 'one key');
          BEGIN
            PERFORM retrysafe.outbox_emit(NULL, 'undone-1', 't', '{}', 'one key');
            BEGIN
              PERFORM retrysafe.outbox_emit(NULL, 'undone-2', 't', '{}', 'one key');
            EXCEPTION WHEN OTHERS THEN NULL;
            END;
            PERFORM 1 / 0;
          EXCEPTION WHEN division_by_zero THEN
            PERFORM retrysafe.outbox_emit(NULL, 'handler', 't', '{}', 'one key');
          END;
          BEGIN
            PERFORM retrysafe.outbox_emit(NULL, 'good-block', 't', '{}', 'one key');
          EXCEPTION WHEN OTHERS THEN NULL;
          END;
          FOR i IN 1..200 LOOP  -- more subtransactions than a snapshot lists
            BEGIN
              PERFORM retrysafe.outbox_emit(NULL, CASE WHEN i % 2 = 0 THEN 'even-' ELSE 'undone-odd-' END || i, 't',
                                            '{}', 'one key');
              PERFORM 1 / (1 - i % 2);
            EXCEPTION WHEN division_by_zero THEN NULL;
            END;
          END LOOP;
        END
        $$""")
    assert log.sent() == ["before", "handler", "good-block", *[f"even-{i}" for i in range(2, 201, 2)]]


# -- committed elsewhere and later --

@pytest.fixture(scope="module")
def own():
    """A server that tests of this file restart and crash."""
    with cluster("retrysafe.poll_interval = 200ms", "wal_writer_delay = 10s") as server:
        yield server


@pytest.mark.parametrize("how", ["fast", "immediate"])
def test_prepared_transactions_across_a_restart(own_db, how):
    db, log = own_db, Log(own_db)
    c = db.connect()
    for name in ("good", "bad", "another"):
        run(c, "BEGIN")
        emit(c, f"{name}-1")
        run(c, "SAVEPOINT a")
        emit(c, f"undone-{name}")
        run(c, "ROLLBACK TO a")
        emit(c, f"{name}-2")
        run(c, f"PREPARE TRANSACTION '{name}'")
    assert log.sent() == [], "prepared is not committed"
    emit(db.connect(), "between")
    assert log.sent() == ["between"]
    db.close()
    db.server.pg_ctl("restart", "-m", how)
    assert log.sent() == ["between"]
    db.sql("ROLLBACK PREPARED 'bad'")
    db.sql("COMMIT PREPARED 'good'")
    assert log.sent() == ["between", "good-1", "good-2"]
    db.server.pg_ctl("restart", "-m", how)
    db.sql("COMMIT PREPARED 'another'")
    assert log.sent() == ["between", "good-1", "good-2", "another-1", "another-2"]
    log.close()


def test_without_waiting_for_the_disk(own_db):
    """What was sent before a crash is there after it, though its COMMIT had waited for nothing and the server writes
    WAL in the background only every ten seconds: the worker waits for the disk."""
    db, server = own_db, own_db.server
    sent = []
    with Receiver() as receiver:
        db.sql("SELECT outbox_create_destination('hook', 'http', %s)", f'{{"url": "{receiver.url}"}}')
        for number in range(5):
            # The worker writes something of its own when it takes its shard, and puts all WAL on the disk so: not now.
            emit(db.connect(), f"warm-{number}")
            eventually(lambda: f"warm-{number}" in [request.header("ce-eventkey") for request in receiver.requests])
            crashed = []

            def crash(request):
                if request.header("ce-eventkey").startswith("last-") and not crashed:
                    crashed.append(True)
                    kill(server.pid, signal.SIGQUIT)  # an immediate stop
                return 204

            receiver.behave(crash)
            c = db.connect()
            run(c, "SET synchronous_commit = off")
            with contextlib.suppress(psycopg2.OperationalError):  # it may crash before it has answered
                emit(c, f"last-{number}")
            eventually(lambda: crashed)
            db.close()
            eventually(lambda: not (server.directory / "data/postmaster.pid").exists())
            server.pg_ctl("start")
            eventually(lambda: can_connect(server))
            sent = list(dict.fromkeys(request.header("ce-eventkey") for request in receiver.requests))
            there = [key for (key,) in db.sql("SELECT event_key FROM outbox_events ORDER BY id")]
            assert set(sent) <= set(there), "sent and then lost"
            assert there == [f"{what}-{n}" for n in range(number + 1) for what in ("warm", "last")]
            receiver.behave(204)
        emit(db.connect(), "marker")
        eventually(lambda: receiver.requests[-1].header("ce-eventkey") == "marker")
        sent = list(dict.fromkeys(request.header("ce-eventkey") for request in receiver.requests))
        assert sent == [f"{what}-{n}" for n in range(5) for what in ("warm", "last")] + ["marker"]
        closing.balance(db, "hook", receiver.ids, committed=sent)


# -- many --

def sent_by_key(db, destination, timeout):
    """The numbers of the events `k0-NUMBER` to `k9-NUMBER`, in the order of their delivery, when there is no more."""
    connection = db.connect()
    for k in range(10):
        emit(connection, f"k{k}-end", ordering_key=f"k{k}")
    eventually(lambda: sum(key.endswith("end") for key in destination.delivered()) == 10, timeout)
    found = defaultdict(list)
    for event_key in destination.delivered():
        ordering_key, number = event_key.rsplit("-", 1)
        found[ordering_key].append(number)
    assert all(numbers.pop() == "end" for numbers in found.values())
    closing.balance(db, "d", destination.ids())
    return {ordering_key: [int(number) for number in numbers] for ordering_key, numbers in found.items()}


@pytest.mark.slow
def test_a_hundred_thousand_in_one_transaction(db):
    """With a tenth more that savepoints take back."""
    d = NullDestination(db, options='"parallel": 64', batch_events=10000)
    c = db.connect(autocommit=False)
    for begin in range(0, 100_000, 10_000):
        run(c, """SELECT outbox_emit(NULL, format('k%%s-%%s', i %% 10, i), 't', to_jsonb(i), 'k' || i %% 10)
                    FROM generate_series(%s, %s) AS i ORDER BY i""", begin, begin + 9999)
        run(c, "SAVEPOINT a")
        run(c, "SELECT outbox_emit(NULL, format('undone-%%s', i), 't', to_jsonb(i), 'k' || i %% 10)"
               " FROM generate_series(%s, %s) AS i", begin, begin + 999)
        run(c, "ROLLBACK TO a")
    assert d.delivered() == []
    c.commit()
    assert sent_by_key(db, d, 120) == {f"k{k}": list(range(k, 100_000, 10)) for k in range(10)}


# Statements that make transactions FIRST to LAST of one session, each of which emits; every tenth one rolls back.
def in_messages(connection, first, last):
    """Each BEGIN … COMMIT is a transaction of its own, also within one message."""
    for begin in range(first, last, 500):
        run(connection, ";".join(
            f"BEGIN; SELECT outbox_emit(NULL, 'k{i % 10}-{i}', 't', '1', 'k{i % 10}');"
            f" {'ROLLBACK' if i // 10 % 10 == 0 else 'COMMIT'}" for i in range(begin, min(begin + 500, last))))


def in_a_procedure(connection, first, last):
    run(connection, f"""DO $$
        BEGIN
          FOR i IN {first}..{last - 1} LOOP
            PERFORM retrysafe.outbox_emit(NULL, format('k%s-%s', i % 10, i), 't', '1', 'k' || i % 10);
            IF i / 10 % 10 = 0 THEN ROLLBACK; ELSE COMMIT; END IF;
          END LOOP;
        END $$""")


@pytest.mark.slow
@pytest.mark.parametrize("way", [in_messages, in_a_procedure])
def test_two_hundred_thousand_transactions_of_one_session(db, way):
    """They cost the session less than 1 MB, by its own count and by the operating system's, and what committed of them
    is sent. The first 10,000 are not counted: caches fill."""
    d = NullDestination(db, options='"parallel": 64', batch_events=10000)
    c = db.connect()
    run(c, "SET synchronous_commit = off")

    def taken():
        return run(c, "SELECT sum(total_bytes)::bigint FROM pg_backend_memory_contexts")[0][0], memory(c.info.backend_pid)

    way(c, 0, 10_000)
    before = taken()
    way(c, 10_000, 210_000)
    after = taken()
    assert after[0] - before[0] < 1 << 20 and after[1] - before[1] < 1 << 20, (before, after)
    expected = [i for i in range(210_000) if i // 10 % 10 != 0]
    assert sent_by_key(db, d, 180) == {f"k{k}": [i for i in expected if i % 10 == k] for k in range(10)}


# -- triggers --

SHOP = """
CREATE TABLE public.orders (id int PRIMARY KEY, total numeric CHECK (total > 0));
CREATE TABLE public.items (order_id int REFERENCES public.orders DEFERRABLE INITIALLY DEFERRED);
GRANT SELECT, INSERT ON public.orders, public.items TO shopper;
CREATE FUNCTION public.emit_order() RETURNS trigger LANGUAGE plpgsql SECURITY %(security)s
  SET search_path = pg_catalog, pg_temp AS $$
BEGIN
  PERFORM retrysafe.outbox_emit(NULL, TG_WHEN || '-' || NEW.id, 'order.created', to_jsonb(NEW), 'one key');
  RETURN NEW;
END $$;
CREATE TRIGGER a BEFORE INSERT ON public.orders FOR EACH ROW EXECUTE FUNCTION public.emit_order();
CREATE TRIGGER b AFTER INSERT ON public.orders FOR EACH ROW EXECUTE FUNCTION public.emit_order();
"""
# At COMMIT, when the last statement is over.
DEFERRED = """CREATE FUNCTION public.emit_late() RETURNS trigger LANGUAGE plpgsql SECURITY %(security)s
  SET search_path = pg_catalog, pg_temp AS $$
BEGIN
  PERFORM retrysafe.outbox_emit(NULL, 'COMMIT-' || NEW.id, 'order.created', to_jsonb(NEW), 'one key');
  RETURN NULL;
END $$;
CREATE CONSTRAINT TRIGGER c AFTER INSERT ON public.orders DEFERRABLE INITIALLY DEFERRED
  FOR EACH ROW EXECUTE FUNCTION public.emit_late();
"""


@pytest.fixture
def roles(db):
    """A shop that owns its tables and functions, and a shopper who may insert into them; neither is superuser."""
    db.sql("CREATE ROLE shop")
    db.sql("CREATE ROLE shopper LOGIN")
    db.sql("GRANT CREATE ON SCHEMA public TO shop")
    yield
    for role in "shop", "shopper":
        db.sql(f"DROP OWNED BY {role} CASCADE")
        db.sql(f"DROP ROLE {role}")


@pytest.mark.parametrize("security", ["INVOKER", "DEFINER"])
def test_triggers(db, log, roles, security):
    """On a user's table: with the right of the user, or with that of the function's owner."""
    db.sql("SELECT retrysafe.retrysafe_grant(%s, 'write')", "shop" if security == "DEFINER" else "shopper")
    run(db.connect(), "SET ROLE shop;" + (SHOP + DEFERRED) % {"security": security})
    c = db.connect("shopper", autocommit=False)
    if security == "DEFINER":
        assert error_code(run, c, "SELECT retrysafe.outbox_emit(NULL, 'k', 't', '1')") == "42501"
        c.rollback()
    run(c, "INSERT INTO public.orders VALUES (1, 1), (2, 2)")
    c.commit()
    expected = ["BEFORE-1", "BEFORE-2", "AFTER-1", "AFTER-2", "COMMIT-1", "COMMIT-2"]
    assert log.sent() == expected

    # The first row was good, its triggers ran.
    assert error_code(run, c, "INSERT INTO public.orders VALUES (3, 1), (4, 0)") == "23514"
    c.commit()
    # The triggers of both commands ran, the last of them in the COMMIT that fails.
    run(c, "INSERT INTO public.orders VALUES (5, 1)")
    run(c, "INSERT INTO public.items VALUES (6)")
    assert error_code(c.commit) == "23503"
    run(c, "INSERT INTO public.orders VALUES (7, 1)")
    run(c, "SAVEPOINT a")
    run(c, "INSERT INTO public.orders VALUES (8, 1)")
    run(c, "ROLLBACK TO a")
    run(c, "INSERT INTO public.orders VALUES (9, 1) ON CONFLICT DO NOTHING")
    c.commit()
    expected += ["BEFORE-7", "AFTER-7", "BEFORE-9", "AFTER-9", "COMMIT-7", "COMMIT-9"]
    assert log.sent() == expected

    run(c, "INSERT INTO public.orders VALUES (10, 1)")
    run(c, "SET CONSTRAINTS ALL IMMEDIATE")
    c.commit()
    assert log.sent() == [*expected, "BEFORE-10", "AFTER-10", "COMMIT-10"]


def test_a_trigger_of_a_user_without_the_right(db, log, roles):
    run(db.connect(), "SET ROLE shop;" + SHOP % {"security": "INVOKER"})
    c = db.connect("shopper")
    assert error_code(run, c, "INSERT INTO public.orders VALUES (1, 1)") == "42501"
    assert run(c, "SELECT count(*) FROM public.orders") == [(0,)]
    assert log.sent() == []
