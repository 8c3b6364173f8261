"""Crashes, dumps and copies in every state of the rings."""
import contextlib
import subprocess
import threading

import psycopg2
import pytest

from conftest import Database, Pending, eventually, run
from rings import (  # noqa: F401 (the fixture server)
    begin, copies, emit, fetch_all, fill, ring, rotate, save, seal, server, setting, settle, states, step,
    turn_until)


class Story:
    """Keys and events that a ring carries from state to state, and what has to hold after whatever happens to it."""

    def __init__(self, db):
        self.db, self.n = db, 0
        db.sql("SELECT outbox_create_destination('d', 'pull', shards => 2)")
        db.sql("SELECT outbox_create_destination('slow', 'pull', start_at => 'earliest')")
        self.events, self.keys = [], []
        self.delivered = {"d": [], "slow": []}

    def go_on(self, *to):
        """One more request with two events, which reach some destinations."""
        self.n += 1
        session = begin(self.db)
        run(session, "SET retrysafe.idem_retention = '1h'")
        assert save(session, f"key{self.n}", str(self.n)) == "new"
        session.close()
        fill(self.db, 2, f"n{self.n}-", f"o{self.n}")
        self.keys.append(f"key{self.n}")
        self.events += [f"n{self.n}-1", f"n{self.n}-2"]
        self.deliver(*to)

    def deliver(self, *to):
        got = [fetch_all(self.db, name) for name in to]
        for name, keys in zip(to, got):
            self.delivered[name] += keys
        return sum(got, [])

    def check(self, db=None, consent=None):
        db = db or self.db
        session = begin(db)
        for n, key in enumerate(self.keys, 1):
            assert run(session, "SELECT outcome, response FROM idem_begin(%s, 'h')", key) == [("replay", n)], key
        session.commit()
        if consent:
            db.sql("SELECT outbox_consent(%s)", consent)
        retired = [f"outbox_log_{piece}" for piece, state, _ in ring(db, "log") if state == "retired"]
        for key, position in db.sql("SELECT event_key, id FROM outbox_log WHERE tableoid::regclass::text <> ALL (%s)", retired):
            assert db.value("SELECT outbox_emit(NULL, %s, 't', '{}', %s)", key, "o" + key[1:].split("-")[0]) == position
        for name, before in self.delivered.items():
            assert sorted(before + fetch_all(db, name)) == sorted(self.events), name
        fill(db, 1, "fresh")
        assert fetch_all(db, "d") == fetch_all(db, "slow") == ["fresh1"]
        session.close()


# --- crashes ---


def test_a_crash_after_each_step(server, db):
    story = Story(db)
    story.go_on("d")
    for n in range(12):
        steps = step(db, "log") + step(db, "records")
        story.db.close()
        server.pg_ctl("restart", "-m", "immediate")
        if n % 3 == 0:
            story.go_on(*["d", "slow"][:n % 2])
        if steps == 0:
            story.deliver("d")
    story.check()
    turn_until(db, "log", lambda: fetch_all(db, "d") == fetch_all(db, "slow") == [] and copies(db, "n1-1") == 0)


def test_a_crash_inside_of_each_step(server, db):
    """Each step is killed before it commits, and taken again."""
    story = Story(db)
    story.go_on("d")
    killed = 0
    for n in range(14):
        for name, cleanup in (("log", "outbox_cleanup"), ("records", "idem_cleanup")):
            connection = server.connect(db.name)
            run(connection, "SET retrysafe.fault_points = 'ring.turned=kill'")
            starts = server.log().count("ready to accept connections")
            try:
                run(connection, f"SELECT retrysafe.{cleanup}()")
            except psycopg2.OperationalError:
                killed += 1
                eventually(lambda: server.log().count("ready to accept connections") > starts)
            connection.close()
            step(db, name)
        if n % 4 == 0:
            story.go_on(*["d", "slow"][:n % 3])
        story.deliver("d", "slow") if n > 8 else None
    assert killed >= 8
    story.check()


# --- dumps and clones ---


def progress_to(db, story, state):
    """A story whose oldest piece of the log stands there."""
    story.go_on("d")
    if state == "begun":
        return
    seal(db, "records")
    if state in ("filled", "sealed"):
        writer = begin(db)
        emit(writer, "rolled back")
        rotate(db, "log")
        story.go_on()
        writer.rollback()
        if state == "sealed":
            settle(db, "log")
        assert states(db, "log")[0] == state
        return
    rotate(db, "log")
    settle(db, "log")
    story.go_on("d", "slow")
    reader = begin(db)
    run(reader, "LOCK outbox_log_1 IN ACCESS SHARE MODE")
    turn_until(db, "log", lambda: story.deliver("d", "slow") == [] and states(db, "log")[0] == "retired")
    reader.rollback()
    if state == "emptied":
        settle(db, "log")
        assert states(db, "log")[0] != "retired"
    story.go_on("slow")


def restored_into(db, name, dump, restore):
    """`dump` and `restore` are command lines; the text of the first is given to the second, or a file between them."""
    server = db.server
    admin = server.connect()
    run(admin, f'CREATE DATABASE "{name}"')
    run(admin, f'ALTER DATABASE "{name}" SET search_path = retrysafe, public')
    admin.close()
    connect = ["-h", str(server.directory), "-p", str(server.port), "-U", "postgres"]
    where = server.directory / f"dump-{name}"
    subprocess.run([server.bindir() / dump[0], *connect, *dump[1:], "-f", where, db.name], check=True)
    subprocess.run([server.bindir() / restore[0], *connect, "-d", name, *restore[1:], *(["-f"] if restore[0] == "psql" else []),
                    where], check=True, stdout=subprocess.DEVNULL)
    return Database(server, name)


def drop(database):
    database.close()
    admin = database.server.connect()
    run(admin, f'DROP DATABASE "{database.name}" WITH (FORCE)')
    admin.close()


FORMATS = {"plain": (["pg_dump"], ["psql", "-q", "-v", "ON_ERROR_STOP=1"]),
           "custom": (["pg_dump", "-Fc"], ["pg_restore", "--exit-on-error"]),
           "directory": (["pg_dump", "-Fd", "-j2"], ["pg_restore", "-j2", "--exit-on-error"])}


@pytest.mark.parametrize("state, format", [("begun", "plain"), ("filled", "custom"), ("sealed", "directory"), ("retired", "custom"),
                                           ("emptied", "plain"), ("sealed", "plain")])
def test_a_dump_in_every_state(db, state, format):
    story = Story(db)
    progress_to(db, story, state)
    copy = restored_into(db, f"{db.name}_restored", *FORMATS[format])
    try:
        settle(copy)  # before anybody has consented
        assert copy.sql("SELECT key FROM idempotency_records ORDER BY 1") == db.sql("SELECT key FROM idempotency_records ORDER BY 1")
        story.check(copy, consent="same")
        settle(copy)
        fill(copy, 1, "again")
        assert fetch_all(copy, "d") == ["again1"]
        assert sorted(fetch_all(db, "d") + story.delivered["d"]) == sorted(story.events)  # the original is not concerned
    finally:
        drop(copy)


def test_a_dump_of_the_data_alone(db):
    story = Story(db)
    progress_to(db, story, "sealed")
    name = f"{db.name}_data"
    admin = db.server.connect()
    run(admin, f'CREATE DATABASE "{name}"')
    run(admin, f'ALTER DATABASE "{name}" SET search_path = retrysafe, public')
    admin.close()
    copy = Database(db.server, name)
    try:
        copy.sql("CREATE SCHEMA retrysafe")
        copy.sql("CREATE EXTENSION retrysafe SCHEMA retrysafe")
        connect = ["-h", str(db.server.directory), "-p", str(db.server.port), "-U", "postgres"]
        dump = subprocess.run([db.server.bindir() / "pg_dump", *connect, "--data-only", db.name], check=True, capture_output=True)
        subprocess.run([db.server.bindir() / "psql", *connect, "-q", "-v", "ON_ERROR_STOP=1", "-d", name], check=True,
                       input=dump.stdout, stdout=subprocess.DEVNULL)
        story.check(copy, consent="same")
    finally:
        drop(copy)


def test_a_clone(db):
    story = Story(db)
    progress_to(db, story, "sealed")
    db.close()
    admin = db.server.connect()
    run(admin, f'CREATE DATABASE "{db.name}_clone" TEMPLATE "{db.name}"')
    run(admin, f'ALTER DATABASE "{db.name}_clone" SET search_path = retrysafe, public')
    admin.close()
    copy = Database(db.server, f"{db.name}_clone")
    try:
        settle(copy)
        story.check(copy, consent="fork")
    finally:
        drop(copy)


@pytest.mark.parametrize("at", ["outbox_log_1", "idem_records_1"])
def test_a_dump_that_takes_its_time(server, db, at):
    """pg_dump stops in the middle, its output unread: requests go on, and the rings turn. It locks the tables of an extension
    one by one, when it comes to them: others may be emptied before it does. What it has of the log is whole then or gone with
    all its events delivered, and it knows where the destinations stand."""
    story = Story(db)
    for n in range(3):
        story.go_on("d")
    db.sql("CREATE FUNCTION public.big(jsonb) RETURNS jsonb LANGUAGE sql AS $$SELECT to_jsonb(repeat('x', 2000))$$")
    keeper = db.connect()
    run(keeper, "SET retrysafe.idem_retention = '1h'")
    for i in range(300 if at == "idem_records_1" else 1):
        run(keeper, "SELECT idem_run(%s, '{}', 'public.big(jsonb)')", f"big{i}")
    db.sql("SELECT outbox_emit(NULL, 'big' || i, 'big', to_jsonb(repeat('x', 1000)), 'o') FROM generate_series(1, 1000) i")
    before = story.events + [f"big{i}" for i in range(1, 1001)]
    connect = ["-h", str(server.directory), "-p", str(server.port), "-U", "postgres"]
    dump = subprocess.Popen([server.bindir() / "pg_dump", *connect, db.name], stdout=subprocess.PIPE)
    eventually(lambda: db.sql("""SELECT 1 FROM pg_stat_activity WHERE application_name = 'pg_dump' AND wait_event = 'ClientWrite'
                                    AND query LIKE 'COPY retrysafe.' || %s || ' %%'""", at))
    for n in range(12):
        writer = Pending(db, f"SELECT outbox_emit(NULL, 'during{n}', 't', '{{}}')")
        assert not writer.blocks()
        writer.close()
        fetch_all(db, "d"), fetch_all(db, "slow")
        settle(db)
    kept = at == "outbox_log_1"
    if kept:
        assert ring(db, "log")[0] == (1, "retired", ["readers"])
    else:
        assert copies(db, "e1") == 0
    text, _ = dump.communicate()
    assert dump.returncode == 0
    turn_until(db, "log", lambda: fetch_all(db, "d") == fetch_all(db, "slow") == [] and copies(db, "big1") == 0)
    name = f"{db.name}_slow"
    admin = server.connect()
    run(admin, f'CREATE DATABASE "{name}"')
    run(admin, f'ALTER DATABASE "{name}" SET search_path = retrysafe, public')
    subprocess.run([server.bindir() / "psql", *connect, "-q", "-v", "ON_ERROR_STOP=1", "-d", name], check=True, input=text,
                   stdout=subprocess.DEVNULL)
    copy = Database(server, name)
    try:
        copy.sql("SELECT outbox_consent('same')")
        assert sorted(story.delivered["d"] + fetch_all(copy, "d")) == sorted(before if kept else story.delivered["d"])
        assert sorted(fetch_all(copy, "slow")) == sorted(before if kept else [])
        fill(copy, 1, "fresh")
        assert fetch_all(copy, "d") == fetch_all(copy, "slow") == ["fresh1"]
    finally:
        drop(copy)


# --- while it is restored ---


def test_a_restore_beside_a_busy_worker(server, db):
    """A worker comes to the new database as soon as the extension is there, and meets half of the tables."""
    story = Story(db)
    for n in range(3):
        story.go_on("d")
        seal(db, "records") if len(ring(db, "records")) < 3 else None
    story.go_on("slow")
    rotate(db, "log")
    connection = db.connect()
    with setting(server, "retrysafe.workers_per_database", "1", connection):
        copy = None
        name = f"{db.name}_live"
        dump, restore = FORMATS["plain"]
        stop = threading.Event()

        def turn():  # as a worker does, all the time
            while not stop.is_set():
                with contextlib.suppress(psycopg2.Error):
                    with contextlib.closing(server.connect(name)) as c:
                        while not stop.is_set():
                            run(c, "SELECT retrysafe.idem_cleanup()")
                            run(c, "SELECT retrysafe.outbox_cleanup()")
        thread = threading.Thread(target=turn)
        thread.start()
        try:
            copy = restored_into(db, name, dump, restore)
            stop.set()
            thread.join()
            story.check(copy, consent="same")
        finally:
            stop.set()
            thread.join()
            if copy:
                drop(copy)


def test_a_worker_does_not_turn_a_ring_that_is_just_being_restored(db):
    """The tables of a dump arrive one by one, ring_pieces last."""
    session = begin(db)
    save(session, "k")
    rows = db.sql("SELECT ring, generation, since, since_position FROM ring_pieces")
    assert [(name, generation) for name, generation, _, _ in rows] == [("records", 1)]
    db.sql("DELETE FROM ring_pieces")  # as it is before its turn has come
    settle(db)
    db.sql("INSERT INTO ring_pieces (ring, generation, since, since_position) VALUES (%s, %s, %s, %s)", *rows[0])
    assert states(db, "records") == ["active"]
