"""Code of others that wants to run with the rights of the extension's owner, of a superuser or of another role."""
import io
import json

import psycopg2
import pytest

from conftest import cluster, database_on, eventually, run
from copies import as_postgres
from hostile import refused
from test_security_access import RELATIONS


# -- roles that may write to every table --

def test_who_may_write_to_all_tables_becomes_no_superuser(db, role):
    """Members of pg_write_all_data may write to all tables, and what stands in these two makes workers run code."""
    db.sql("CREATE FUNCTION public.harmless(event jsonb) RETURNS void LANGUAGE sql AS 'SELECT'")
    db.sql("SELECT outbox_create_destination('d', 'function', '{\"function\": \"public.harmless\"}')")
    before = db.sql("TABLE outbox_destinations")
    mallory = role()
    db.sql(f"GRANT pg_write_all_data, pg_read_all_data TO {mallory}")
    session = db.connect(user=mallory)
    for statement in (
            "UPDATE retrysafe.outbox_destinations SET run_as = 'postgres', options = '{\"function\": \"evil.f(jsonb)\"}'",
            "INSERT INTO retrysafe.outbox_destinations OVERRIDING SYSTEM VALUE SELECT * FROM retrysafe.outbox_destinations",
            "INSERT INTO retrysafe.outbox_destinations (name, kind, options, shards, max_attempts, backoff, backoff_max,"
            " on_exhausted, batch_events, batch_bytes, lease, workers, run_as) VALUES ('e', 'function', '{}', 1, 1, '1s', '1s',"
            " 'block', 1, 1024, '1s', true, 'postgres') ON CONFLICT DO NOTHING",
            "DELETE FROM retrysafe.outbox_destinations",
            "MERGE INTO retrysafe.outbox_kinds USING (SELECT) AS s ON true WHEN NOT MATCHED THEN INSERT VALUES ('k', 'lib', '[]')",
            "INSERT INTO retrysafe.outbox_kinds VALUES ('k', 'pg_hook_me', '[]')",
            "ALTER TABLE retrysafe.outbox_kinds DISABLE TRIGGER ALL", "DROP TRIGGER only_the_owner_writes ON retrysafe.outbox_kinds",
            "TRUNCATE retrysafe.outbox_kinds"):
        refused(session, statement)
    with pytest.raises(psycopg2.errors.InsufficientPrivilege), session.cursor() as cursor:
        cursor.copy_expert("COPY retrysafe.outbox_kinds FROM STDIN", io.StringIO("k\tlib\t[]\n"))
    assert db.sql("TABLE outbox_destinations") == before and db.sql("TABLE outbox_kinds") == []
    # Nor with the right that pg_write_all_data lacks.
    db.sql(f"GRANT TRUNCATE ON retrysafe.outbox_destinations, retrysafe.outbox_kinds TO {mallory}")
    for table in ("outbox_destinations", "outbox_kinds"):
        refused(session, f"TRUNCATE retrysafe.{table}")
    assert db.sql("TABLE outbox_destinations") == before
    db.sql("SELECT outbox_alter_destination('d', max_attempts => 3)")
    admin = role("admin")
    run(db.connect(user=admin), "SELECT outbox_create_destination('p', 'pull'), outbox_pause('p'), outbox_drop_destination('p')")


@pytest.fixture(scope="module")
def logical():
    with cluster("wal_level = logical", "max_worker_processes = 16", "wal_retrieve_retry_interval = 100ms") as server:
        yield server


FORGED = """777, 'forged', 'function', '{"function": "evil.f(jsonb)"}', NULL, 1, 1, '1s', '1s', 'block', 1, 1024, '1s', true, false,
            NULL, 'postgres'"""


@pytest.mark.parametrize("write", (
    f"INSERT INTO outbox_destinations OVERRIDING SYSTEM VALUE VALUES ({FORGED})",
    "UPDATE outbox_destinations SET run_as = 'postgres', options = '{\"function\": \"evil.f(jsonb)\"}'",
    "DELETE FROM outbox_destinations", "TRUNCATE outbox_destinations",
    "INSERT INTO outbox_kinds VALUES ('k', 'pg_hook_me', '[]')"), ids=("insert", "update", "delete", "truncate", "kind"))
def test_nor_does_the_owner_of_a_subscription(logical, write):
    """A subscription writes with the rights of its owner, and what it applies fires few triggers. The publisher is anybody's,
    who names tables as ours are named."""
    with database_on(logical) as db, database_on(logical) as publisher:
        for database in (db, publisher):
            database.sql("CREATE FUNCTION public.harmless(event jsonb) RETURNS void LANGUAGE sql AS 'SELECT'")
            database.sql("SELECT outbox_create_destination('d', 'function', '{\"function\": \"public.harmless\"}')")
        before = db.sql("TABLE outbox_destinations")
        publisher.sql("CREATE PUBLICATION p FOR TABLE outbox_destinations, outbox_kinds")
        publisher.sql("SELECT pg_create_logical_replication_slot('forger', 'pgoutput')")
        # Its owner was a superuser once; from 16 on pg_create_subscription is enough.
        db.sql("CREATE ROLE forger LOGIN SUPERUSER")
        options = "run_as_owner = true, password_required = false, " if db.connect().server_version >= 160000 else ""
        run(db.connect(user="forger"), f"CREATE SUBSCRIPTION s CONNECTION '{logical.dsn(publisher.name)}' PUBLICATION p WITH"
                                       f" ({options}enabled = false, copy_data = false, create_slot = false,"
                                       " slot_name = forger, disable_on_error = true)")
        try:
            db.sql("ALTER ROLE forger NOSUPERUSER")
            db.sql("GRANT pg_write_all_data, pg_read_all_data TO forger")
            db.sql("GRANT TRUNCATE ON outbox_destinations, outbox_kinds TO forger")
            publisher.sql(write)
            said = len(logical.log())
            db.sql("ALTER SUBSCRIPTION s ENABLE")
            eventually(lambda: not db.value("SELECT subenabled FROM pg_subscription WHERE subname = 's'")
                       or (db.sql("TABLE outbox_destinations"), db.sql("TABLE outbox_kinds")) != (before, []))
            assert db.sql("TABLE outbox_destinations") == before and db.sql("TABLE outbox_kinds") == []
            assert "permission denied for table outbox_" in logical.log()[said:]
        finally:
            db.sql("DROP SUBSCRIPTION s")
            db.sql("DROP OWNED BY forger; DROP ROLE forger")


@pytest.mark.parametrize("options", ((), ("--disable-triggers",)), ids=("", "without triggers"))
def test_a_restore_is_the_owners(server, db, role, options):
    db.sql("SELECT outbox_create_destination('d', 'pull')")
    dump = as_postgres(server.bindir() / "pg_dump", "--data-only", *options, server.dsn(db.name))
    with database_on(server) as copy:
        as_postgres(server.bindir() / "psql", "-X", "-q", "-v", "ON_ERROR_STOP=1", server.dsn(copy.name), stdin=dump)
        assert copy.sql("TABLE outbox_destinations") == db.sql("TABLE outbox_destinations")
        db.sql(f"GRANT pg_write_all_data TO {(mallory := role())}")
        refused(copy.connect(user=mallory), "DELETE FROM retrysafe.outbox_destinations")


def test_who_may_write_to_all_tables_crashes_nothing(db, role):
    """Rows that we never write: an error of those who read them, and no more."""
    mallory = role("write", "consume")
    db.sql(f"GRANT pg_write_all_data, pg_read_all_data TO {mallory}")
    session = db.connect(user=mallory)
    db.sql("CREATE FUNCTION public.nothing(event jsonb) RETURNS void LANGUAGE sql AS 'SELECT'")
    db.sql("SELECT outbox_create_destination('well', 'function', '{\"function\": \"public.nothing\"}')")
    db.sql("SELECT outbox_create_destination('ill', 'function', '{\"function\": \"public.nothing\"}')")
    db.sql("SELECT outbox_create_destination('d', 'pull')")

    run(session, "BEGIN")
    run(session, "INSERT INTO retrysafe.ring_pieces SELECT ring, 0, now(), 0, NULL, NULL, NULL, false FROM retrysafe.ring_pieces")
    for call in ("outbox_emit(NULL, 'e', 't', '{}')", "outbox_fetch('d')", "idem_begin('k', 'h'::text)"):
        run(session, "SAVEPOINT s")
        assert "generation below 1" in str(refused(session, f"SELECT * FROM retrysafe.{call}", sqlstate="XX000")), call
        run(session, "ROLLBACK TO s")
    run(session, "ROLLBACK")

    # Windows each of which says that the one before it was left half read in another era.
    run(session, """
        INSERT INTO retrysafe.outbox_windows_1
          SELECT destination, shard, i, era, floor, snapshot, next, 1000000, taken_at, 0
            FROM retrysafe.outbox_windows, generate_series(1, 200000) AS i
           WHERE destination <> (SELECT destination FROM retrysafe.outbox_destinations WHERE name = 'well');
        INSERT INTO retrysafe.outbox_batches_1
          SELECT destination, shard, seq + 1, 200000, position, token, 0, 0, 0, 0, now() FROM retrysafe.outbox_batches
           WHERE destination <> (SELECT destination FROM retrysafe.outbox_destinations WHERE name = 'well')""")
    run(session, "SELECT retrysafe.outbox_emit(NULL, 'e', 't', '{}')")
    refused(session, "SELECT * FROM retrysafe.outbox_fetch('d')", sqlstate="54001")
    eventually(lambda: db.value("SELECT delivered FROM outbox_status WHERE name = 'well'") == 1)
    eventually(lambda: "stack depth" in (db.value("SELECT string_agg(last_error, '') FROM outbox_workers"
                                                  " WHERE database = current_database()") or ""))


# -- the schema of the extension, given away --

def test_what_others_put_into_our_schema_is_not_called_by_our_code(db, role):
    """As in a database where CREATE on the schema was given to everybody: overloads of our functions and of the server's,
    and tables with our names, are there before ours are called."""
    mallory, service = role(), role("write", "consume", "monitor", "admin")
    db.sql(f"GRANT ALL ON SCHEMA retrysafe TO {mallory}")
    session = db.connect(user=mallory)
    run(session, "CREATE FUNCTION retrysafe.trap() RETURNS void LANGUAGE plpgsql AS $$ BEGIN RAISE 'trapped'; END $$")
    signatures = db.sql("SELECT proname, pg_get_function_identity_arguments(p.oid), pronargs, proargtypes::regtype[]::text[]"
                        " FROM pg_proc p WHERE pronamespace = 'retrysafe'::regnamespace AND prokind = 'f' AND pronargs > 0"
                        " AND proowner <> %s::regrole", mallory)
    made = 0
    for name, _, count, types in signatures:
        # The same number of arguments with types that are near, and one with room for any.
        for variant in (["name" if t == "text" else "bigint" if t == "integer" else t for t in types], ["anyelement"] * count):
            try:
                run(session, f"CREATE FUNCTION retrysafe.{name}({', '.join(variant)}) RETURNS void LANGUAGE plpgsql AS $$"
                             " BEGIN RAISE 'trapped'; END $$")
                made += 1
            except psycopg2.Error as error:
                assert error.pgcode in ("42723", "42P13"), error
    assert made > 20
    for name in ("pg_class", "pg_depend", "pg_extension", "pg_proc", "pg_rewrite", "pg_locks", "generate_series"):
        run(session, f"CREATE TABLE retrysafe.{name} ()")
    refused(session, "CREATE OR REPLACE FUNCTION retrysafe.outbox_pause(name text) RETURNS void LANGUAGE sql AS 'SELECT'")
    refused(session, "CREATE OR REPLACE VIEW retrysafe.outbox_events AS SELECT 1 AS x")
    caller = db.connect(user=service)
    for call in ("retrysafe_grant({role}::regrole, 'write'::text)", "retrysafe_revoke({role}::regrole, 'write'::text)",
                 "idem_cleanup(1)", "outbox_cleanup(1)", "outbox_event_id('k'::text, ''::text)",
                 "outbox_cancel('k'::text, ''::text)"):
        run(caller, "SELECT * FROM retrysafe." + call.replace("{role}", f"'{mallory}'"))
    for _, name, kind in db.sql(RELATIONS):
        if kind == "v":
            run(caller, f"SELECT * FROM retrysafe.{name}")


def test_what_is_in_the_way_of_create_extension_stops_it(db, role):
    """An object of another role with the name of one of ours is never taken over."""
    mallory = role()
    db.sql("DROP EXTENSION retrysafe")
    db.sql(f"GRANT CREATE ON SCHEMA retrysafe TO {mallory}")
    session = db.connect(user=mallory)
    for statement, cleanup in (
            ("CREATE TABLE retrysafe.outbox_log (id bigint)", "TABLE retrysafe.outbox_log"),
            ("CREATE VIEW retrysafe.outbox_events AS SELECT 1 AS id", "VIEW retrysafe.outbox_events"),
            ("CREATE SEQUENCE retrysafe.outbox_log_id_seq", "SEQUENCE retrysafe.outbox_log_id_seq"),
            ("CREATE TABLE retrysafe.idem_records_1 ()", "TABLE retrysafe.idem_records_1"),
            ("CREATE FUNCTION retrysafe.outbox_pause(text) RETURNS void LANGUAGE sql AS 'SELECT'",
             "FUNCTION retrysafe.outbox_pause(text)"),
            ("CREATE TYPE retrysafe.outbox_kinds AS (x int)", "TYPE retrysafe.outbox_kinds")):
        run(session, statement)
        with pytest.raises(psycopg2.Error) as error:
            db.sql("CREATE EXTENSION retrysafe SCHEMA retrysafe")
        assert error.value.pgcode in ("42P07", "42723", "42710"), error.value
        db.sql(f"DROP {cleanup}")
    db.sql("CREATE EXTENSION retrysafe SCHEMA retrysafe")


def test_a_transaction_that_fails_in_our_code_gives_no_rights_back_wrongly(db, role):
    """Errors at every depth: whoever called is the same again, and not the owner."""
    session = db.connect(user=(name := role("write", "admin")))
    for call in ("outbox_emit(NULL, 'e', 't', NULL, NULL, '{\"a\": 1}')", "outbox_drop_destination(NULL)", "idem_complete('k')",
                 "outbox_create_destination('d', 'pull', '{}', 'tomorrow')", "retrysafe_grant(NULL, 'write')",
                 f"retrysafe_grant('{name}', 'all')", "outbox_alter_destination('d', shards => 2)", "outbox_retry('d')"):
        # Inside of a block that catches the error, a subtransaction ends; otherwise the transaction.
        run(session, f"DO $$ BEGIN PERFORM retrysafe.{call}; EXCEPTION WHEN OTHERS THEN"
                     f" IF current_user <> '{name}' OR session_user <> '{name}' THEN RAISE 'became %', current_user; END IF; END $$")
        with pytest.raises(psycopg2.Error):
            run(session, f"SELECT retrysafe.{call}")
        assert run(session, "SELECT current_user::text") == [(name,)]
    refused(session, "SELECT * FROM retrysafe.outbox_log")


# -- functions that workers run --

ATTACKS = {
    "SET ROLE": "SET ROLE postgres",
    "SET LOCAL ROLE": "SET LOCAL ROLE postgres",
    "RESET ROLE": "RESET ROLE",
    "set_config of role": "SELECT set_config('role', 'postgres', true)",
    "SET SESSION AUTHORIZATION": "SET SESSION AUTHORIZATION postgres",
    "RESET SESSION AUTHORIZATION": "RESET SESSION AUTHORIZATION",
    "set_config of session_authorization": "SELECT set_config('session_authorization', 'postgres', false)",
    "ALTER ROLE": "ALTER ROLE {role} SUPERUSER",
    "password of the session's user": "ALTER ROLE SESSION_USER PASSWORD 'x'",
    "GRANT": "GRANT postgres TO {role}",
    "GRANT of the session's user": "GRANT pg_execute_server_program TO {role} GRANTED BY SESSION_USER",
    "CREATE SCHEMA of the session's user": "CREATE SCHEMA theirs AUTHORIZATION SESSION_USER",
    "ALTER SYSTEM": "ALTER SYSTEM SET work_mem = '1GB'",
    "COPY TO PROGRAM": "COPY (SELECT 1) TO PROGRAM 'touch {file}'",
    "COPY FROM a file": "COPY evil.proof FROM '/etc/passwd'",
    "pg_read_file": "SELECT pg_read_file('/etc/passwd')",
    "lo_import": "SELECT lo_import('/etc/passwd')",
    "pg_authid": "SELECT rolpassword FROM pg_authid",
    "tables of the extension": "SELECT * FROM retrysafe.outbox_destinations",
    "tables of others": "SELECT * FROM public.vault",
    "row security off": "SET LOCAL row_security = off; INSERT INTO evil.proof SELECT content FROM public.files",
    "a temporary table": "CREATE TEMP TABLE outbox_log (x int)",
    "a cursor that stays": "DECLARE c CURSOR WITH HOLD FOR SELECT 1",
    "a deferred trigger": "SET CONSTRAINTS ALL DEFERRED; INSERT INTO evil.deferred VALUES (1)",
    "LISTEN": "LISTEN x",
    "a prepared statement": "PREPARE p AS SELECT 1",
    "LOAD": "LOAD 'pg_prewarm'",
    "superuser's settings": "SET LOCAL retrysafe.allowed_addresses = '0.0.0.0/0'",
    "session_replication_role": "SET LOCAL session_replication_role = replica",
    "event triggers": "CREATE EVENT TRIGGER e ON ddl_command_end EXECUTE FUNCTION evil.react()",
    "an untrusted language": "CREATE FUNCTION evil.c() RETURNS int LANGUAGE internal AS 'int4pl'",
    "terminate a session": "SELECT pg_terminate_backend(pg_backend_pid())",
    "COMMIT": "COMMIT",
    "two-phase": "PREPARE TRANSACTION 'x'",
    "outbox_wait": "CALL retrysafe.outbox_wait('{f}')",
    "another role's secrets": "SELECT * FROM retrysafe.outbox_relay_options('secret')",
    "another destination": "SELECT retrysafe.outbox_alter_destination('superuser', max_attempts => 1)",
    "run_as": "UPDATE retrysafe.outbox_destinations SET run_as = 'postgres'",
}


def test_a_function_of_another_role_gets_no_rights_of_the_worker(server, db, role, tmp_path):
    """It runs in a session of a superuser. Each attack is one event of its own."""
    mallory = role("admin")
    marker = tmp_path / "marker"
    db.sql("CREATE TABLE public.vault (x int)")
    db.sql("CREATE TABLE public.files (content text); INSERT INTO public.files VALUES ('theirs');"
           " ALTER TABLE public.files ENABLE ROW LEVEL SECURITY; GRANT SELECT ON public.files TO PUBLIC")
    db.sql("CREATE FUNCTION public.nothing(event jsonb) RETURNS void LANGUAGE sql AS 'SELECT'")
    db.sql("SELECT outbox_create_destination('superuser', 'function', '{\"function\": \"public.nothing\"}',"
           " event_types => '{none}')")
    db.sql("SELECT outbox_create_destination('secret', 'http', '{\"url\": \"https://example.com\", \"secret\": \"hunter2\"}',"
           " event_types => '{none}')")
    db.sql(f"CREATE SCHEMA evil AUTHORIZATION {mallory}")
    session = db.connect(user=mallory)
    run(session, """
        CREATE TABLE evil.proof (text text);
        CREATE TABLE evil.deferred (x int);
        CREATE FUNCTION evil.react() RETURNS trigger LANGUAGE plpgsql AS $$
          BEGIN INSERT INTO evil.proof VALUES ('trigger as ' || current_user); RETURN NULL; END $$;
        CREATE CONSTRAINT TRIGGER t AFTER INSERT ON evil.deferred DEFERRABLE INITIALLY DEFERRED FOR EACH ROW
          EXECUTE FUNCTION evil.react();
        CREATE FUNCTION evil.f(event jsonb) RETURNS void LANGUAGE plpgsql AS $$
          BEGIN EXECUTE event->'payload'->>'sql'; END $$""")
    run(session, "SELECT retrysafe.outbox_create_destination('f', 'function', '{\"function\": \"evil.f\"}', max_attempts => 1)")
    for name, attack in ATTACKS.items():
        sql = attack.replace("{role}", mallory).replace("{file}", str(marker))
        db.sql("SELECT outbox_emit(NULL, %s, 't', %s)", name, json.dumps({"sql": sql}))
    eventually(lambda: db.value("SELECT delivered + dead FROM outbox_status WHERE name = 'f'") == len(ATTACKS))
    failed = dict(db.sql("SELECT event_key, reason FROM outbox_dead_letters WHERE destination = 'f'"))
    # These do no harm where they do not fail: who is asked for is who it is.
    done = set(ATTACKS) - set(failed)
    assert done <= {"RESET ROLE"}, done
    assert not marker.exists() and db.sql("TABLE evil.proof") == []
    assert db.value("SELECT NOT rolsuper FROM pg_roles WHERE rolname = %s", mallory)
    # The worker is as it was, and works on.
    db.sql("SELECT outbox_emit(NULL, 'last', 't', '{\"sql\": \"INSERT INTO evil.proof VALUES (current_user)\"}')")
    eventually(lambda: db.sql("TABLE evil.proof") == [(mallory,)])


def test_a_destination_made_in_somebody_elses_function_is_its_owners(db, role):
    """SECURITY DEFINER and SET ROLE: run_as is the role whose rights are used, not the one that logged in."""
    alice, bob = role("admin"), role("admin")
    db.sql("CREATE FUNCTION public.nothing(event jsonb) RETURNS void LANGUAGE sql AS 'SELECT'")
    db.sql(f"CREATE SCHEMA alice AUTHORIZATION {alice}")
    run(db.connect(user=alice), """CREATE FUNCTION alice.make(name text) RETURNS void LANGUAGE sql SECURITY DEFINER AS $$
        SELECT retrysafe.outbox_create_destination(name, 'function', '{"function": "public.nothing"}') $$;
        GRANT USAGE ON SCHEMA alice TO PUBLIC""")
    run(db.connect(user=bob), "SELECT alice.make('by-function')")
    session = db.connect()
    run(session, f"SET ROLE {bob}")
    run(session, "SELECT outbox_create_destination('by-set-role', 'function', '{\"function\": \"public.nothing\"}')")
    assert dict(db.sql("SELECT name, run_as FROM outbox_status")) == {"by-function": alice, "by-set-role": bob}
    refused(session, "SELECT outbox_alter_destination('by-function', max_attempts => 1)")
    refused(db.connect(user=alice), "SELECT outbox_alter_destination('by-set-role', max_attempts => 1)")


def test_a_handler_runs_with_the_rights_of_its_caller(db, role):
    """idem_run calls a function that is named by its argument."""
    mallory, service = role("write"), role("write")
    db.sql(f"CREATE SCHEMA evil AUTHORIZATION {mallory}")
    run(db.connect(user=mallory), """
        CREATE FUNCTION evil.who(request jsonb) RETURNS jsonb LANGUAGE sql AS $$ SELECT to_jsonb(current_user::text) $$;
        CREATE FUNCTION evil.hidden(request jsonb) RETURNS jsonb LANGUAGE sql AS $$ SELECT to_jsonb(current_user::text) $$;
        REVOKE ALL ON FUNCTION evil.hidden FROM PUBLIC""")
    db.sql(f"GRANT USAGE ON SCHEMA evil TO {service}")
    session = db.connect(user=service)
    assert run(session, "SELECT idem_run('k1', '{}', 'evil.who(jsonb)')") == [(service,)]
    refused(session, "SELECT idem_run('k2', '{}', 'evil.hidden(jsonb)')")
    assert run(db.connect(), "SELECT idem_run('k3', '{}', 'evil.who(jsonb)')") == [("postgres",)]
