"""What the tests of workers share: faults, the moment when a worker has looked, and what the server says of its processes."""
import contextlib
import json
import re

import psycopg2
import pytest

from conftest import cluster, database_on, eventually, run
from null_destination import NullDestination, worker_pids
from receiver import Hang, Receiver


@pytest.fixture(scope="module")
def own():
    """A server that tests of this file may restart and crash."""
    with cluster("retrysafe.poll_interval = 200ms") as server:
        yield server


@contextlib.contextmanager
def fault(server, points):
    server.set("retrysafe.fault_points", points)
    try:
        yield
    finally:
        server.set("retrysafe.fault_points", None)


def scalar(server, query, *parameters, database="postgres"):
    connection = server.connect(database)
    try:
        return run(connection, query, *parameters)[0][0]
    finally:
        connection.close()


def let_look(db, destination="d"):
    """Until the worker has looked at what was committed before the call, and done what it does about it: a look is over
    when the next one begins. Commands on destinations call a worker, also one that publishes nothing."""
    for _ in range(2):
        before = db.value("SELECT clock_timestamp()")
        db.sql("SELECT outbox_resume(%s)", destination)
        eventually(lambda: db.value("""SELECT bool_and(query_start > %s) FROM pg_stat_activity
                                        WHERE backend_type = 'retrysafe worker' AND datname = current_database()""", before))


def is_idle(db):
    """It has not looked for longer than it takes to look once more after something was announced."""
    return db.value("""SELECT bool_and(clock_timestamp() - query_start > interval '1.5 s') FROM pg_stat_activity
                        WHERE backend_type = 'retrysafe worker' AND datname = current_database()""")


@contextlib.contextmanager
def time_to_come_back(server):
    """At the end of the block a worker that is terminated then has come back in another database: one in ours, that
    failed or was asked to leave before, would be there again too."""
    with database_on(server) as other:
        before = eventually(lambda: worker_pids(other))
        yield
        other.sql("SELECT pg_terminate_backend(%s)", before[0])
        eventually(lambda: worker_pids(other) not in ([], before))


def fault_of_the_next_worker(db, points):
    """The worker that runs now has the fault, its successor does not."""
    eventually(lambda: worker_pids(db))
    before = worker_pids(db)
    db.sql(f"ALTER DATABASE {db.name} SET retrysafe.fault_points = '{points}'")
    db.sql("SELECT pg_terminate_backend(%s)", before[0])
    eventually(lambda: worker_pids(db) not in ([], before))
    eventually(lambda: db.value("SELECT shards > 0 FROM outbox_workers WHERE database = current_database()"))
    db.sql(f"ALTER DATABASE {db.name} RESET retrysafe.fault_points")


def can_connect(server):
    try:
        server.connect().close()
        return True
    except psycopg2.OperationalError:
        return False


@contextlib.contextmanager
def slow_destination(db, kind):
    """A destination `d` with which 10,000 events would take minutes. Yields what it got of them so far."""
    if kind == "function":
        db.sql("CREATE TABLE public.calls (event_key text)")
        db.sql("CREATE FUNCTION public.slow(event jsonb) RETURNS void LANGUAGE sql AS "
               "$$ SELECT pg_sleep(0.1); INSERT INTO public.calls VALUES (event ->> 'event_key') $$")
        db.sql("SELECT outbox_create_destination('d', 'function', '{\"function\": \"public.slow(jsonb)\"}')")
        yield lambda: [key for (key,) in db.sql("SELECT event_key FROM public.calls")]
    elif kind == "request that hangs":
        with Receiver() as receiver:
            receiver.behave(Hang)
            db.sql("SELECT outbox_create_destination('d', 'http', %s)", json.dumps({"url": receiver.url}))
            yield lambda: [request.header("ce-eventkey") for request in receiver.requests]
    else:
        yield NullDestination(db, options='"delay_ms": 100, "parallel": 1').delivered


@contextlib.contextmanager
def counted_starts(server):
    """Yields how many workers the server has started since."""
    server.set("log_min_messages", "debug1")
    connection = server.connect()
    eventually(lambda: run(connection, "SHOW log_min_messages") == [("debug1",)])
    connection.close()
    before = len(server.log())
    try:
        yield lambda: worker_starts(server.log()[before:])
    finally:
        server.set("log_min_messages", None)


def worker_starts(log):
    return log.count('starting background worker process "retrysafe worker"')


def said(log):
    """What the server said, without what only debugging shows: the messages alone."""
    lines = (re.search(r" (LOG|WARNING|ERROR|FATAL|PANIC):  (.*)", line) for line in log.splitlines())
    return [line[2] for line in lines if line]
