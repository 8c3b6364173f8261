"""The background worker: what it delivers, when it wakes, what it leaves alone, and how it ends."""
import contextlib
import itertools
import json
import pathlib
import re
import signal
import threading
import time

import psycopg2
import pytest

import closing
from conftest import cluster, database_on, eventually, in_spite_of_crashes, kill, make_database, run
from null_destination import DELIVERED, RETRY, UNREACHABLE, NullDestination, emit, worker_pids
from receiver import Answer, Hang, Receiver


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


# --- nothing happens: not until something else has, which began later --------------------------------------------

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


# --- publishing ------------------------------------------------------------------------------------------------

def test_events_arrive_once_and_in_order(db):
    d = NullDestination(db)
    keys = [f"e{i}" for i in range(200)]
    emit(db, *keys, ordering_key="one")
    eventually(lambda: len(d.delivered()) >= 200)
    assert d.delivered() == keys
    published = {str(event_id) for (event_id,) in db.sql("SELECT event_id FROM outbox_events")}
    assert {a.id for a in d.attempts()} == published
    eventually(lambda: db.value("SELECT bool_and(sent_at IS NOT NULL) FROM outbox_events"))


@pytest.mark.parametrize("way", ["alter", "resume", "pause and resume"])
def test_an_operator_ends_the_back_off(db, way):
    """Who has repaired something need not wait for the end of an hour."""
    d = NullDestination(db, backoff="interval '1 h'", backoff_max="interval '1 h'")
    d.tell("unreachable")
    emit(db, "a")
    eventually(lambda: d.status()["state"] == "backing off")
    d.tell("ok")
    if way == "alter":
        db.sql("SELECT outbox_alter_destination('d', options => '{\"delay_ms\": 0}')")
    if way == "pause and resume":
        db.sql("SELECT outbox_pause('d')")
        eventually(lambda: d.status()["holders"] is None)
    if way != "alter":
        db.sql("SELECT outbox_resume('d')")
    eventually(lambda: d.delivered() == ["a"])
    eventually(lambda: (d.status()["state"], d.status()["failures"]) == ("idle", 0))


def test_events_for_others_leave_a_destination_idle(db):
    """What it does not want does not count as backlog for ever, though nothing else happens."""
    d = NullDestination(db, event_types="'{wanted}'")
    emit(db, "a", "b")
    eventually(lambda: (d.status()["state"], d.status()["backlog"]) == ("idle", 0), timeout=60)
    assert d.status()["oldest_pending_age"] is None
    assert d.attempts() == []
    batches = db.value("SELECT count(*) FROM outbox_batches")
    assert batches <= 3, "once, not again and again"


def test_positions_without_events_leave_a_destination_idle(db):
    """Rolled back events, and rings that turn, draw positions too."""
    d = NullDestination(db)
    session = db.connect(autocommit=False)
    run(session, "SELECT outbox_emit(NULL, 'gone', 't', '1')")
    session.rollback()
    eventually(lambda: (d.status()["state"], d.status()["backlog"]) == ("idle", 0), timeout=60)


@pytest.mark.alone
def test_a_commit_wakes_the_worker(server):
    """The poll interval is an hour: what arrives was announced."""
    with cluster("retrysafe.poll_interval = 1h") as quiet:
        db = make_database(quiet)
        d = NullDestination(db)
        for i in range(20):
            emit(db, f"e{i}")
            eventually(lambda: len(d.delivered()) == i + 1, timeout=5)


@pytest.mark.alone
def test_delayed_events_come_when_due(db):
    d = NullDestination(db)
    db.sql("SELECT outbox_emit(NULL, 'late', 't', '1', deliver_after => clock_timestamp() + interval '1.5 s')")
    emit(db, "now")
    eventually(lambda: d.delivered() == ["now"])
    eventually(lambda: d.delivered() == ["now", "late"], timeout=5)


def test_a_failed_event_is_tried_again_and_dies_at_last(db):
    d = NullDestination(db, options='"refuse": "bad"', max_attempts=3, backoff="interval '50 ms'")
    emit(db, "good1", "bad", "good2")
    eventually(lambda: d.status()["dead"] == 1)
    assert d.delivered() == ["good1", "good2"]

    d.tell("retry")
    emit(db, "slow")
    eventually(lambda: len([a for a in d.attempts(RETRY) if a.key == "slow"]) >= 2)
    d.tell("ok")
    eventually(lambda: "slow" in d.delivered() or d.status()["dead"] == 2)


def test_an_unreachable_destination_costs_nothing(db):
    """P6: no attempts burnt, no writes per event, one line in the log, and the other destination goes on."""
    away = NullDestination(db, "away", backoff="interval '50 ms'", backoff_max="interval '200 ms'")
    other = NullDestination(db, "other")
    away.tell("unreachable")
    before = db.server.log().count('destination "away" is unreachable')
    keys = [f"e{i}" for i in range(50)]
    emit(db, *keys, ordering_key="k")
    eventually(lambda: other.delivered() == keys)
    eventually(lambda: len(away.attempts(UNREACHABLE)) > 8)
    status = away.status()
    assert status["state"] == "backing off" or status["failures"] > 0
    assert (status["parked_retry"], status["parked_blocked"], status["dead"]) == (0, 0, 0)
    assert db.server.log().count('destination "away" is unreachable') == before + 1
    away.tell("ok")
    eventually(lambda: away.delivered() == keys)
    assert {a.number for a in away.attempts()} == {"1"}
    eventually(lambda: 'destination "away" is back after' in db.server.log())


def test_a_sink_that_forgets_to_ask_for_a_call_is_looked_after(db):
    """It has an outcome and tells nobody: it is asked at the latest when the lease is renewed."""
    d = NullDestination(db, lease="interval '2 s'")
    d.tell("forget")
    emit(db, "a")
    eventually(lambda: d.status()["state"] == "publishing")
    d.tell("ok")
    eventually(lambda: d.status()["delivered"] == 1)
    assert d.delivered() == ["a"]


def test_a_destination_that_cannot_be_opened_says_why(db):
    d = NullDestination(db, options='"broken": "no such thing"')
    emit(db, "e1")
    eventually(lambda: d.status()["last_error"] == "no such thing")
    db.sql("SELECT outbox_alter_destination('d', '{\"broken\": null}')")
    db.sql("SELECT outbox_resume('d')")
    eventually(lambda: d.delivered() == ["e1"])


def test_pause_alter_and_drop_reach_the_worker(db):
    d = NullDestination(db)
    emit(db, "e1")
    eventually(lambda: d.delivered() == ["e1"])
    db.sql("SELECT outbox_pause('d')")
    eventually(lambda: not d.status()["holders"])
    emit(db, "e2")
    db.sql("SELECT outbox_alter_destination('d', '{\"refuse\": \"e3\"}')")
    db.sql("SELECT outbox_resume('d')")
    emit(db, "e3", "e4")
    eventually(lambda: d.delivered() == ["e1", "e2", "e4"])
    assert d.status()["dead"] == 1
    db.sql("SELECT outbox_drop_destination('d')")
    eventually(lambda: db.value("SELECT shards FROM outbox_workers WHERE database = current_database()") == 0)


def test_publish_off_stops_and_on_starts(own_db):
    d = NullDestination(own_db)
    own_db.server.set("retrysafe.publish", "off")
    try:
        eventually(lambda: own_db.value("SELECT state FROM outbox_workers WHERE database = current_database()")
                   == "suspended")
        emit(own_db, "e1")
        let_look(own_db)
        assert d.delivered() == []
    finally:
        own_db.server.set("retrysafe.publish", None)
    eventually(lambda: d.delivered() == ["e1"])


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


def test_commit_prepared_is_found_by_polling(own_db):
    d = NullDestination(own_db)
    session = own_db.connect(autocommit=False)
    run(session, "SELECT outbox_emit(NULL, 'prepared', 't', '1')")
    run(session, "PREPARE TRANSACTION 'p1'")
    emit(own_db, "later")
    eventually(lambda: d.delivered() == ["later"])
    eventually(lambda: is_idle(own_db))  # whatever the commit of `later` rang for has been looked at
    own_db.sql("COMMIT PREPARED 'p1'")
    eventually(lambda: d.delivered() == ["later", "prepared"], timeout=10)


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


# --- sharing ---------------------------------------------------------------------------------------------------

@pytest.mark.alone
def test_several_workers_share_the_shards():
    """A7: no event is sent by two, and all work. When one dies the others take over at once."""
    with cluster("retrysafe.workers_per_database = 3") as server:
        db = make_database(server)
        d = NullDestination(db, shards=6, options='"delay_ms": 20')
        eventually(lambda: len(worker_pids(db)) == 3)
        eventually(lambda: db.sql("SELECT shards FROM outbox_workers WHERE process = 'worker'") == [(2,)] * 3)
        session = db.connect()
        run(session, "SELECT outbox_emit(NULL, 'e' || i, 't', '1', 'o' || i) FROM generate_series(1, 600) i")
        eventually(lambda: len(d.delivered()) == 600)
        assert len(set(d.delivered())) == 600
        assert len({a.pid for a in d.attempts()}) == 3

        db.sql("SELECT pg_terminate_backend(%s)", worker_pids(db)[0])
        run(session, "SELECT outbox_emit(NULL, 'f' || i, 't', '1', 'o' || i) FROM generate_series(1, 60) i")
        eventually(lambda: len(d.delivered()) == 660, timeout=5)
        eventually(lambda: db.sql("SELECT shards FROM outbox_workers WHERE process = 'worker'") == [(2,)] * 3)
        assert len(set(d.delivered())) == 660

        server.set("retrysafe.workers_per_database", 1)
        eventually(lambda: db.sql("SELECT shards FROM outbox_workers WHERE process = 'worker'") == [(6,)])


def test_a_worker_claims_the_shard_it_lacks_not_its_own_again(own_db):
    """One worker holds idle shards whose leases ran out; a pull client gives back the one that it lacks."""
    d = NullDestination(own_db, shards=3, lease="interval '1 s'")
    eventually(lambda: own_db.value("SELECT count(*) FROM outbox_shards WHERE holder LIKE 'worker%%'") == 3)
    own_db.sql("SELECT outbox_pause('d')")
    eventually(lambda: own_db.value("SELECT count(*) FROM outbox_shards WHERE holder IS NOT NULL") == 0)
    own_db.sql("UPDATE outbox_shards SET holder = 'somebody', lease_until = clock_timestamp() + interval '3 s' "
               "WHERE shard = 0")
    own_db.sql("SELECT outbox_resume('d')")
    session = own_db.connect()
    run(session, "SELECT outbox_emit(NULL, 'e' || i, 't', '1', 'o' || i) FROM generate_series(1, 60) i")
    eventually(lambda: len(d.delivered()) == 60, timeout=15)
    assert len(set(d.delivered())) == 60


def test_a_lease_is_kept_while_sending_takes_longer(own_db):
    d = NullDestination(own_db, options='"delay_ms": 3500', lease="interval '1 s'")
    emit(own_db, "e1")
    eventually(lambda: own_db.value("SELECT sent_at IS NOT NULL FROM outbox_events"))
    assert d.delivered() == ["e1"]
    assert "while sending to it" not in own_db.server.log()


def take_away(db):
    """Its shard, as another process does when the lease has ended."""
    db.sql("UPDATE outbox_shards SET token = token + 1, holder = 'somebody', lease_until = clock_timestamp() + interval '1 s'")


def test_a_batch_is_given_up_when_its_shard_is_lost_while_sending(own_db):
    d = NullDestination(own_db, lease="interval '1 s'")
    d.tell("hang")
    emit(own_db, "e1")
    eventually(lambda: own_db.value("SELECT state FROM outbox_workers WHERE database = current_database()") == "publishing")
    take_away(own_db)
    eventually(lambda: 'lost shard 0 of destination "d" while sending to it' in own_db.server.log())
    d.tell("ok")
    eventually(lambda: d.status()["delivered"] == 1)
    assert d.delivered() == ["e1"], "what was in flight is gone with its sink"


@pytest.mark.parametrize("word, sent", [("ok", ["e1", "e1"]), ("unreachable", ["e1"])])
def test_a_late_record_of_the_worker_is_refused(own_db, word, sent):
    """The batch comes again, with the same ids, and no failure is counted for what somebody else answers for now."""
    d = NullDestination(own_db, lease="interval '1 s'", backoff="interval '1 h'", backoff_max="interval '1 h'")
    d.tell(word)
    before = own_db.server.log().count("before its batch was recorded")
    with fault(own_db.server, "worker.after_ack=wait"):
        emit(own_db, "e1")
        eventually(lambda: d.attempts())
        take_away(own_db)
    eventually(lambda: own_db.server.log().count("before its batch was recorded") > before)
    d.tell("ok")
    eventually(lambda: d.status()["delivered"] == 1)
    assert d.delivered() == sent and len(set(d.ids())) == 1
    assert d.status()["failures"] == 0


# --- recording -------------------------------------------------------------------------------------------------

def test_outcomes_that_could_not_be_recorded_are_not_sent_again(own_db):
    d = NullDestination(own_db)
    with fault(own_db.server, "record.before_commit=error"):
        emit(own_db, "e1")
        eventually(lambda: own_db.value("SELECT last_error IS NOT NULL FROM outbox_workers "
                                        "WHERE database = current_database()"))
        assert own_db.value("SELECT sent_at FROM outbox_events") is None
    eventually(lambda: own_db.value("SELECT sent_at IS NOT NULL FROM outbox_events"))
    assert d.delivered() == ["e1"]


def test_stopped_in_the_middle_of_a_batch_it_repeats_nothing_that_was_delivered(own_db):
    """The first event hangs, and the second one behind it in its key was not sent."""
    with Receiver() as far:
        far.behave(lambda r: Hang() if r.header("ce-eventkey") == "a1" else 204)
        own_db.sql("SELECT outbox_create_destination('d', 'http', %s)", json.dumps({"url": far.url, "timeout": "60s"}))
        own_db.sql("SELECT outbox_emit(NULL, k, 't', '{}', left(k, 1)) FROM unnest(ARRAY['a1', 'b1', 'a2', 'b2', 'c1']) k")
        eventually(lambda: len(far.requests) == 4)
        far.behave(204)
        own_db.sql("SELECT pg_terminate_backend(%s)", worker_pids(own_db)[0])
        eventually(lambda: own_db.value("SELECT delivered FROM outbox_status") == 5)
        sent = [r.header("ce-eventkey") for r in far.requests]
        assert sorted(sent) == ["a1", "a1", "a2", "b1", "b2", "c1"]
        assert sent[-2:] == ["a1", "a2"]


def test_killed_between_ack_and_record_sends_again_with_the_same_id(own_db):
    """A6, as far as the worker goes."""
    d = NullDestination(own_db)
    fault_of_the_next_worker(own_db, "worker.after_ack=kill")
    in_spite_of_crashes(lambda: emit(own_db, "e1"))
    eventually(lambda: d.delivered() == ["e1", "e1"], timeout=30)
    eventually(lambda: can_connect(own_db.server))
    eventually(lambda: own_db.value("SELECT sent_at IS NOT NULL FROM outbox_events"))
    assert d.delivered() == ["e1", "e1"]
    assert len({a.id for a in d.attempts()}) == 1
    assert len({a.pid for a in d.attempts()}) == 2


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


# --- databases -------------------------------------------------------------------------------------------------

@pytest.mark.slow
@pytest.mark.alone
@pytest.mark.parametrize("state", ["idle", "publishing", "backing off"])
def test_case_18_drop_database(own, state):
    """CREATE DATABASE and DROP DATABASE, twenty times, with the worker idle, in a request that hangs, and in
    back-off: each drop under 5 s (busy: 10 s), none cancelled."""
    log_before = len(own.log())
    admin = own.connect()
    with Receiver() as receiver:
        receiver.behave({"idle": 204, "publishing": Hang(), "backing off": 503}[state])
        for _ in range(20):
            db = make_database(own)
            db.sql("SELECT outbox_create_destination('d', 'http', %s, backoff => '60 s', backoff_max => '60 s')",
                   json.dumps({"url": receiver.url}))
            emit(db, "e1")
            eventually(lambda: len(receiver.requests) == 1)
            eventually(lambda: db.value("SELECT state FROM outbox_workers WHERE database = current_database()")
                       == state)
            began = time.monotonic()
            run(admin, f'DROP DATABASE "{db.name}"')
            assert time.monotonic() - began < (10 if state == "publishing" else 5)
            receiver.clear()
    admin.close()
    log = own.log()[log_before:]
    assert "does not exist" not in log and "canceling statement" not in log


@pytest.mark.alone
@pytest.mark.parametrize("kind", ["request that hangs", "function"])
def test_any_other_database_is_dropped_beside_a_worker(own_db, kind):
    """The server waits until every process has taken note, also one that is in the middle of something."""
    with Receiver() as receiver:
        receiver.behave(Hang())
        if kind == "function":
            own_db.sql("CREATE FUNCTION public.sleep(event jsonb) RETURNS void LANGUAGE sql AS 'SELECT pg_sleep(600)'")
            own_db.sql("""SELECT outbox_create_destination('d', 'function',
                                                           '{"function": "public.sleep", "statement_timeout": "60s"}')""")
        else:
            own_db.sql("SELECT outbox_create_destination('d', 'http', %s)", json.dumps({"url": receiver.url}))
        emit(own_db, "e1")
        if kind == "function":
            eventually(lambda: own_db.sql("""SELECT 1 FROM pg_stat_activity WHERE wait_event = 'PgSleep'
                                                AND backend_type = 'retrysafe worker' AND datname = current_database()"""))
        else:
            eventually(lambda: receiver.requests)
        admin = own_db.server.connect()
        run(admin, "CREATE DATABASE another")
        began = time.monotonic()
        run(admin, "DROP DATABASE another")
        assert time.monotonic() - began < 5
        admin.close()


@pytest.mark.alone
def test_rename_and_template_work_beside_a_worker(own_db):
    d = NullDestination(own_db)
    emit(own_db, "e1")
    eventually(d.delivered)
    admin = own_db.server.connect()
    name = own_db.name
    for command in (f"ALTER DATABASE {name} RENAME TO {name}x", f"ALTER DATABASE {name}x RENAME TO {name}",
                    f"CREATE DATABASE {name}copy TEMPLATE {name}", f"DROP DATABASE {name}copy"):
        began = time.monotonic()
        run(admin, command)
        assert time.monotonic() - began < 5, command
    emit(own_db, "e2")
    eventually(lambda: d.delivered() == ["e1", "e2"])
    admin.close()


def test_a_failed_command_lets_the_worker_come_back(own_db):
    d = NullDestination(own_db)
    session = own_db.connect()
    admin = own_db.server.connect()
    with pytest.raises(psycopg2.errors.ObjectInUse):
        run(admin, f"DROP DATABASE {own_db.name}")  # `session` is in it
    run(session, "SELECT outbox_emit(NULL, 'e1', 't', '1')")
    eventually(lambda: d.delivered() == ["e1"])
    admin.close()


def test_strangers_cannot_make_the_worker_leave(own_db):
    NullDestination(own_db)
    eventually(lambda: worker_pids(own_db))
    before = worker_pids(own_db)
    admin = own_db.server.connect()
    run(admin, "CREATE ROLE stranger LOGIN")
    stranger = own_db.server.connect(user="stranger")
    with pytest.raises(psycopg2.errors.InsufficientPrivilege):
        run(stranger, f"DROP DATABASE {own_db.name}")
    stranger.close()
    run(admin, "DROP ROLE stranger")
    admin.close()
    assert worker_pids(own_db) == before


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


@pytest.mark.alone
@pytest.mark.parametrize("kind", ["slow", "request that hangs", "function"])
def test_case_19_drop_extension_with_a_busy_worker(own_db, kind):
    """DROP EXTENSION CASCADE with 10,000 events pending: within 10 s, with no error said again and again and no worker
    started again and again; CREATE EXTENSION works afterwards, and of the old events nothing comes any more."""
    db = own_db
    session = db.connect()
    with slow_destination(db, kind) as got:
        run(session, "SELECT outbox_emit(NULL, 'e' || i, 't', '1') FROM generate_series(1, 10000) i")
        eventually(got)
        assert db.value("SELECT backlog FROM outbox_status") > 9000
        with counted_starts(db.server) as starts:
            with time_to_come_back(db.server):
                started, log_before = starts(), len(db.server.log())
                began = time.monotonic()
                run(session, "DROP EXTENSION retrysafe CASCADE")
                assert time.monotonic() - began < 10
                eventually(lambda: worker_pids(db) == [])
                before = got()
            assert got() == before
            messages = said(db.server.log()[log_before:])
            assert len(messages) < 5 and len(messages) == len(set(messages)), messages
            assert starts() == started + 1  # in the other database

        run(session, "CREATE EXTENSION retrysafe SCHEMA retrysafe")
        assert db.value("SELECT count(*) FROM outbox_events") == 0
        again = NullDestination(db, "again")
        emit(db, "new")
        eventually(lambda: again.delivered() == ["new"] and again.status()["delivered"] == 1)
        assert got() == before
        closing.balance(db, "again", again.ids(), committed=["new"])


def test_case_19_a_schema_that_is_not_ours_is_not_touched(own_db):
    """Somebody else's relations have our schema and all our names, columns and rows: events that wait, a destination
    that wants them. No worker stays there, and nobody waits for a lock on them, reads or changes them: not when a worker
    looks into the database, not when CREATE EXTENSION fails, not when the extension works in another schema."""
    db, server = own_db, own_db.server
    with Receiver() as receiver:
        receiver.behave(503)
        db.sql("SELECT outbox_create_destination('d', 'http', %s, backoff => '10 ms', backoff_max => '10 ms')",
               json.dumps({"url": receiver.url}))
        emit(db, "theirs")
        eventually(lambda: receiver.requests)
        squat(db)
        eventually(lambda: worker_pids(db) == [])
        receiver.behave(204)
        receiver.clear()
        before, counters_before = contents(db), counters(db)
        assert "theirs" in str(before) and len(before) > 9

        guard = db.connect(autocommit=False)  # who touches them waits for it
        run(guard, "LOCK TABLE " + ", ".join(f"retrysafe.{name}" for name in before) + " IN ACCESS EXCLUSIVE MODE")

        def nobody_waits():
            # of those only that are really tables; it is asked of the lock manager, not of them
            assert run(guard, "SELECT count(*) FROM pg_locks WHERE NOT granted") == [(0,)]
            return True

        with counted_starts(server) as starts:
            admin = server.connect()
            run(admin, f"ALTER DATABASE {db.name} CONNECTION LIMIT 77")  # evidence: it is looked at again
            admin.close()
            eventually(lambda: nobody_waits() and starts() == 1)
            eventually(lambda: nobody_waits() and worker_pids(db) == [])

            with pytest.raises(psycopg2.Error) as caught:
                db.sql("CREATE EXTENSION retrysafe SCHEMA retrysafe")
            assert caught.value.pgcode in ("42P07", "42723")  # a table, or a function, of that name exists
            eventually(lambda: nobody_waits() and worker_pids(db) == [])
            assert starts() == 1

        db.sql("CREATE SCHEMA ours")
        db.sql("CREATE EXTENSION retrysafe SCHEMA ours")
        db.sql("SELECT ours.outbox_create_destination('d', 'http', %s)", json.dumps({"url": receiver.url}))
        db.sql("SELECT ours.outbox_emit(NULL, 'ours', 't', '1')")
        eventually(lambda: nobody_waits() and db.value("SELECT sent_at IS NOT NULL FROM ours.outbox_events"))
        db.sql("DROP EXTENSION retrysafe")
        eventually(lambda: nobody_waits() and worker_pids(db) == [])
        guard.close()
        assert counters(db) == counters_before
        assert contents(db) == before
        assert [request.header("ce-eventkey") for request in receiver.requests] == ["ours"]


def squat(db):
    """Replaces the extension by plain relations of the same names: tables with their columns, rows and indexes,
    sequences, and tables in place of the views."""
    session = db.connect()
    relations = run(session, """SELECT c.relname, c.relkind FROM pg_class c JOIN pg_depend d ON d.objid = c.oid
        WHERE d.classid = 'pg_class'::regclass AND d.deptype = 'e' AND c.relkind IN ('r', 'p', 'v', 'S')""")
    indexes = run(session, "SELECT indexdef FROM pg_indexes WHERE schemaname = 'retrysafe'")
    run(session, "CREATE SCHEMA saved")
    for name, kind in relations:
        if kind == "S":
            (value,), = run(session, f"SELECT last_value FROM retrysafe.{name}")
            run(session, f"CREATE SEQUENCE saved.{name} START {value + 1}")
        else:
            run(session, f"CREATE TABLE saved.{name} AS TABLE retrysafe.{name}")
    run(session, "DROP EXTENSION retrysafe CASCADE")
    for name, kind in relations:
        run(session, f"ALTER {'SEQUENCE' if kind == 'S' else 'TABLE'} saved.{name} SET SCHEMA retrysafe")
    for (definition,) in indexes:
        run(session, definition)
    session.close()


def contents(db):
    """Every row of the squatter's tables, where it is, and who wrote it."""
    tables = db.sql("SELECT relname FROM pg_class WHERE relkind = 'r' AND relnamespace = 'retrysafe'::regnamespace")
    return {name: db.sql(f"SELECT ctid::text, xmin::text, t::text FROM retrysafe.{name} t ORDER BY ctid")
            for (name,) in sorted(tables)}


def counters(db):
    """What the server has counted of their use. A session tells it when it ends, after its client has gone."""
    eventually(lambda: db.value("""SELECT count(*) FROM pg_stat_activity
                                    WHERE datname = current_database() AND pid <> pg_backend_pid()""") == 0)
    return db.sql("""SELECT relname, seq_scan, idx_scan, n_tup_ins, n_tup_upd, n_tup_del FROM pg_stat_all_tables
                      WHERE schemaname = 'retrysafe' ORDER BY relname""")


@pytest.mark.slow
@pytest.mark.alone
def test_case_20_many_databases():
    """Thirty databases, one a template, one closed to connections: each open one is looked at once, the other two
    never. With the extension in all of them each has a worker, and when they are dropped every slot is free again."""
    workers = 40
    with cluster(f"max_worker_processes = {workers}", "log_min_messages = debug1") as server:
        admin = server.connect()
        names = [f"d{i}" for i in range(28)]
        for name in names:
            run(admin, f"CREATE DATABASE {name}")
        run(admin, "CREATE DATABASE template IS_TEMPLATE true")
        run(admin, "CREATE DATABASE closed ALLOW_CONNECTIONS false")
        running = "SELECT datname FROM pg_stat_activity WHERE backend_type = 'retrysafe worker'"
        looks = len(names) + 1  # and postgres
        eventually(lambda: worker_starts(server.log()) >= looks and run(admin, running) == [])
        log_before = len(server.log())
        until = time.monotonic() + 17  # the launcher reads the catalog every 15 s when something went on
        while time.monotonic() < until:
            run(admin, "ALTER DATABASE template SET work_mem = '5MB'")
            time.sleep(0.5)
        assert worker_starts(server.log()) == looks
        assert [m for m in said(server.log()[log_before:]) if "retrysafe" in m] == []

        for name in names:
            inside = server.connect(name)
            run(inside, "CREATE SCHEMA retrysafe")
            run(inside, "CREATE EXTENSION retrysafe SCHEMA retrysafe")
            inside.close()
        eventually(lambda: sorted(run(admin, running)) == sorted((name,) for name in names))
        log_before = len(server.log())
        for i, name in enumerate(names[1:]):
            began = time.monotonic()
            run(admin, f"DROP DATABASE {name}" + (" WITH (FORCE)" if i % 2 else ""))
            assert time.monotonic() - began < 5

        # Slots: the two launchers, ours and that of logical replication, keep theirs, and so does one worker.
        inside = server.connect(names[0])
        listed = "SELECT process, database FROM retrysafe.outbox_workers ORDER BY process"
        eventually(lambda: run(inside, listed) == [("launcher", None), ("worker", names[0])])
        messages = said(server.log()[log_before:])
        assert [m for m in messages if "worker slot" in m or "does not exist" in m] == []
        by_hand = [run(inside, "SELECT retrysafe.outbox_run_worker()")[0][0] for _ in range(workers - 3)]
        with pytest.raises(psycopg2.Error) as caught:
            run(inside, "SELECT retrysafe.outbox_run_worker()")
        assert caught.value.pgcode == "RS303"
        for pid in by_hand:
            # The server knows it under this number once it is connected.
            eventually(lambda: run(inside, "SELECT pg_terminate_backend(%s)", pid) == [(True,)])
        eventually(lambda: run(inside, listed) == [("launcher", None), ("worker", names[0])])
        inside.close()

        # The closed one is opened: it is looked at, and has its worker.
        run(admin, "ALTER DATABASE closed ALLOW_CONNECTIONS true")
        inside = server.connect("closed")
        run(inside, "CREATE EXTENSION retrysafe")
        inside.close()
        eventually(lambda: ("closed",) in run(admin, running))
        admin.close()


def test_case_20_a_clone_publishes_nothing_without_consent(own):
    """Events wait in the log, as retries and until they are due; then the database is cloned. The clone gets a worker,
    and the original alone delivers, until somebody consents."""
    db = make_database(own)
    d = NullDestination(db, backoff="interval '100 ms'", backoff_max="interval '100 ms'")
    d.tell("retry")
    emit(db, "parked")
    eventually(lambda: d.status()["parked_retry"] == 1)
    d.tell("hang")
    db.sql("SELECT outbox_emit(NULL, 'due', 't', '1', deliver_after => clock_timestamp() + interval '2 s')")
    emit(db, "pending", "pending-too")
    eventually(lambda: db.value("SELECT state FROM outbox_workers WHERE database = current_database()") == "publishing")

    admin = own.connect()
    clone = type(db)(own, f"{db.name}clone")
    run(admin, f"CREATE DATABASE {clone.name} TEMPLATE {db.name}")
    run(admin, f"ALTER DATABASE {clone.name} SET search_path = retrysafe, public")
    copied = {"parked", "pending", "pending-too", "due"}
    eventually(lambda: clone.value("SELECT state FROM outbox_workers WHERE database = current_database()") == "suspended")
    assert len(worker_pids(clone)) == 1
    assert clone.value("SELECT state FROM outbox_status") == "suspended"
    assert {key for (key,) in clone.sql("""SELECT event_key FROM outbox_events WHERE sent_at IS NULL
                                           UNION ALL SELECT event_key FROM outbox_scheduled_events""")} == copied
    d.tell("ok")
    emit(clone, "in-the-clone")
    eventually(lambda: set(d.delivered()) >= copied)
    let_look(clone)
    assert sorted(d.delivered()) == sorted(copied)
    assert {a.pid for a in d.attempts()}.isdisjoint(str(pid) for pid in worker_pids(clone))

    clone.sql("SELECT outbox_consent('fork')")
    eventually(lambda: len(d.delivered()) == 2 * len(copied) + 1)
    clones = [a for a in d.attempts(DELIVERED) if a.pid in map(str, worker_pids(clone))]
    assert {a.key for a in clones} == copied | {"in-the-clone"}
    # The ids of a fork are its own; the original has delivered its own once.
    eventually(lambda: (d.status()["delivered"], clone.value("SELECT delivered FROM outbox_status"))
               == (len(copied), len(clones)))
    closing.balance(clone, "d", [a.id for a in clones], committed={a.key for a in clones})
    closing.balance(db, "d", [a.id for a in d.attempts(DELIVERED) if a not in clones], committed=copied)
    for name in (clone.name, db.name):
        run(admin, f"DROP DATABASE {name}")
    admin.close()


# --- processes -------------------------------------------------------------------------------------------------

def test_no_free_slot_backs_off_and_shows():
    with cluster("max_worker_processes = 3") as server:  # one is for logical replication
        first = make_database(server)
        d = NullDestination(first)
        emit(first, "e1")
        eventually(d.delivered)
        second = make_database(server)
        eventually(lambda: second.value("SELECT state FROM outbox_workers WHERE process = 'launcher'")
                   == "no worker slot is free")
        with pytest.raises(psycopg2.Error) as caught:
            second.sql("SELECT outbox_run_worker()")
        assert caught.value.pgcode == "RS303"
        assert second.value("SELECT count(*) FROM outbox_workers WHERE state = 'starting'") == 0
        admin = server.connect()
        run(admin, f"DROP DATABASE {first.name}")
        admin.close()
        eventually(lambda: worker_pids(second), timeout=40)
        assert server.log().count("no background worker slot is free for") == 1
        assert second.value("SELECT state FROM outbox_workers WHERE process = 'launcher'") == "running"


def test_terminated_processes_come_back(own_db):
    d = NullDestination(own_db)
    eventually(lambda: worker_pids(own_db))
    before = worker_pids(own_db)
    for process in ("retrysafe worker", "retrysafe launcher"):
        own_db.sql("SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE backend_type = %s", process)
    eventually(lambda: worker_pids(own_db) not in ([], before))
    eventually(lambda: own_db.value("SELECT count(*) FROM outbox_workers WHERE process = 'launcher'") == 1)
    emit(own_db, "e1")
    eventually(d.delivered)
    pid = worker_pids(own_db)[0]
    own_db.sql("SELECT pg_cancel_backend(%s)", pid)
    emit(own_db, "e2")
    eventually(lambda: d.delivered() == ["e1", "e2"])
    assert worker_pids(own_db) == [pid]


def test_a_worker_by_hand_without_preload():
    with cluster("shared_preload_libraries = ''", "retrysafe.poll_interval = 100ms") as server:
        db = make_database(server)
        d = NullDestination(db)
        emit(db, "e1")
        assert worker_pids(db) == []
        pid = db.value("SELECT outbox_run_worker()")
        eventually(lambda: d.delivered() == ["e1"])
        assert worker_pids(db) == [pid]
        emit(db, "e2")
        eventually(lambda: d.delivered() == ["e1", "e2"])
        assert db.sql("SELECT * FROM outbox_workers") == []
        kill(pid, signal.SIGTERM)
        eventually(lambda: worker_pids(db) == [])


def test_another_version_is_said_once_and_left_alone(own_db):
    d = NullDestination(own_db)
    eventually(lambda: worker_pids(own_db))
    before = own_db.server.log().count("is not of version")
    own_db.sql("UPDATE pg_extension SET extversion = '0.0.1' WHERE extname = 'retrysafe'")
    with time_to_come_back(own_db.server):
        emit(own_db, "e1")
        eventually(lambda: worker_pids(own_db) == [])
    assert d.delivered() == []
    assert own_db.server.log().count("is not of version") == before + 1
    own_db.sql("UPDATE pg_extension SET extversion = %s WHERE extname = 'retrysafe'", version())
    own_db.sql("CREATE EXTENSION IF NOT EXISTS pgcrypto")
    eventually(lambda: d.delivered() == ["e1"])


def version():
    control = (pathlib.Path(__file__).resolve().parents[2] / "retrysafe.control").read_text()
    return control.split("default_version = '")[1].split("'")[0]


def test_settings_of_database_and_role_do_not_reach_the_work(own):
    db = make_database(own)
    admin = own.connect()
    leaks = {"default_transaction_read_only": "on", "default_transaction_isolation": "serializable",
             "statement_timeout": "1", "lock_timeout": "1", "idle_in_transaction_session_timeout": "1",
             "DateStyle": "'German, DMY'", "TimeZone": "'Asia/Kathmandu'", "row_security": "off",
             "IntervalStyle": "sql_standard", "session_replication_role": "replica", "bytea_output": "escape"}
    for name, value in leaks.items():
        run(admin, f"ALTER DATABASE {db.name} SET {name} = {value}")
    run(admin, f"ALTER DATABASE {db.name} SET search_path = nowhere")
    options = psycopg2.connect(own.dsn(db.name), options="-c search_path=retrysafe -c statement_timeout=0 "
                               "-c default_transaction_read_only=off -c lock_timeout=0 "
                               "-c idle_in_transaction_session_timeout=0")
    options.autocommit = True
    run(admin, f"SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE backend_type = 'retrysafe worker' "
               f"AND datname = '{db.name}'")
    directory = own.directory / "leaks"
    from null_destination import OPTIONS
    run(options, f"SELECT outbox_register_kind('null', 'retrysafe_null', '{OPTIONS}')")
    run(options, f"SELECT outbox_create_destination('d', 'null', '{{\"file\": \"{directory}\"}}')")
    run(options, "SELECT outbox_emit(NULL, 'e1', 't', '1')")
    eventually(directory.exists)
    eventually(lambda: run(options, "SELECT sent_at IS NOT NULL FROM outbox_events") == [(True,)])
    options.close()
    run(admin, f"DROP DATABASE {db.name}")
    admin.close()
