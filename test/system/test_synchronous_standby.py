"""retrysafe.publish_after = synchronous_standby: nothing leaves the primary that would be lost with it."""
import contextlib
import queue
import socket
import threading
import time

import psycopg2
import pytest

import closing
from conftest import Database, Pending, cluster, database_on, eventually, make_database, run
from copies import folder, folder_for_copies, standby_of  # noqa: F401 (fixture)
from null_destination import NullDestination, worker_pids


def connect(db):
    """A session whose commits wait for no standby."""
    connection = psycopg2.connect(db.server.dsn(db.name), options="-c synchronous_commit=local -c search_path=retrysafe,public")
    connection.autocommit = True
    return connection


def local(db, query, *parameters):
    connection = connect(db)
    try:
        return run(connection, query, *parameters)
    finally:
        connection.close()


def emit(db, *keys):
    for key in keys:
        local(db, "SELECT outbox_emit(NULL, %s, 't', '{}')", key)


class Pair:
    """A primary, and its synchronous standby, which comes and goes."""

    def __init__(self, primary, folder):
        self.primary = primary
        primary.set("retrysafe.publish_after", "synchronous_standby")
        self.standby = standby_of(primary, folder / "standby")
        primary.set("synchronous_standby_names", "standby")
        self._until_it_follows()

    def _until_it_follows(self):
        connection = self.primary.connect()
        eventually(lambda: run(connection, "SELECT sync_state FROM pg_stat_replication WHERE state = 'streaming'") == [("sync",)])
        connection.close()

    def leave(self):
        self.standby.pg_ctl("stop", "-m", "immediate")
        connection = self.primary.connect()
        eventually(lambda: run(connection, "SELECT count(*) FROM pg_stat_replication") == [(0,)])
        connection.close()

    def come_back(self):
        self.standby.pg_ctl("start")
        self._until_it_follows()

    def lag(self):
        """The standby is there, and has nothing new."""
        connection = self.standby.connect()
        run(connection, "ALTER SYSTEM SET primary_conninfo = ''")
        run(connection, "SELECT pg_reload_conf()")
        eventually(lambda: run(connection, "SELECT count(*) FROM pg_stat_wal_receiver") == [(0,)])
        connection.close()

    def promote(self, db):
        self.standby.pg_ctl("promote")
        copy = Database(self.standby, db.name)
        eventually(lambda: not copy.value("SELECT pg_is_in_recovery()"))
        return copy


@contextlib.contextmanager
def a_pair():
    with cluster("retrysafe.poll_interval = 200ms") as primary, folder_for_copies() as folder:
        pair = Pair(primary, folder)
        try:
            yield pair
        finally:
            pair.standby.stop()


@pytest.fixture
def pair():
    """One for a test that promotes the standby."""
    with a_pair() as own:
        yield own


@pytest.fixture
def db(pair):
    return make_database(pair.primary)


@pytest.fixture(scope="module")
def lasting():
    with a_pair() as shared:
        yield shared


@pytest.fixture
def both(lasting):
    return lasting


@pytest.fixture
def own_db(both):
    """On a pair that lasts: whatever a test did to it, the next one finds it whole."""
    with database_on(both.primary) as database:
        yield database
        both.primary.set("retrysafe.publish_after", "synchronous_standby")
        both.primary.set("synchronous_standby_names", "standby")
        if not (both.standby.directory / "data/postmaster.pid").exists():
            both.come_back()


class SlowLine:
    """Stands between standby and primary, and passes on what either says a while later."""

    def __init__(self, port, seconds):
        self.target, self.seconds = port, seconds
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.port = self.listener.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self):
        with contextlib.suppress(OSError):
            while True:
                here, _ = self.listener.accept()
                there = socket.create_connection(("127.0.0.1", self.target))
                for a, b in ((here, there), (there, here)):
                    waiting = queue.Queue()
                    threading.Thread(target=self._read, args=(a, waiting), daemon=True).start()
                    threading.Thread(target=self._write, args=(b, waiting), daemon=True).start()

    def _read(self, source, waiting):
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                waiting.put((time.monotonic() + self.seconds, data))
        waiting.put((0, b""))

    def _write(self, sink, waiting):
        with contextlib.suppress(OSError):
            while True:
                at, data = waiting.get()
                if not data:
                    return sink.shutdown(socket.SHUT_WR)
                time.sleep(max(0, at - time.monotonic()))
                sink.sendall(data)

    def close(self):
        self.listener.shutdown(socket.SHUT_RDWR)
        self.listener.close()


@contextlib.contextmanager
def far_away(pair, seconds):
    line = SlowLine(pair.primary.port, seconds)
    conninfo = f"host=127.0.0.1 port={line.port} user=postgres application_name=standby"
    with contextlib.closing(pair.standby.connect()) as admin:
        run(admin, "ALTER SYSTEM SET primary_conninfo = '%s'" % conninfo)
        run(admin, "SELECT pg_reload_conf()")
        eventually(lambda: run(admin, "SELECT conninfo LIKE %s FROM pg_stat_wal_receiver", f"%port={line.port}%") == [(True,)])
        try:
            yield
        finally:
            run(admin, "ALTER SYSTEM RESET primary_conninfo")
            run(admin, "SELECT pg_reload_conf()")
            eventually(lambda: run(admin, "SELECT conninfo LIKE %s FROM pg_stat_wal_receiver",
                                   f"%port={line.port}%") == [(False,)])
            line.close()


@contextlib.contextmanager
def emitting(db):
    """All the time, so that a standby at a distance never has everything."""
    stop, emitted = threading.Event(), []

    def work():
        connection = connect(db)
        while not stop.is_set():
            run(connection, "SELECT outbox_emit(NULL, %s, 't', '{}')", f"e{len(emitted)}")
            emitted.append(f"e{len(emitted)}")
        connection.close()
    thread = threading.Thread(target=work)
    thread.start()
    try:
        yield emitted
    finally:
        stop.set()
        thread.join()


def waits(db, name="d"):
    return db.value("SELECT state FROM outbox_status WHERE name = %s", name) == "awaiting standby"


def worker(db, what):
    return db.value(f"""SELECT {what} FROM pg_stat_activity
                         WHERE backend_type = 'retrysafe worker' AND datname = current_database()""")


def has_looked(db):
    """The worker has begun to look at what was committed before the call, and is through with it."""
    for _ in range(2):
        before = db.value("SELECT clock_timestamp()")
        local(db, "SELECT outbox_resume('d')")
        eventually(lambda: worker(db, "query_start") > before)


def test_events_wait_for_the_standby(both, own_db):
    d = NullDestination(own_db)
    emit(own_db, "a")
    eventually(lambda: d.delivered() == ["a"])
    both.leave()
    emit(own_db, "b", "c")
    eventually(lambda: waits(own_db))
    has_looked(own_db)
    assert d.delivered() == ["a"]
    assert worker(own_db, "query") == "waiting for the synchronous standby"
    assert worker(own_db, "state") == "idle" and worker(own_db, "xact_start") is None and worker(own_db, "backend_xmin") is None
    assert own_db.value("SELECT state FROM outbox_workers WHERE database = current_database()") == "awaiting standby"
    assert own_db.value("SELECT dead + parked_retry FROM outbox_status") == 0
    both.come_back()
    eventually(lambda: d.delivered() == ["a", "b", "c"])
    eventually(lambda: own_db.value("SELECT state FROM outbox_status") == "idle")
    emit(own_db, "d")
    eventually(lambda: d.delivered() == ["a", "b", "c", "d"])
    closing.balance(own_db, "d", d.ids(), committed=["a", "b", "c", "d"])


def test_an_event_that_breaks_its_destination_stops_no_other(both, own_db):
    """The window that it is in was kept until the standby had it; once it was published from, a wider one may be taken."""
    d = NullDestination(own_db, options='"breaks": "bad"', backoff="'100 ms'", backoff_max="'200 ms'")
    for good in "a", "b":
        emit(own_db, f"bad-{good}")
        eventually(lambda: d.status()["failures"] > 0)
        emit(own_db, good)
        eventually(lambda: good in d.delivered())


def test_a_worker_that_waits_renews_no_lease(both, own_db):
    d = NullDestination(own_db, lease="interval '300 ms'")
    emit(own_db, "before")
    eventually(lambda: d.delivered() == ["before"])  # so the worker has its lease
    both.leave()
    emit(own_db, "a")
    eventually(lambda: waits(own_db))
    has_looked(own_db)
    eventually(lambda: own_db.value("SELECT holders FROM outbox_status") is None)
    has_looked(own_db)
    assert own_db.value("SELECT holders FROM outbox_status") is None
    assert waits(own_db)


@pytest.mark.parametrize("publish_after", ["local_flush", "synchronous_standby"])
@pytest.mark.parametrize("way", ["local", "cancelled", "crash"])
def test_what_a_failover_loses_was_not_published(pair, db, publish_after, way):
    """Commits that others see and the standby does not have."""
    d = NullDestination(db)
    pair.primary.set("retrysafe.publish_after", publish_after)
    emit(db, "kept")
    eventually(lambda: d.delivered() == ["kept"])
    eventually(lambda: db.value("SELECT sent_at IS NOT NULL FROM outbox_events"))
    pair.lag()
    if way == "local":
        emit(db, "lost")
    else:
        commit = Pending(db, "SELECT outbox_emit(NULL, 'lost', 't', '{}')")
        eventually(lambda: db.value("SELECT count(*) FROM pg_stat_activity WHERE wait_event = 'SyncRep'") == 1)
        if way == "cancelled":
            db.sql("SELECT pg_cancel_backend(pid) FROM pg_stat_activity WHERE wait_event = 'SyncRep'")
            commit.result()
        else:
            commit.close()
            pair.primary.pg_ctl("restart", "-m", "immediate")
    eventually(lambda: db.value("SELECT count(*) FROM outbox_events") == 2)
    if publish_after == "local_flush":
        eventually(lambda: d.delivered() == ["kept", "lost"])
    else:
        eventually(lambda: worker_pids(db))
        eventually(lambda: waits(db))
        has_looked(db)
        assert d.delivered() == ["kept"]
    pair.primary.pg_ctl("stop", "-m", "immediate")
    copy = pair.promote(db)
    ids = {i for (i,) in copy.sql("SELECT event_id::text FROM outbox_events")}
    assert (set(d.ids()) <= ids) == (publish_after == "synchronous_standby")


def test_fast_shutdown_without_the_standby(both, own_db):
    """A session waits in its commit, a worker for the standby: both end, and the event comes when the standby is there."""
    d = NullDestination(own_db)
    both.leave()
    commit = Pending(own_db, "SELECT outbox_emit(NULL, 'in-commit', 't', '{}')")
    emit(own_db, "local")
    eventually(lambda: waits(own_db))
    eventually(lambda: own_db.value("SELECT count(*) FROM pg_stat_activity WHERE wait_event = 'SyncRep'") == 1)
    began = time.monotonic()
    both.primary.pg_ctl("stop", "-m", "fast")
    assert time.monotonic() - began < 10
    commit.close()
    both.primary.pg_ctl("start")
    eventually(lambda: worker_pids(own_db))
    eventually(lambda: waits(own_db))
    assert d.delivered() == []
    both.come_back()
    eventually(lambda: sorted(d.delivered()) == ["in-commit", "local"])


def test_where_no_standby_is_named_none_is_waited_for(both, own_db):
    d = NullDestination(own_db)
    both.leave()
    emit(own_db, "a")
    eventually(lambda: waits(own_db))
    both.primary.set("synchronous_standby_names", None)
    eventually(lambda: d.delivered() == ["a"])
    emit(own_db, "b")
    eventually(lambda: d.delivered() == ["a", "b"])


def test_as_many_standbys_as_are_asked_for(pair, db, folder):
    d = NullDestination(db)
    second = standby_of(pair.primary, folder / "second")
    try:
        pair.primary.set("synchronous_standby_names", "ANY 2 (*)")
        emit(db, "a")
        eventually(lambda: d.delivered() == ["a"])
        pair.lag()
        emit(db, "b")
        eventually(lambda: waits(db))
        has_looked(db)
        assert d.delivered() == ["a"]
        pair.primary.set("synchronous_standby_names", "ANY 1 (*)")
        eventually(lambda: d.delivered() == ["a", "b"])
    finally:
        second.stop()


def test_the_setting_is_taken_back_while_events_wait(both, own_db):
    d = NullDestination(own_db)
    both.leave()
    emit(own_db, "a")
    eventually(lambda: waits(own_db))
    both.primary.set("retrysafe.publish_after", None)
    eventually(lambda: d.delivered() == ["a"])


def fetch(connection):
    return run(connection, "SELECT batch, event_key FROM outbox_fetch('d')")


def test_who_fetches_waits_too(both, own_db):
    """outbox_fetch waits a moment, and then finds nothing; outbox_wait returns when it will find something."""
    local(own_db, "SELECT outbox_create_destination('d', 'pull')")
    client = connect(own_db)
    for key in ("a", "b", "c"):  # a standby that keeps up: no fetch is in vain
        emit(own_db, key)
        ((batch, got),) = fetch(client)
        assert got == key
        run(client, "SELECT outbox_ack(%s)", batch)
    both.leave()
    emit(own_db, "d")
    assert fetch(client) == []
    assert waits(own_db)
    run(client, "CALL outbox_wait('{d}', '0')")
    assert fetch(client) == []
    wait = Pending(own_db, "SET synchronous_commit = local", "CALL outbox_wait('{d}', '60 s')")
    wait.result()  # the first call of a session returns at once
    wait.cursor = wait.connection.cursor()
    wait.cursor.execute("CALL outbox_wait('{d}', '60 s')")
    returned = threading.Event()
    threading.Thread(target=lambda: (run(client, "CALL outbox_wait('{d}', '60 s')"), returned.set()), daemon=True).start()
    assert wait.blocks() and not returned.is_set()
    both.come_back()
    wait.result(timeout=20)
    assert returned.wait(20)
    wait.close()
    assert [key for _, key in fetch(client)] == ["d"]
    client.close()


def test_what_goes_with_the_rest_of_a_window_waits_too(both, own_db):
    """However often it is fetched: each time the window that was left is looked at first."""
    local(own_db, "SELECT outbox_create_destination('d', 'pull', backoff => '1 ms', backoff_max => '1 ms')")
    emit(own_db, "a")
    client = connect(own_db)
    eventually(lambda: run(client, """SELECT outbox_record(batch, jsonb_build_object(event_id, '{"status": "not tried"}'::jsonb),
                                                           'down', '0 s') FROM outbox_fetch('d')"""))
    both.leave()
    emit(own_db, "b")
    for _ in range(4):
        assert "b" not in [key for _, key in fetch(client)]
    both.come_back()
    eventually(lambda: [key for _, key in fetch(client)] == ["a", "b"])
    client.close()


def test_batches_of_a_window_that_another_session_opened(both, own_db):
    """It asks for itself: the primary may have been promoted since."""
    local(own_db, "SELECT outbox_create_destination('d', 'pull', batch_events => 1)")
    emit(own_db, "a", "b")
    first = connect(own_db)
    (batch, key), = run(first, "SELECT batch, event_key FROM outbox_fetch('d', 1)")
    assert key == "a"
    run(first, "SELECT outbox_ack(%s)", batch)
    run(first, "SELECT outbox_release(batch) FROM outbox_fetch('d', 1)")
    both.leave()
    emit(own_db, "c")
    # The first has seen that the standby has all of the window, the other cannot know.
    second = connect(own_db)
    assert run(second, "SELECT event_key FROM outbox_fetch('d', 1)") == []
    assert run(first, "SELECT event_key FROM outbox_fetch('d', 1)") == [("b",)]
    for connection in (first, second):
        connection.close()


def test_a_standby_that_is_always_a_little_behind(both, own_db):
    """What was found is what is waited for, not what has been committed since."""
    d = NullDestination(own_db)
    local(own_db, "SELECT outbox_create_destination('pull', 'pull')")
    client = connect(own_db)
    fetched = []
    with far_away(both, 0.2):
        with emitting(own_db) as emitted:
            eventually(lambda: len(d.delivered()) > 20)
            eventually(lambda: fetched.extend(run(client, "SELECT event_key FROM outbox_fetch('pull', 1)")) or fetched)
            more = len(emitted)
            eventually(lambda: f"e{more}" in d.delivered())
        eventually(lambda: len(d.delivered()) == len(emitted))
    assert fetched[0] == ("e0",)
    assert d.delivered() == emitted
    client.close()


def test_events_that_failed_before_do_not_wait(both, own_db):
    d = NullDestination(own_db, backoff="interval '100 ms'", backoff_max="interval '100 ms'", max_attempts=1000)
    d.tell("retry")
    emit(own_db, "failing")
    eventually(lambda: own_db.value("SELECT parked_retry FROM outbox_status") == 1)
    both.leave()
    emit(own_db, "new")
    eventually(lambda: own_db.value("SELECT state FROM outbox_workers WHERE database = current_database()") == "awaiting standby")
    d.tell("ok")
    eventually(lambda: d.delivered() == ["failing"])
    eventually(lambda: waits(own_db))
    both.come_back()
    eventually(lambda: d.delivered() == ["failing", "new"])
    closing.balance(own_db, "d", d.ids(), committed=["failing", "new"])


def test_a_function_in_the_database_waits_as_well(both, own_db):
    local(own_db, "CREATE TABLE public.calls (key text)")
    local(own_db, """CREATE FUNCTION public.note(event jsonb) RETURNS void LANGUAGE sql AS
                 $$INSERT INTO public.calls SELECT event ->> 'event_key'$$""")
    local(own_db, "SELECT outbox_create_destination('d', 'function', '{\"function\": \"public.note\"}')")
    emit(own_db, "a")
    eventually(lambda: own_db.value("SELECT count(*) FROM public.calls") == 1)
    both.leave()
    emit(own_db, "b")
    eventually(lambda: waits(own_db))
    has_looked(own_db)
    assert own_db.value("SELECT count(*) FROM public.calls") == 1
    both.come_back()
    eventually(lambda: own_db.value("SELECT count(*) FROM public.calls") == 2)


def test_consent_publishes_nothing_that_the_new_standby_lacks(pair, db):
    """A promoted standby names a standby that is not there yet."""
    d = NullDestination(db)
    local(db, "SELECT outbox_pause('d')")
    emit(db, "a")
    connection = pair.primary.connect()
    eventually(lambda: run(connection, "SELECT pg_current_wal_flush_lsn() <= flush_lsn FROM pg_stat_replication")[0][0])
    connection.close()
    pair.primary.pg_ctl("stop", "-m", "immediate")
    with open(pair.standby.directory / "data/postgresql.conf", "a") as conf:
        conf.write("synchronous_standby_names = 'next'\nretrysafe.publish_after = synchronous_standby\n"
                   "retrysafe.on_timeline_change = suspend\n")
    pair.standby.pg_ctl("restart", "-m", "fast")
    copy = pair.promote(db)
    local(copy, "SELECT outbox_resume('d')")
    local(copy, "SELECT outbox_consent('same')")
    eventually(lambda: waits(copy))
    has_looked(copy)
    assert d.delivered() == []
    with contextlib.closing(pair.standby.connect()) as admin:
        run(admin, "ALTER SYSTEM SET synchronous_standby_names = ''")
        run(admin, "SELECT pg_reload_conf()")
    eventually(lambda: d.delivered() == ["a"])
