"""Looking at the rings of a database, turning them step by step, and what else the tests of the rings share."""
import contextlib

import psycopg2
import pytest

from conftest import Pending, cluster, eventually, run

ISOLATION = ["READ COMMITTED", "REPEATABLE READ", "SERIALIZABLE"]
PARENTS = {"records": ("idem_records",), "log": ("outbox_log",), "progress": ("outbox_windows", "outbox_batches")}
SETTINGS = ("retrysafe.workers_per_database = 0", "retrysafe.outbox_retention = 0", "retrysafe.idem_retention = 1s",
            "max_prepared_transactions = 50", "autovacuum = off", "wal_level = logical")


@pytest.fixture(scope="module")
def server():
    """For the files that import it. It starts no workers, each step is taken by a call; and retention is zero, so that a
    step is due as soon as nothing else holds it."""
    with cluster(*SETTINGS) as own:
        yield own


def ring(db, name):
    """The pieces in use, oldest first: (piece, state, held_by)."""
    return db.sql("SELECT piece, state, held_by FROM retrysafe.ring_status WHERE ring = %s ORDER BY generation", name)


def states(db, name):
    return [state for _, state, _ in ring(db, name)]


def held_by(db, name):
    """What keeps the oldest piece."""
    return ring(db, name)[0][2]


def step(db, name):
    """One call of the clean-up: 1 when the ring took a step. The rings of log and progress are turned by one function."""
    return db.value(f"SELECT retrysafe.{'idem' if name == 'records' else 'outbox'}_cleanup()")


def settle(db, *names):
    """Steps until none is due."""
    for name in names or ("records", "log"):
        while step(db, name):
            pass


def turn_until(db, name, condition, timeout=20):
    """Steps until the condition holds; time has to pass for some of them."""
    def look():
        step(db, name)
        return condition()
    try:
        return eventually(look, timeout)
    except AssertionError:
        raise AssertionError(f"ring {name} stands at {ring(db, name)}") from None


def rotate(db, name):
    """The active piece is followed by the next one. It must have rows, and another piece must be free."""
    def active():
        return ring(db, name)[-1][0] if ring(db, name) else 1
    before = active()
    turn_until(db, name, lambda: active() != before)


def seal(db, name):
    rotate(db, name)
    turn_until(db, name, lambda: states(db, name)[-2] == "sealed")


def bytes_of(db, name, piece):
    return db.value("SELECT sum(pg_relation_size('retrysafe.' || t || '_' || %s)) FROM unnest(%s) AS t", piece,
                    list(PARENTS[name]))


def fill(db, count=1, prefix="e", ordering_key=None):
    connection = db.server.connect(db.name)
    run(connection, """SELECT retrysafe.outbox_emit(NULL, %s || i, 't', '{}', %s) FROM generate_series(1, %s) i""",
        prefix, ordering_key, count)
    connection.close()


def save(connection, key, answer="1", hash="h"):
    """One answered key in a transaction of its own; the outcome."""
    outcome = run(connection, "SELECT outcome FROM retrysafe.idem_begin(%s, %s)", key, hash)[0][0]
    if outcome == "new":
        run(connection, "SELECT retrysafe.idem_complete(%s, %s)", key, answer)
    connection.commit()
    return outcome


def fetch_all(db, destination, limit=1000):
    """Event keys in order, each batch acknowledged."""
    keys = []
    while rows := db.sql("SELECT batch, event_key FROM retrysafe.outbox_fetch(%s, %s)", destination, limit):
        keys += [key for _, key in rows]
        db.sql("SELECT retrysafe.outbox_ack(%s)", rows[0][0])
    return keys


def begin(db, isolation="READ COMMITTED"):
    connection = db.connect(autocommit=False)
    connection.set_session(isolation_level=isolation)
    return connection


def emit(connection, key, payload="{}"):
    return run(connection, "SELECT outbox_emit(NULL, %s, 't', %s)", key, payload)[0][0]


def copies(db, key):
    return db.value("SELECT count(*) FROM outbox_log WHERE event_key = %s", key)


def sqlstate_of(function, *arguments):
    try:
        function(*arguments)
    except psycopg2.Error as error:
        return error.pgcode
    return None


@contextlib.contextmanager
def setting(server, name, value, connection):
    """Changed for all sessions, the one that is told included."""
    server.set(name, value)
    eventually(lambda: run(connection, f"SHOW {name}") == [(value,)])
    yield
    server.set(name, None)


def dead_rows(db, tables):
    db.sql("SELECT pg_stat_force_next_flush()")
    return db.value("SELECT sum(n_dead_tup) FROM pg_stat_user_tables WHERE relname LIKE %s", tables)


@contextlib.contextmanager
def stopped_at(db, point, calls):
    """Sessions that all wait at a fault point inside of their calls; they go on together at the end of the block."""
    waiting = f"""SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND state = 'active'
                    AND (wait_event = 'RetrysafeFaultPoint' OR wait_event_type = 'Extension')"""
    db.server.set("retrysafe.fault_points", f"{point}=wait")
    eventually(lambda: db.value("SHOW retrysafe.fault_points") == f"{point}=wait")
    try:
        sessions = [Pending(db, *call) for call in calls]
        eventually(lambda: db.value(waiting) == len(sessions))
        yield sessions
    finally:
        db.server.set("retrysafe.fault_points", None)


def undisturbed(db):
    """A session that passes the fault points."""
    connection = db.connect()
    run(connection, "SET retrysafe.fault_points = ''")
    return connection
