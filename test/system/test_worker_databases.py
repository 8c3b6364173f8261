"""Workers and whole databases: they stand in the way of no DROP, no rename and no clone, and the extension comes and goes."""
import contextlib
import json
import time

import psycopg2
import pytest

import closing
from conftest import TOP, Database, Pending, cluster, database_on, eventually, make_database, run
from hostile import Hostile
from null_destination import DELIVERED, NullDestination, emit, worker_pids
from receiver import Hang, Receiver
from test_security_far_sides import connected, login, options, tuned
from workers import (  # noqa: F401 (the fixture own)
    counted_starts, let_look, own, said, slow_destination, time_to_come_back, worker_starts)


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


KINDS = sorted({module.parent.name for module in (TOP / "src/sinks").glob("*/module.cpp")} - {"null"})
# The kind of a destination, and how far its server goes along before it says no more.
SILENT = {kind: (kind, lambda line: None) for kind in KINDS} | {
    "nats, connected": ("nats", connected),
    "postgres, logged in": ("postgres", login),
    "rabbitmq, logged in": ("rabbitmq", tuned),
    "redis, greeted": ("redis", lambda line: line.read_until(b"PING\r\n") and line.send(b"+PONG\r\n")),
}


@contextlib.contextmanager
def hanging_destination(db, which):
    """One for events of type t that gets no answer, or whose function does not return. Yields whether the worker of a
    database is at it."""
    silent = []

    def talk(line):
        greet(line)
        silent.append(line)
        line.read_until(b"never")

    if which == "function":
        db.sql("CREATE FUNCTION public.sleep(event jsonb) RETURNS void LANGUAGE sql AS 'SELECT pg_sleep(600)'")
        db.sql("""SELECT outbox_create_destination('hanging', 'function', event_types => '{t}', options =>
                                                   '{"function": "public.sleep", "statement_timeout": "60s"}')""")
        yield lambda at: at.sql("""SELECT 1 FROM pg_stat_activity WHERE wait_event = 'PgSleep'
                                      AND backend_type = 'retrysafe worker' AND datname = current_database()""")
    else:
        kind, greet = SILENT[which]
        with contextlib.closing(Hostile(talk)) as far:
            db.sql("SELECT outbox_create_destination('hanging', %s, %s, event_types => '{t}')", kind,
                   json.dumps(options(kind, far.port) | {"connect_timeout": "1min"}))
            yield lambda at: (len(silent) > far.ended
                              and at.value("SELECT state FROM outbox_status WHERE name = 'hanging'") == "publishing")


@pytest.mark.alone
@pytest.mark.parametrize("which", [*SILENT, "function"])
def test_any_other_database_is_dropped_beside_a_worker(own_db, which):
    """The server waits until every process has taken note, also one that is in the middle of something: here of waiting for
    a far side, in the client library of its kind, or in a function."""
    with hanging_destination(own_db, which) as is_at_it:
        admin = own_db.server.connect()
        run(admin, "CREATE DATABASE another")
        emit(own_db, "e1")
        eventually(lambda: is_at_it(own_db))
        began = time.monotonic()
        run(admin, "DROP DATABASE another")
        assert time.monotonic() - began < 5
        assert is_at_it(own_db)
        admin.close()


@pytest.mark.alone
@pytest.mark.parametrize("which", [None, pytest.param("http", marks=pytest.mark.slow), "function"])
def test_rename_and_template_work_beside_a_worker(own_db, which):
    """The same under its new name: it comes back there, and is at it again when the next command is run."""
    d = NullDestination(own_db)
    with hanging_destination(own_db, which) if which else contextlib.nullcontext(worker_pids) as is_at_it:
        emit(own_db, "e1")
        admin = own_db.server.connect()
        name, other = own_db.name, f"{own_db.name}x"
        for command, at in ((f"ALTER DATABASE {name} RENAME TO {other}", own_db),
                            (f"ALTER DATABASE {other} RENAME TO {name}", Database(own_db.server, other)),
                            (f"CREATE DATABASE {name}copy TEMPLATE {name}", own_db),
                            (f"DROP DATABASE {name}copy", own_db)):
            eventually(lambda: d.delivered() == ["e1"] and is_at_it(at))
            began = time.monotonic()
            run(admin, command)
            assert time.monotonic() - began < (10 if which else 5), command
        admin.close()
        own_db.sql("SELECT outbox_emit(NULL, 'e2', 'another', '1')")
        own_db.sql("SELECT pg_cancel_backend(%s)", worker_pids(own_db)[0])  # nobody has a turn while a function is called
        eventually(lambda: d.delivered() == ["e1", "e2"])


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


@pytest.mark.parametrize("meanwhile", ["sending", "reload", "restart"])
def test_a_worker_waits_for_an_index_that_is_gone(own_db, meanwhile):
    """It says what is missing, writes nothing, and publishes when the index is there again. What it was sending then is
    recorded; shards that it was to look at anew, and could not even give back, are worked again."""
    db, server = own_db, own_db.server
    d = NullDestination(db, options='"delay_ms": 2000')
    definition = db.value("SELECT pg_get_indexdef('outbox_parked_due'::regclass)")
    emit(db, "e1")
    eventually(lambda: d.status()["state"] == ("idle" if meanwhile == "reload" else "publishing"))
    before, log_before = worker_pids(db), len(server.log())

    def told():
        return "\n".join(m for m in said(server.log()[log_before:]) if m.startswith("retrysafe:"))

    db.sql("DROP INDEX outbox_parked_due")
    with pytest.raises(psycopg2.Error) as caught:
        emit(db, "refused")
    assert caught.value.pgcode == "RS301" and "outbox_parked_due" in caught.value.diag.message_primary
    if meanwhile == "reload":
        server.set("retrysafe.worker_shutdown_timeout", "20s")
        server.set("retrysafe.worker_shutdown_timeout", None)
    eventually(lambda: d.delivered() == ["e1"])
    if meanwhile == "restart":
        server.pg_ctl("restart", "-m", "fast")
    with time_to_come_back(server):
        eventually(lambda: "outbox_parked_due" in told())
    db.sql(definition)
    emit(db, "e2")
    eventually(lambda: d.delivered()[-1:] == ["e2"] and d.status()["backlog"] == 0, timeout=40)
    if meanwhile != "restart":
        assert worker_pids(db) == before and d.delivered() == ["e1", "e2"]
    assert told().count("outbox_parked_due") == (2 if meanwhile == "restart" else 1) and "of version" not in told()


@pytest.mark.parametrize("restart", [False, True])
def test_the_extension_comes_with_commit_prepared(own, restart):
    """In a session that knows nothing of it, perhaps after a restart."""
    admin = own.connect()
    with counted_starts(own) as starts, time_to_come_back(own):
        before = starts()
        run(admin, "CREATE DATABASE late")
        eventually(lambda: starts() > before)  # it is looked at
    session = own.connect("late", autocommit=False)
    run(session, "CREATE SCHEMA retrysafe")
    run(session, "CREATE EXTENSION retrysafe SCHEMA retrysafe")
    run(session, "PREPARE TRANSACTION 'extension'")
    session.close()
    late = Database(own, "late")
    if restart:
        admin.close()
        with counted_starts(own) as starts:
            own.pg_ctl("restart", "-m", "immediate")
            eventually(lambda: starts() > 0)
        admin = own.connect()
    with time_to_come_back(own):
        assert worker_pids(late) == []
    late.sql("COMMIT PREPARED 'extension'")
    eventually(lambda: worker_pids(late))
    run(admin, "DROP DATABASE late")
    admin.close()


def test_commit_prepared_waits_for_nothing_that_it_holds_itself(own_db):
    """Only this commit gives the lock back: the deadlock detector sees nobody who could."""
    session = own_db.connect(autocommit=False)
    run(session, "LOCK TABLE pg_catalog.pg_extension")
    run(session, "PREPARE TRANSACTION 'catalogue'")
    commit = Pending(own_db, "COMMIT PREPARED 'catalogue'")
    try:
        assert not commit.blocks()
    finally:
        commit.close()


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
        running = "SELECT coalesce(datname, 'none yet') FROM pg_stat_activity WHERE backend_type = 'retrysafe worker'"
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


def test_a_database_behind_many_others_has_its_worker(own):
    """More than the launcher has room for at first."""
    admin = own.connect()
    others = [f"other{number}" for number in range(64)]
    for name in others:
        run(admin, f"CREATE DATABASE {name} ALLOW_CONNECTIONS false")
    with database_on(own) as db:
        eventually(lambda: worker_pids(db))
    for name in others:
        run(admin, f"DROP DATABASE {name}")
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
