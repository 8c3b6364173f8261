"""ALTER EXTENSION UPDATE under load; a library and SQL objects of different versions, whichever came first."""
import contextlib
import json
import os
import pathlib
import shutil
import subprocess
import tempfile

import psycopg2
import pytest

from clients import Clients, assert_complete, assert_in_order, everything_is_sent, positions, published, repeat
from conftest import TOP, Database, Pending, cluster, eventually, make_database, run
from null_destination import worker_pids
from receiver import Receiver
from workers import let_look

FIRST = "0.1.0"
CURRENT = (TOP / "retrysafe.control").read_text().split("default_version = '")[1].split("'")[0]
# Until there is a second version one is made up here. Requests look at the tables in an order of their own, so a script that
# took its strong locks one by one would meet them in a deadlock. It takes all at once, or lets go of them; and in the order
# in which most requests and workers do, or it would have to let go nearly every time.
NEXT = CURRENT if CURRENT != FIRST else "0.1.1"
MADE_UP = """
DO $$
BEGIN
  PERFORM pg_catalog.set_config('lock_timeout', '100ms', true);
  LOOP
    BEGIN
      LOCK TABLE @extschema@.idem_records, @extschema@.outbox_destinations, @extschema@.outbox_batches, @extschema@.outbox_log;
      EXIT;
    EXCEPTION WHEN lock_not_available OR deadlock_detected THEN -- requests go on, and we try again
    END;
  END LOOP;
END
$$;
ALTER TABLE @extschema@.outbox_log ADD COLUMN note text;
ALTER TABLE @extschema@.idem_records ADD COLUMN note text;
ALTER TABLE @extschema@.outbox_batches ADD COLUMN note text;
ALTER TABLE @extschema@.outbox_destinations ADD COLUMN note text;
CREATE VIEW @extschema@.outbox_notes AS SELECT name, note FROM @extschema@.outbox_destinations;
CREATE FUNCTION @extschema@.outbox_news() RETURNS text LANGUAGE sql AS $$SELECT 'new'$$;
"""
# What a version may add that a library without it cannot have in any way: a function in C, and its source.
MADE_UP_IN_C = """
CREATE FUNCTION @extschema@.outbox_latest() RETURNS boolean LANGUAGE c AS 'MODULE_PATHNAME', 'retrysafe_outbox_latest';
"""
SOURCE = """
const int *pg_finfo_retrysafe_outbox_latest(void) { static const int version = 1; return &version; }
unsigned long retrysafe_outbox_latest(void *call) { return 1; }
"""


def script(version):
    """As it was released."""
    return TOP / f"test/system/versions/retrysafe--{version}.sql"


def ask(server, name):
    connection = server.connect()
    try:
        return run(connection, "SELECT current_setting(%s, true)", name)[0][0]
    finally:
        connection.close()


class Installation:
    """Files of the extension for one server alone, which it finds in the place of the others. The library differs from the
    one that is built by the version that it says, and that of the next version has a function more."""

    def __init__(self, server, folder):
        self.folder = folder
        libraries = pathlib.Path(ask(server, "dynamic_library_path").split(":")[0])
        shared, packaged = (subprocess.run([server.bindir() / "pg_config", f"--{name}"], check=True, capture_output=True,
                                           text=True).stdout.strip() for name in ("sharedir", "pkglibdir"))
        if ask(server, "extension_control_path"):
            built = pathlib.Path(ask(server, "extension_control_path").split(":")[0]) / "extension"
            self.scripts = folder / "share/extension"
            where = f"extension_control_path = '{folder}/share:$system'"
        else:
            built = pathlib.Path(f"{ask(server, 'extension_destdir')}{shared}/extension")
            self.scripts = pathlib.Path(f"{folder}{shared}/extension")
            where = f"extension_destdir = '{folder}'"
        own_libraries = pathlib.Path(f"{folder}{packaged}")
        shutil.copytree(libraries, own_libraries)
        shutil.copytree(built, self.scripts)
        shutil.copy(script(FIRST), self.scripts / f"retrysafe--{FIRST}.sql")
        if NEXT != CURRENT:
            (self.scripts / f"retrysafe--{FIRST}--{NEXT}.sql").write_text(MADE_UP)
        self.settings = [where, f"dynamic_library_path = '{own_libraries}:$libdir'"]
        self.library, self.control = own_libraries / "retrysafe.so", self.scripts / "retrysafe.control"
        self.built = self.library.read_bytes()
        assert self.built.count(b"\0%s\0" % CURRENT.encode()) >= 1
        self.library_is(FIRST)
        self.scripts_are(FIRST)

    def library_is(self, version):
        content = self.built.replace(b"\0%s\0" % CURRENT.encode(), b"\0%s\0" % version.encode())
        self._replace(self.library, content if version == FIRST else self._with_the_function(content))

    def _with_the_function(self, content):
        """A library that finds all else in the other one."""
        base, both = self.folder / "base.so", self.folder / "both.so"
        self._replace(base, content)
        subprocess.run([os.environ.get("CC", "cc"), "-shared", "-fPIC", "-o", both, "-xc", "-", "-xnone", "-Wl,--no-as-needed", base],
                       check=True, input=SOURCE.encode())
        return both.read_bytes()

    def next_has_a_function_in_c(self):
        (self.scripts / f"retrysafe--{FIRST}--{NEXT}.sql").write_text(MADE_UP + MADE_UP_IN_C)

    def scripts_are(self, version):
        text = self.control.read_text()
        before = text.split("default_version = '")[1].split("'")[0]
        self._replace(self.control, text.replace(f"'{before}'", f"'{version}'").encode())

    def _replace(self, file, content):
        """As installing does: processes that have loaded the file keep what they have."""
        fresh = file.with_suffix(".new")
        fresh.write_bytes(content)
        fresh.chmod(0o755)
        os.replace(fresh, file)


@pytest.fixture
def receiver():
    with Receiver() as r:
        yield r


@pytest.fixture
def own(server):
    with tempfile.TemporaryDirectory(prefix="retrysafe-test-") as folder:
        os.chmod(folder, 0o755)
        installation = Installation(server, pathlib.Path(folder) / "installation")
        with cluster("retrysafe.poll_interval = 200ms", *installation.settings) as own:
            own.installation = installation
            yield own


def shop(server, receiver):
    db = make_database(server, options="TEMPLATE template0")
    db.sql("SELECT outbox_create_destination('hook', 'http', %s)", json.dumps({"url": receiver.url}))
    return db


def version(db):
    return db.value("SELECT extversion FROM pg_extension WHERE extname = 'retrysafe'")


def publishing_stops(db, library):
    """It is said which version the library has, and the worker goes."""
    eventually(lambda: f"is not of version {library}, which the library has" in db.server.log())
    eventually(lambda: worker_pids(db) == [])


@contextlib.contextmanager
def nothing_arrives(receiver):
    before = len(receiver.requests)
    yield
    assert len(receiver.requests) == before


def finish(db, clients, receiver):
    """Publishing goes on within seconds, and nothing was lost on the way."""
    arrived = len(receiver.requests)
    eventually(lambda: len(receiver.requests) > arrived, timeout=10)
    clients.have(20)
    clients.__exit__()
    assert_complete(db, clients.answers, receiver)
    assert_in_order(receiver)
    published(receiver)
    assert {outcome for outcome, _ in repeat(db, clients.answers).values()} == {"replay"}


def test_a_released_script_stays():
    """Databases were made with it. What changes from then on comes with a new version, and with a script that updates."""
    released = script(CURRENT)
    assert not released.exists() or released.read_text() == (TOP / f"src/sql/retrysafe--{CURRENT}.sql").read_text()


@pytest.mark.slow
def test_the_library_first(own, receiver):
    """As the manual has it. Requests are answered all the time; what was emitted meanwhile goes out after the update."""
    db = shop(own, receiver)
    with Clients(db) as clients:
        clients.have(20)
        own.installation.library_is(NEXT)
        own.installation.scripts_are(NEXT)
        own.pg_ctl("restart", "-m", "fast")
        publishing_stops(db, library=NEXT)
        with nothing_arrives(receiver):
            clients.have(10)
            assert db.value("SELECT state FROM outbox_status") in ("unclaimed", "publishing")
        assert version(db) == FIRST
        db.sql("ALTER EXTENSION retrysafe UPDATE")
        assert version(db) == NEXT
        finish(db, clients, receiver)


@pytest.mark.slow
def test_the_extension_first(own, receiver):
    """The library that runs is older than the SQL objects: its workers stop, requests are answered, also with the columns
    that it does not know."""
    db = shop(own, receiver)
    with Clients(db) as clients:
        clients.have(20)
        own.installation.scripts_are(NEXT)
        db.sql("ALTER EXTENSION retrysafe UPDATE")
        assert version(db) == NEXT
        publishing_stops(db, library=FIRST)
        with nothing_arrives(receiver):
            clients.have(10)
        own.pg_ctl("restart", "-m", "fast")  # which changes nothing
        with nothing_arrives(receiver):
            clients.have(10)
        own.installation.library_is(NEXT)
        own.pg_ctl("restart", "-m", "fast")
        finish(db, clients, receiver)


@pytest.mark.slow
@pytest.mark.skipif(NEXT == CURRENT, reason="the next version is a real one")
def test_a_library_that_lacks_a_function(own, receiver):
    """The old one cannot be updated from: nothing has changed then. Where it comes back to SQL objects of the new version that
    function fails and says what is missing, the log says which version the library has, and all else is as ever."""
    db = shop(own, receiver)
    own.installation.next_has_a_function_in_c()
    own.installation.scripts_are(NEXT)
    with Clients(db) as clients:
        clients.have(10)
        with lacks_the_function():
            db.sql("ALTER EXTENSION retrysafe UPDATE")
        assert version(db) == FIRST
        arrived = len(receiver.requests)
        eventually(lambda: len(receiver.requests) > arrived)

        own.installation.library_is(NEXT)
        own.pg_ctl("restart", "-m", "fast")
        db.sql("ALTER EXTENSION retrysafe UPDATE")
        assert version(db) == NEXT and db.value("SELECT outbox_latest()")
        arrived = len(receiver.requests)
        eventually(lambda: len(receiver.requests) > arrived)

        own.installation.library_is(FIRST)
        own.pg_ctl("restart", "-m", "fast")
        publishing_stops(db, library=FIRST)
        with nothing_arrives(receiver):
            for _ in range(3):
                with lacks_the_function():
                    db.sql("SELECT outbox_latest()")
            clients.have(10)
            assert own.log().count(f"is not of version {FIRST}") == 1
        own.installation.library_is(NEXT)
        own.pg_ctl("restart", "-m", "fast")
        assert db.value("SELECT outbox_latest()")
        finish(db, clients, receiver)


@contextlib.contextmanager
def lacks_the_function():
    with pytest.raises(psycopg2.errors.UndefinedFunction) as caught:
        yield
    assert 'could not find function "retrysafe_outbox_latest" in file' in str(caught.value)


@pytest.mark.slow
def test_an_update_that_is_rolled_back(own, receiver):
    db = shop(own, receiver)
    own.installation.scripts_are(NEXT)
    with Clients(db) as clients:
        clients.have(10)
        for _ in range(3):
            session = db.connect(autocommit=False)
            run(session, "ALTER EXTENSION retrysafe UPDATE")
            session.rollback()
            clients.have(5)
        assert version(db) == FIRST
        finish(db, clients, receiver)


RESTORE = {"plain": ("psql", "-q", "-v", "ON_ERROR_STOP=1"), "custom": ("pg_restore", "--exit-on-error")}


def command_on(server, program, *arguments):
    return [server.bindir() / program, "-h", str(server.directory), "-p", str(server.port), "-U", "postgres", *arguments]


def restored_from(server, dump, format="plain"):
    admin = server.connect()
    run(admin, "CREATE DATABASE restored")
    run(admin, "ALTER DATABASE restored SET search_path = retrysafe, public")
    admin.close()
    subprocess.run(command_on(server, *RESTORE[format], "-d", "restored"), check=True, input=dump, stdout=subprocess.DEVNULL)
    return Database(server, "restored")


@pytest.mark.slow
@pytest.mark.parametrize("format", RESTORE)
@pytest.mark.parametrize("at", ["public.bulk", "retrysafe.idem_records_1"])
def test_a_dump_beside_an_update_under_load(own, receiver, at, format):
    """The extension is updated while pg_dump is in the middle: before it comes to our tables, or when it has one. Requests are
    answered all the time, and the dump is whole."""
    db = shop(own, receiver)
    db.sql("CREATE FUNCTION public.big(jsonb) RETURNS jsonb LANGUAGE sql AS 'SELECT to_jsonb(string_agg(md5(random()::text), $$ $$))"
           " FROM generate_series(1, 100)'")
    if at == "public.bulk":
        db.sql("CREATE TABLE public.bulk AS SELECT big(NULL) FROM generate_series(1, 500)")
    else:
        db.sql("SELECT idem_run('big' || i, '{}', 'public.big(jsonb)') FROM generate_series(1, 500) i")
    with Clients(db) as clients:
        clients.have(10)
        own.installation.scripts_are(NEXT)
        dump = subprocess.Popen(command_on(own, "pg_dump", f"--format={format}", db.name), stdout=subprocess.PIPE)
        eventually(lambda: db.sql("""SELECT 1 FROM pg_stat_activity WHERE application_name = 'pg_dump' AND wait_event = 'ClientWrite'
                                        AND query LIKE 'COPY ' || %s || ' %%'""", at))
        update = Pending(db, "ALTER EXTENSION retrysafe UPDATE")
        if at != "public.bulk":
            assert update.blocks()
        clients.have(5)
        content, _ = dump.communicate()
        assert dump.returncode == 0
        update.result(timeout=120)
        assert version(db) == NEXT
        publishing_stops(db, library=FIRST)
        own.installation.library_is(NEXT)
        own.pg_ctl("restart", "-m", "fast")
        finish(db, clients, receiver)
    restored = restored_from(own, content, format)
    orders = dict(restored.sql("SELECT key, id FROM public.orders"))
    assert version(restored) == NEXT and len(orders) >= 40
    with nothing_arrives(receiver):
        let_look(restored, "hook")
        assert restored.value("SELECT state FROM outbox_status") == "suspended"
        assert repeat(restored, orders) == {key: ("replay", order) for key, order in orders.items()}
    assert positions(restored).keys() == {f"{key}:placed" for key in orders}
    restored.sql("SELECT outbox_consent('same')")
    everything_is_sent(restored)


@pytest.mark.slow
def test_a_dump_of_the_old_version_restored_into_the_new_one(own, receiver):
    db = shop(own, receiver)
    with Clients(db) as clients:
        clients.have(20)
        db.sql("SELECT outbox_pause('hook')")
        clients.have(5)
    dump = subprocess.run(command_on(own, "pg_dump", db.name), check=True, capture_output=True).stdout
    own.installation.library_is(NEXT)
    own.installation.scripts_are(NEXT)
    own.pg_ctl("restart", "-m", "fast")
    restored = restored_from(own, dump)
    assert version(restored) == NEXT and version(db) == FIRST
    with nothing_arrives(receiver):
        let_look(restored, "hook")
        assert restored.value("SELECT state FROM outbox_status") == "suspended"
        assert {outcome for outcome, _ in repeat(restored, clients.answers).values()} == {"replay"}
    restored.sql("SELECT outbox_consent('same')")
    assert_complete(restored, clients.answers, receiver)
    assert_in_order(receiver)
