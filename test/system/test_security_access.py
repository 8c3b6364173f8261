"""Who may do what: every function, view, table and sequence of the extension against every access, as the catalogue lists
them. Something new that is not in the table below fails."""
import json

import psycopg2
import pytest

from conftest import database_on, eventually, run
from copies import as_postgres
from receiver import Receiver

ACCESSES = ("write", "consume", "relay", "monitor", "admin")

# Executed or read by the roles with one of these accesses, and by nobody else.
ALLOWED = {
    # a service
    "idem_begin": "write admin",
    "idem_try_begin": "write admin",
    "idem_complete": "write admin",
    "idem_run": "write admin",
    "idem_hash": "write admin",
    "idem_peek": "write admin",
    "inbox_accept": "write admin",
    "outbox_emit": "write admin",
    "outbox_cancel": "write admin",
    "outbox_event_id": "write monitor admin",
    # publishers outside of the server
    "outbox_fetch": "consume relay admin",
    "outbox_ack": "consume relay admin",
    "outbox_nack": "consume relay admin",
    "outbox_renew": "consume relay admin",
    "outbox_release": "consume relay admin",
    "outbox_record": "consume relay admin",
    "outbox_wait": "consume relay admin",
    "outbox_relay_destination": "consume relay admin",
    "outbox_relay_options": "relay",
    # operators
    "idem_forget": "admin",
    "idem_cleanup": "admin",
    "outbox_create_destination": "admin",
    "outbox_alter_destination": "admin",
    "outbox_drop_destination": "admin",
    "outbox_pause": "admin",
    "outbox_resume": "admin",
    "outbox_register_kind": "admin",  # and a superuser; so is the next
    "outbox_unregister_kind": "admin",
    "outbox_retry": "admin",
    "outbox_discard": "admin",
    "outbox_consent": "admin",
    "outbox_cleanup": "admin",
    "outbox_run_worker": "admin",
    "retrysafe_grant": "admin",
    "retrysafe_revoke": "admin",
    # what these are made of
    "retrysafe_apply_grant": "",
    "retrysafe_apply_revoke": "",
    "outbox_only_the_owner_writes": "",
    "retrysafe_objects_of": "admin",
    "retrysafe_check_access": "admin",
    "retrysafe_holds": "admin",
    # what is shown
    "idempotency_records": "monitor admin",
    "idem_status": "monitor admin",
    "outbox_events": "monitor admin",
    "outbox_scheduled_events": "monitor admin",
    "outbox_dead_letters": "monitor admin",
    "outbox_status": "monitor admin",
    "outbox_kind_options": "monitor admin",
    "outbox_workers": "monitor admin",
    "ring_status": "monitor admin",
    # what views call
    "outbox_redacted_options": "monitor admin",
    "outbox_built_in_kinds": "monitor admin",
    "outbox_options_of_kind": "consume relay monitor admin",
    "outbox_recorded_at": "monitor admin",
    "outbox_passed_position": "monitor admin",
    "outbox_list_workers": "monitor admin",
    "outbox_suspended_reason": "monitor admin",
    "outbox_awaits_standby": "monitor admin",
    # what is stored
    "idem_records": "",
    "idem_records_1": "",
    "idem_records_2": "",
    "idem_records_3": "",
    "idem_records_with_ttl": "",
    "inbox_messages": "",
    "outbox_batches": "",
    "outbox_batches_1": "",
    "outbox_batches_2": "",
    "outbox_batches_3": "",
    "outbox_destinations": "",
    "outbox_destinations_destination_seq": "",
    "outbox_eras": "",
    "outbox_kinds": "",
    "outbox_log": "",
    "outbox_log_1": "",
    "outbox_log_2": "",
    "outbox_log_3": "",
    "outbox_log_id_seq": "",
    "outbox_parked": "",
    "outbox_scheduled": "",
    "outbox_shards": "",
    "outbox_windows": "",
    "outbox_windows_1": "",
    "outbox_windows_2": "",
    "outbox_windows_3": "",
    "ring_pieces": "",
}

MEMBERS = """
  SELECT d.classid, d.objid FROM pg_depend d JOIN pg_extension e ON e.oid = d.refobjid
   WHERE e.extname = 'retrysafe' AND d.refclassid = 'pg_extension'::regclass AND d.deptype = 'e'"""

FUNCTIONS = f"""
  SELECT p.oid, p.proname, p.prokind, p.oid::regprocedure::text, p.proargtypes::regtype[]::text[], p.proisstrict
    FROM ({MEMBERS}) m JOIN pg_proc p ON m.classid = 'pg_proc'::regclass AND p.oid = m.objid ORDER BY 4"""

RELATIONS = f"""
  SELECT c.oid, c.relname, c.relkind FROM ({MEMBERS}) m JOIN pg_class c ON m.classid = 'pg_class'::regclass AND c.oid = m.objid
   ORDER BY 2"""

TRIGGERS = {"outbox_only_the_owner_writes"}  # cannot be called at all

SOMETHING = {"text": "'x'", "jsonb": "'{}'", "integer": "1", "timestamp with time zone": "'now'"}

# Of all that the server knows for such a relation, what the role holds; and whether it may hand it on.
PRIVILEGES = """
  SELECT p.privilege_type || suffix
    FROM pg_class c, aclexplode(acldefault(CASE c.relkind WHEN 'S' THEN 's'::"char" ELSE 'r' END, c.relowner)) AS p,
         (VALUES (''), (' WITH GRANT OPTION')) AS v (suffix)
   WHERE c.oid = %s AND CASE c.relkind WHEN 'S' THEN has_sequence_privilege(%s, c.oid, p.privilege_type || suffix)
                                       ELSE has_table_privilege(%s, c.oid, p.privilege_type || suffix) END"""


@pytest.fixture
def roles(db):
    """A role for each access, and one with none."""
    made = {access: f"{db.name}_{access}" for access in (*ACCESSES, "none")}
    for access, name in made.items():
        db.sql(f"CREATE ROLE {name} LOGIN")
        if access != "none":
            db.sql("SELECT retrysafe_grant(%s::regrole, %s)", name, access)
    yield made
    for name in made.values():
        db.sql(f"DROP OWNED BY {name}")
        db.sql(f"DROP ROLE {name}")


def refusal(session, query):
    """Of the server, for want of a right on the object itself; None when there was none."""
    try:
        run(session, query)
    except psycopg2.Error as error:
        if error.pgcode == "42501" and error.diag.message_primary.startswith(("permission denied", "must be owner of")):
            return error.diag.message_primary
    return None


def test_the_table_above_has_everything(db):
    members = {name for _, name, *_ in db.sql(FUNCTIONS)} | {name for _, name, _ in db.sql(RELATIONS)}
    assert members == set(ALLOWED)
    # Nothing else belongs to the extension: no type, cast, operator or trigger that would need a look of its own. From 17 on
    # relations bring along their row types, and arrays of these.
    assert db.sql(f"""
        SELECT DISTINCT m.classid::regclass::text FROM ({MEMBERS}) m
          LEFT JOIN pg_type t ON m.classid = 'pg_type'::regclass AND t.oid = m.objid LEFT JOIN pg_type e ON e.typarray = t.oid
          LEFT JOIN pg_class r ON r.oid = coalesce(e.typrelid, t.typrelid) AND r.relkind <> 'c'
         WHERE r.oid IS NULL ORDER BY 1""") == [("pg_class",), ("pg_proc",)]


def test_rights_in_the_catalogue(db, roles):
    for access, role in roles.items():
        for oid, name, *_ in db.sql(FUNCTIONS):
            assert db.sql("SELECT has_function_privilege(%s, %s::oid, p) FROM unnest(%s) AS p", role, oid,
                          ["EXECUTE", "EXECUTE WITH GRANT OPTION"]) == [(access in ALLOWED[name].split(),), (False,)], (access, name)
        for oid, name, _ in db.sql(RELATIONS):
            assert db.sql(PRIVILEGES, oid, role, role) == (
                [("SELECT",)] if access in ALLOWED[name].split() else []), (access, name)


def test_every_role_tries_everything(db, roles):
    for access, role in roles.items():
        session = db.connect(user=role)
        for _, name, kind, signature, types, strict in db.sql(FUNCTIONS):
            # A strict function of a null is not called, so its right is not asked for.
            arguments = ", ".join(f"{SOMETHING[type_name] if strict else 'NULL'}::{type_name}" for type_name in types)
            verb = "CALL" if kind == "p" else "SELECT * FROM"
            if name in TRIGGERS:
                continue
            refused = refusal(session, f"{verb} retrysafe.{name}({arguments})")
            assert bool(refused) == (access not in ALLOWED[name].split()), (access, signature, refused)
        for _, name, kind in db.sql(RELATIONS):
            allowed = access in ALLOWED[name].split()
            assert (refusal(session, f"SELECT * FROM retrysafe.{name}") is None) == allowed, (access, name)
            writes = {"r": [f"INSERT INTO retrysafe.{name} DEFAULT VALUES", f"DELETE FROM retrysafe.{name}",
                            f"TRUNCATE retrysafe.{name}", f"ALTER TABLE retrysafe.{name} ENABLE ROW LEVEL SECURITY",
                            f"CREATE RULE r AS ON INSERT TO retrysafe.{name} DO ALSO NOTHING",
                            f"CREATE TRIGGER t AFTER INSERT ON retrysafe.{name} EXECUTE FUNCTION"
                            " suppress_redundant_updates_trigger()",
                            f"CREATE TABLE pg_temp.heir () INHERITS (retrysafe.{name})"],
                      "v": [f"CREATE OR REPLACE VIEW retrysafe.{name} AS SELECT 1 AS x",
                            f"CREATE RULE r AS ON INSERT TO retrysafe.{name} DO INSTEAD NOTHING",
                            f"CREATE TRIGGER t INSTEAD OF INSERT ON retrysafe.{name} FOR EACH ROW EXECUTE FUNCTION"
                            " suppress_redundant_updates_trigger()"],
                      "S": [f"SELECT setval('retrysafe.{name}', 1)", f"ALTER SEQUENCE retrysafe.{name} RESTART"]}[kind]
            for statement in writes:
                assert refusal(session, statement), (access, statement)
        for statement in ("CREATE TABLE retrysafe.mine ()", "CREATE FUNCTION retrysafe.mine() RETURNS int LANGUAGE sql AS 'SELECT 1'",
                          "ALTER EXTENSION retrysafe ADD FUNCTION pg_catalog.now()", "DROP EXTENSION retrysafe",
                          "ALTER SCHEMA retrysafe RENAME TO mine"):
            with pytest.raises(psycopg2.Error) as error:
                run(session, statement)
            assert error.value.pgcode == "42501", (access, statement)


def test_nothing_is_for_everybody(db):
    """No entry for PUBLIC, on objects or columns, and no default of the server's that would be one."""
    assert db.sql(f"""
        SELECT p.oid::regprocedure::text FROM ({MEMBERS}) m JOIN pg_proc p ON m.classid = 'pg_proc'::regclass AND p.oid = m.objid
         WHERE p.proacl IS NULL OR EXISTS (SELECT FROM aclexplode(p.proacl) WHERE grantee = 0)
        UNION ALL
        SELECT c.relname FROM ({MEMBERS}) m JOIN pg_class c ON m.classid = 'pg_class'::regclass AND c.oid = m.objid
         WHERE EXISTS (SELECT FROM aclexplode(c.relacl) WHERE grantee = 0)
            OR EXISTS (SELECT FROM pg_attribute a WHERE a.attrelid = c.oid AND a.attacl IS NOT NULL)""") == []


def test_what_runs_with_the_rights_of_its_owner_fixes_its_path(db):
    """No view is one that shows more because of who reads it, and a function with the rights of its owner, or one that is
    not in C, has its own search_path."""
    functions = db.sql(f"""
        SELECT p.oid::regprocedure::text, p.proconfig FROM ({MEMBERS}) m
          JOIN pg_proc p ON m.classid = 'pg_proc'::regclass AND p.oid = m.objid
          JOIN pg_language l ON l.oid = p.prolang
         WHERE (p.prosecdef OR l.lanname <> 'c') AND p.prosqlbody IS NULL""")
    assert functions and all(settings == ["search_path=pg_catalog, pg_temp"] for _, settings in functions), functions
    assert db.sql(f"""
        SELECT p.oid::regprocedure::text FROM ({MEMBERS}) m JOIN pg_proc p ON m.classid = 'pg_proc'::regclass AND p.oid = m.objid
          JOIN pg_language l ON l.oid = p.prolang WHERE p.prosecdef AND l.lanname = 'c'""") == []


def test_nothing_needs_what_is_revoked_from_everybody(server, db, role):
    """Tools take from PUBLIC whatever it has. Work goes on, here and in what is restored from a dump."""
    writer = role("write")
    with Receiver() as receiver:
        db.sql("SELECT outbox_create_destination('hook', 'http', %s)", json.dumps({"url": receiver.url}))
        db.sql("CREATE TABLE public.calls (key text)")
        db.sql("""CREATE FUNCTION public.note(event jsonb) RETURNS void LANGUAGE sql AS
                  $$INSERT INTO public.calls SELECT event ->> 'key'$$""")
        db.sql("SELECT outbox_create_destination('f', 'function', '{\"function\": \"public.note\"}')")
        db.sql(f"GRANT CONNECT ON DATABASE {db.name} TO {writer}")
        db.sql(f"REVOKE ALL ON DATABASE {db.name} FROM PUBLIC")
        db.sql("REVOKE ALL ON LANGUAGE sql, plpgsql FROM PUBLIC")
        for schema in ("public", "retrysafe", "information_schema"):
            db.sql(f"REVOKE ALL ON SCHEMA {schema} FROM PUBLIC")
            for kind in ("TABLES", "SEQUENCES", "ROUTINES"):
                db.sql(f"REVOKE ALL ON ALL {kind} IN SCHEMA {schema} FROM PUBLIC")

        def works(database, key):
            session = database.connect(user=writer)
            run(session, f"BEGIN; SELECT retrysafe.idem_begin('{key}', 'h'); SELECT retrysafe.outbox_emit('{key}', '{key}', 't', '1');"
                         f"SELECT retrysafe.idem_complete('{key}'); COMMIT")
            session.close()
            eventually(lambda: key in [r.header("ce-eventkey") for r in receiver.requests])
            eventually(lambda: database.value("SELECT count(*) FROM public.calls WHERE key = %s", key) == 1)
        works(db, "here")
        with database_on(server) as copy:
            copy.sql("DROP EXTENSION retrysafe; DROP SCHEMA retrysafe")
            dump = as_postgres(server.bindir() / "pg_dump", server.dsn(db.name))
            as_postgres(server.bindir() / "psql", "-X", "-q", "-v", "ON_ERROR_STOP=1", server.dsn(copy.name), stdin=dump)
            copy.sql("SELECT outbox_consent('fork')")
            works(copy, "there")
