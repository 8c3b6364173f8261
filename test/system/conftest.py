"""A real server for the system tests.

`server` is one throw-away cluster for the run; `db` is a fresh database with the extension for each test. Connections are
psycopg2 over libpq. What holds after every test is in closing.py.
"""
import contextlib
import itertools
import os
import pathlib
import select
import shutil
import signal
import subprocess
import tempfile
import time

import psycopg2
import psycopg2.extensions
import pytest

pytest.register_assert_rewrite("closing", "brokers.contract")
import closing  # noqa: E402
from preload import sanitizer_stays_here  # noqa: E402, F401 (a fixture)
from waiting import eventually  # noqa: E402, F401

TOP = pathlib.Path(__file__).resolve().parents[2]


class Server:
    """A cluster in a folder of its own, started by scripts/cluster."""

    started = set()
    _looked_at = 0  # so much of the log
    environment = {}  # what pg_ctl starts it with, besides the present one

    def __init__(self, directory, *settings):
        self.directory = pathlib.Path(directory)
        subprocess.run([TOP / "scripts/cluster", "start", str(self.directory), *settings], check=True)
        self._has_started()

    def _has_started(self):
        lines = (self.directory / "data/postmaster.pid").read_text().splitlines()
        self.pid, self.port = int(lines[0]), int(lines[3])
        self.started.add(self)

    def stop(self):
        """Ends the server and removes its folder."""
        try:
            self.end()
        finally:
            subprocess.run([TOP / "scripts/cluster", "stop", str(self.directory)], check=True)

    def end(self):
        """A fast stop: it shows crashes of processes that clean up at their end; an immediate one has none."""
        self.started.discard(self)
        if (self.directory / "data/postmaster.pid").exists():
            self.pg_ctl("stop", "-m", "fast")
        self._looked_at = 0  # what was found earlier may have been hidden by another error
        self.assert_no_crash()

    def assert_no_crash(self):
        """Looks at what the log has since the last time."""
        log = self.log()
        since, self._looked_at = self._looked_at, log.rfind("\n") + 1
        assert closing.crashes(log, killed, since) == []

    def pg_ctl(self, *arguments):
        """pg_ctl as the ordinary user, e.g. pg_ctl('restart', '-m', 'immediate')."""
        command = [self.bindir() / "pg_ctl", "-D", self.directory / "data", "-l", self.directory / "log", "-w", *arguments]
        if os.getuid() == 0:
            command = ["runuser", "-u", "postgres", "--", *command]
        subprocess.run([str(c) for c in command], check=True, stdout=subprocess.DEVNULL, env={**os.environ, **self.environment})
        if arguments[0] in ("start", "restart"):
            self._has_started()

    @staticmethod
    def bindir():
        config = os.environ.get("PG_CONFIG", "/usr/lib/postgresql/15/bin/pg_config")
        return pathlib.Path(subprocess.run([config, "--bindir"], check=True, capture_output=True, text=True).stdout.strip())

    def dsn(self, database="postgres", user="postgres"):
        return f"host={self.directory} port={self.port} dbname={database} user={user}"

    def connect(self, database="postgres", user="postgres", autocommit=True):
        connection = psycopg2.connect(self.dsn(database, user))
        connection.autocommit = autocommit
        return connection

    def log(self):
        return (self.directory / "log").read_text(errors="replace")

    def set(self, name, value):
        """ALTER SYSTEM SET + reload; value None resets. Processes that are started from then on have it, others have been
        told."""
        def loaded():
            connection = self.connect()  # knows what the postmaster does
            try:
                return run(connection, "SELECT pg_conf_load_time()")
            finally:
                connection.close()

        connection = self.connect()
        before = loaded()
        run(connection, f"ALTER SYSTEM RESET {name}" if value is None else f"ALTER SYSTEM SET {name} = '{value}'")
        run(connection, "SELECT pg_reload_conf()")
        connection.close()
        eventually(lambda: loaded() != before)


class Database:
    """One database of a server, with the extension in schema `retrysafe`, which is on the search path."""

    def __init__(self, server, name):
        self.server, self.name = server, name
        self._connections = []

    def connect(self, user="postgres", autocommit=True):
        connection = self.server.connect(self.name, user, autocommit)
        self._connections.append(connection)
        return connection

    def sql(self, query, *parameters):
        """Runs one statement in a session of its own; returns all rows, or None."""
        connection = self.server.connect(self.name)
        try:
            return run(connection, query, *parameters)
        finally:
            connection.close()

    def value(self, query, *parameters):
        return self.sql(query, *parameters)[0][0]

    def close(self):
        for connection in self._connections:
            if not connection.closed:
                connection.close()


def run(connection, query, *parameters):
    with connection.cursor() as cursor:
        cursor.execute(query, parameters or None)
        return cursor.fetchall() if cursor.description else None


class Pending:
    """A statement that was sent on an asynchronous connection and may block."""

    def __init__(self, database, *statements):
        self.connection = psycopg2.connect(database.server.dsn(database.name), async_=True)
        self._wait()
        for statement in statements[:-1]:
            self.cursor = self.connection.cursor()
            self.cursor.execute(statement)
            self._wait()
        self.cursor = self.connection.cursor()
        self.cursor.execute(statements[-1])

    def _wait(self, timeout=30):
        deadline = time.monotonic() + timeout
        while True:
            state = self.connection.poll()
            if state == psycopg2.extensions.POLL_OK:
                return True
            left = deadline - time.monotonic()
            if left <= 0:
                return False
            descriptor = [self.connection.fileno()]
            if state == psycopg2.extensions.POLL_READ:
                select.select(descriptor, [], [], left)
            else:
                select.select([], descriptor, [], left)

    def blocks(self):
        """True when there is no result within 500 ms."""
        return not self._wait(0.5)

    def result(self, timeout=10):
        assert self._wait(timeout), "the statement still blocks"
        return self.cursor.fetchall() if self.cursor.description else None

    def send(self, statement):
        """One more statement on the same connection."""
        self.cursor = self.connection.cursor()
        self.cursor.execute(statement)

    def run(self, statement, timeout=10):
        self.send(statement)
        return self.result(timeout)

    def close(self):
        self.connection.close()


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item):
    """A test that fails shows what its servers said last, and what their processes do: most of it cannot be had again."""
    report = (yield).get_result()
    if not report.failed:
        return
    for server in Server.started:
        with contextlib.suppress(psycopg2.Error, OSError):  # the test may have taken it away
            report.sections.append((f"log of the server at port {server.port}", server.log()[-5000:]))
            with contextlib.closing(psycopg2.connect(server.dsn(), connect_timeout=5)) as connection:
                processes = run(connection, """
                    SELECT backend_type, pid, datname, state, wait_event, backend_start, state_change, left(query, 200)
                      FROM pg_stat_activity WHERE pid <> pg_backend_pid() ORDER BY backend_start""")
            report.sections.append((f"processes of the server at port {server.port}", "\n".join(map(str, processes))))


def in_spite_of_crashes(action):
    """While the server goes down, perhaps before it has answered what it did, and up again."""
    try:
        return action()
    except psycopg2.Error:
        return False


def load_factor():
    """Tests that load a server for some time, the longer the better, take this part of it: scripts/check --quick says 0.5."""
    return float(os.environ.get("RETRYSAFE_LOAD", 1))


killed = set()


def kill(pid, signal_number=signal.SIGKILL):
    killed.add(pid)
    os.kill(pid, signal_number)


@pytest.fixture(autouse=True)
def no_crash():
    yield
    for running in list(Server.started):
        running.assert_no_crash()


def folder_of_servers():
    """Memory, where there is enough: creating a database makes some three hundred files, which takes a disk twenty times
    as long. Servers of tests do not sync, and what dies in a test are processes, so nothing is promised less."""
    memory = pathlib.Path("/dev/shm")
    if memory.is_dir() and os.access(memory, os.W_OK) and shutil.disk_usage(memory).free > 4 << 30:
        return memory
    return pathlib.Path("/tmp")


@contextlib.contextmanager
def cluster(*settings):
    """A server for one test or one file, which it may restart and crash."""
    directory = pathlib.Path(tempfile.mkdtemp(prefix="retrysafe-test-", dir=folder_of_servers()))
    directory.chmod(0o755)
    try:
        own = Server(directory / "cluster", *settings)
        try:
            yield own
        finally:
            own.stop()
    finally:
        shutil.rmtree(directory)


@pytest.fixture(scope="session")
def server():
    with cluster() as shared:
        yield shared


_numbers = itertools.count(1)


def make_database(server, name=None, options=""):
    """Without options it is a copy of one in which the extension was made and never used: that is cheaper."""
    name = name or f"t{next(_numbers)}"
    admin = server.connect()
    if not options and not run(admin, "SELECT 1 FROM pg_database WHERE datname = 'with_retrysafe'"):
        run(admin, "CREATE DATABASE with_retrysafe IS_TEMPLATE true")  # so no worker comes to it
        create_extension(server, "with_retrysafe")
    run(admin, f'CREATE DATABASE "{name}" {options or "TEMPLATE with_retrysafe"}')
    run(admin, f'ALTER DATABASE "{name}" SET search_path = retrysafe, public')
    admin.close()
    if options:
        create_extension(server, name)
    return Database(server, name)


def create_extension(server, database):
    session = server.connect(database)
    run(session, "CREATE SCHEMA retrysafe")
    run(session, "CREATE EXTENSION retrysafe SCHEMA retrysafe")
    session.close()


@contextlib.contextmanager
def database_on(server, options=""):
    """A database for one test, which may drop it itself."""
    database = make_database(server, options=options)
    yield database
    database.close()
    admin = server.connect()
    run(admin, f'DROP DATABASE IF EXISTS "{database.name}" WITH (FORCE)')
    admin.close()


@pytest.fixture
def db_options():
    """What the command that creates `db` ends in; a test may give another."""
    return ""


@pytest.fixture
def db(server, db_options):
    with database_on(server, db_options) as database:
        yield database


@pytest.fixture
def own_db(own):
    """The same on the server `own`, which a file has for itself to restart and crash it."""
    with database_on(own) as database:
        yield database


@pytest.fixture
def role(server, db):
    """Makes roles, with accesses; they and what they own are gone after the test."""
    made = []

    def make(*accesses, attributes=""):
        name = f"{db.name}_role{len(made)}"
        db.sql(f"CREATE ROLE {name} LOGIN {attributes}")
        made.append(name)
        for access in accesses:
            db.sql("SELECT retrysafe_grant(%s::regrole, %s)", name, access)
        return name

    yield make
    for name in reversed(made):
        db.sql(f"DROP OWNED BY {name} CASCADE")
    admin = server.connect()
    for name in reversed(made):
        run(admin, f"DROP OWNED BY {name}")
        run(admin, f"DROP ROLE {name}")
    admin.close()


@pytest.fixture
def secrets(server):
    """The folder that retrysafe.allowed_secret_directory names."""
    folder = pathlib.Path(tempfile.mkdtemp(prefix="retrysafe-secrets-", dir="/tmp"))
    os.chmod(folder, 0o755)
    server.set("retrysafe.allowed_secret_directory", folder / "allowed")
    (folder / "allowed").mkdir(mode=0o755)
    yield folder / "allowed"
    server.set("retrysafe.allowed_secret_directory", None)
    shutil.rmtree(folder)
