"""What a worker costs the server: no transaction while it sends, no query while there is nothing to do, and what autovacuum learns."""
import itertools
import json
import threading
import time

import pytest

import closing
from conftest import cluster, eventually, make_database, run
from null_destination import NullDestination, emit, worker_pids
from receiver import Answer, Receiver
from workers import own  # noqa: F401 (the fixture own)


class Holds(threading.Thread):
    """Watches what the processes of retrysafe in a database hold: transactions, snapshots and locks, row locks included,
    which have a transaction id. `too_long`: what was there for a second, or outside of a transaction."""

    QUERY = """
        SELECT a.pid, a.backend_xmin::text, a.backend_xid::text, l.held, a.xact_start,
               extract(epoch FROM clock_timestamp() - a.xact_start)::float8
          FROM pg_stat_activity a
          LEFT JOIN (SELECT pid, string_agg(coalesce(relation::regclass::text, locktype) || ' ' || mode, ', ') AS held
                       FROM pg_locks GROUP BY pid) l USING (pid)
         WHERE a.datname = current_database() AND a.backend_type LIKE 'retrysafe %'"""

    def __init__(self, db):
        super().__init__(daemon=True)
        self.session = db.connect()
        self.looks, self.too_long = 0, []
        self._done = threading.Event()

    def run(self):
        outside = {}
        while not self._done.wait(0.05):
            rows = run(self.session, self.QUERY)
            self.looks += len(rows)
            # The two views are not read at one instant, so a step that begins or ends between them looks like that once.
            outside = {pid: outside.get(pid, 0) + 1 for pid, xmin, xid, held, since, _ in rows
                       if since is None and (xmin, xid, held) != (None, None, None)}
            self.too_long += [row for row in rows if outside.get(row[0], 0) > 2 or (row[5] or 0) > 1]

    def stop(self):
        self._done.set()
        self.join()


def tables_of_the_extension(db):
    """Names, and whether it is no child of another."""
    return db.sql("""
        SELECT c.oid::regclass::text, NOT EXISTS (SELECT FROM pg_inherits WHERE inhrelid = c.oid)
          FROM pg_depend d JOIN pg_extension e ON e.oid = d.refobjid JOIN pg_class c ON c.oid = d.objid
         WHERE d.deptype = 'e' AND d.classid = 'pg_class'::regclass AND d.refclassid = 'pg_extension'::regclass
           AND e.extname = 'retrysafe' AND c.relkind = 'r'
         ORDER BY 1""")


@pytest.mark.slow
@pytest.mark.alone
def test_case_24_no_transaction_while_sending(own_db):
    """An endpoint that answers after 30 s: no transaction, snapshot or lock of the worker older than 1 s; commands on our
    tables wait under 2 s; a fast stop ends in 10 s, and the event comes again with its id."""
    db = own_db
    with Receiver() as receiver:
        receiver.behave(Answer(204, delay=30))
        # Leases are renewed meanwhile, so there are short steps to be seen.
        db.sql("SELECT outbox_create_destination('hook', 'http', %s, lease => '1 s')",
               json.dumps({"url": receiver.url, "timeout": "60s"}))
        emit(db, "e1")
        eventually(lambda: receiver.requests)
        holds = Holds(db)
        holds.start()
        session = db.connect()
        run(session, "SET lock_timeout = '10s'")
        tables = tables_of_the_extension(db)
        assert len(tables) > 10
        for table, is_root in itertools.cycle(tables):
            if time.monotonic() > receiver.requests[0].at + 5:
                break
            commands = [["BEGIN", f"TRUNCATE {table}", "ROLLBACK"], [f"VACUUM FULL {table}"]]
            if is_root:  # the others follow
                commands += [[f"ALTER TABLE {table} ADD x int"], [f"ALTER TABLE {table} DROP x"]]
            for command in commands:
                began = time.monotonic()
                for statement in command:
                    run(session, statement)
                assert time.monotonic() - began < 2, command
        holds.stop()
        assert holds.too_long == []
        assert holds.looks > 50 and worker_pids(db)
        assert len(receiver.requests) == 1 and time.monotonic() < receiver.requests[0].at + 25, "it does not hang any more"

        began = time.monotonic()
        db.server.pg_ctl("stop", "-m", "fast")
        assert time.monotonic() - began < 10
        receiver.behave(204)
        db.server.pg_ctl("start")
        eventually(lambda: db.value("SELECT sent_at IS NOT NULL FROM outbox_events"), timeout=40)
        assert receiver.ids == [db.value("SELECT event_id::text FROM outbox_events")] * 2
        closing.balance(db, "hook", receiver.ids, committed=["e1"])


@pytest.mark.slow
def test_idle_means_no_query():
    """What the server counts as statements, SPI included, and as transactions does not grow in 60 s without events."""
    with cluster("shared_preload_libraries = 'retrysafe, pg_stat_statements'", "pg_stat_statements.track = all",
                 "retrysafe.poll_interval = 50ms", "autovacuum = off") as quiet:
        db = make_database(quiet)
        d = NullDestination(db, lease="interval '2 s'")
        NullDestination(db, "second", shards=4)
        session = quiet.connect()  # in another database
        run(session, "CREATE EXTENSION pg_stat_statements")
        emit(db, "e1", "e2")
        eventually(lambda: len(d.delivered()) == 2)

        def activity():
            return run(session, """
                SELECT (SELECT sum(calls) FROM pg_stat_statements(true) WHERE dbid = %(oid)s),
                       (SELECT xact_commit + xact_rollback FROM pg_stat_database WHERE datid = %(oid)s),
                       (SELECT array_agg(query_start) FROM pg_stat_activity WHERE backend_type = 'retrysafe worker'),
                       (SELECT count(*) FROM pg_locks l JOIN pg_stat_activity a USING (pid)
                         WHERE a.backend_type = 'retrysafe worker')""".replace("%(oid)s", str(oid)))[0]

        oid = run(session, "SELECT oid FROM pg_database WHERE datname = %s", db.name)[0][0]
        # Shards without an event of theirs store their progress once, after ten seconds.
        eventually(lambda: db.value("SELECT sum(backlog) FROM outbox_status") == 0, timeout=60)
        time.sleep(12)  # what is old is removed once more within ten seconds of the last event
        run(session, "CHECKPOINT")
        before, wal = activity(), run(session, "SELECT pg_current_wal_insert_lsn()")[0][0]
        time.sleep(60)
        assert activity() == before and before[3] == 0
        # The background writer may note the running transactions.
        assert run(session, "SELECT pg_current_wal_insert_lsn() - %s", wal)[0][0] < 500
        emit(db, "e3")
        eventually(lambda: len(d.delivered()) == 3)


def test_statistics_reach_autovacuum(db):
    d = NullDestination(db)
    emit(db, *(f"e{i}" for i in range(20)))
    eventually(lambda: len(d.delivered()) == 20)
    eventually(lambda: db.value("SELECT sum(n_tup_ins) > 1 FROM pg_stat_user_tables WHERE relname ~ '^outbox_batches'"))
