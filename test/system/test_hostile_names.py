"""Objects of others with the names of what retrysafe uses: none of them may run with the rights of its owner."""
import pathlib
import re

import pytest

from conftest import eventually, run
from test_security_access import FUNCTIONS, RELATIONS

TOP = pathlib.Path(__file__).resolve().parents[2]

# Operators and functions that answer better than the server's own and raise when they are run: one for each operator
# between two plain types, and one for each function of the server whose name the sources mention.
TRAP_OPERATORS = """
DO $do$
DECLARE o record;
BEGIN
  FOR o IN SELECT name, l.oid::regtype AS l, r.oid::regtype AS r, row_number() OVER () AS n,
                  CASE WHEN name IN ('+', '-', '||') THEN l.oid::regtype ELSE 'bool'::regtype END AS result
             FROM pg_type l, pg_type r, unnest(ARRAY['=', '<>', '<', '<=', '>', '>=', '+', '-', '||']) AS name
            WHERE l.typname IN ('oid', 'regclass', 'name', 'text', 'int4', 'int8', 'timestamptz', 'bytea', 'bool',
                                'interval', 'jsonb', 'char')
              AND r.typname IN ('oid', 'regclass', 'name', 'text', 'int4', 'int8', 'timestamptz', 'bytea', 'bool',
                                'interval', 'jsonb', 'char')
  LOOP
    EXECUTE format('CREATE FUNCTION %1$s.trap_%2$s(%3$s, %4$s) RETURNS %5$s LANGUAGE plpgsql AS $$
                    BEGIN RAISE EXCEPTION ''trapped: %6$s''; END$$', 'SCHEMA', o.n, o.l, o.r, o.result, o.name);
    EXECUTE format('CREATE OPERATOR %1$s.%2$s (FUNCTION = %1$s.trap_%3$s, LEFTARG = %4$s, RIGHTARG = %5$s)',
                   'SCHEMA', o.name, o.n, o.l, o.r);
  END LOOP;
END$do$"""

TRAP_FUNCTIONS = """
DO $do$
DECLARE f record;
BEGIN
  FOR f IN SELECT proname, pg_get_function_identity_arguments(oid) AS arguments,
                  CASE WHEN proretset THEN 'SETOF ' ELSE '' END || prorettype::regtype AS result
             FROM pg_proc
            WHERE pronamespace = 'pg_catalog'::regnamespace AND proname = ANY (%s) AND prokind IN ('f', 'a')
              AND provariadic = 0 AND prorettype <> 'internal'::regtype AND 'internal'::regtype <> ALL (proargtypes)
              AND proargmodes IS NULL
  LOOP
    BEGIN
      EXECUTE format('CREATE FUNCTION SCHEMA.%%I(%%s) RETURNS %%s LANGUAGE plpgsql AS $$
                      BEGIN RAISE EXCEPTION ''trapped: %%s''; END$$', f.proname, f.arguments, f.result, f.proname);
    EXCEPTION WHEN OTHERS THEN NULL;  -- pseudo-types that PL/pgSQL does not take
    END;
  END LOOP;
END$do$"""


def words_of_the_sources():
    texts = [source.read_text() for source in [*TOP.glob("src/**/*.cpp"), *TOP.glob("src/sql/install/*.sql")]]
    return list({word for text in texts for word in re.findall(r"\b[a-z_0-9]+\b", text)})


def set_traps(connection, schema):
    run(connection, TRAP_OPERATORS.replace("SCHEMA", schema))
    run(connection, TRAP_FUNCTIONS.replace("SCHEMA", schema), words_of_the_sources())
    # Arrays are polymorphic in the server.
    run(connection, f"""CREATE FUNCTION {schema}.unnest(text[]) RETURNS SETOF text LANGUAGE plpgsql AS $$
                        BEGIN RAISE EXCEPTION 'trapped: unnest'; END$$""")


def set_traps_of_relations(db, connection, schema):
    """Tables without the columns that are asked for, and types that take no text: those of the server that the sources
    mention, and our tables and views."""
    server = "SELECT {0} FROM {1} WHERE {2}namespace = 'pg_catalog'::regnamespace AND {0} = ANY (%s) AND {3}"
    words = words_of_the_sources()
    relations = [name for name, in db.sql(server.format("relname", "pg_class", "rel", "relkind IN ('r', 'v')"), words)]
    for name in [*relations, *(name for _, name, kind in db.sql(RELATIONS) if kind != "S")]:
        run(connection, f"CREATE TABLE {schema}.{name} ()")
    for name, in db.sql(server.format("typname", "pg_type", "typ", "typtype = 'b' AND typname NOT LIKE '\\_%%'"), words):
        run(connection, f'CREATE TYPE {schema}."{name}" AS (trap int)')


@pytest.fixture(params=["", "SUPERUSER"], ids=["ordinary role", "superuser"])
def mallory(request, db, role):
    """A session of a role with every access, or of a superuser, whose calls the server counts."""
    name = role("write", "consume", "relay", "monitor", "admin", attributes=request.param)
    db.sql(f"ALTER ROLE {name} SET track_functions = 'all'")
    db.sql(f"CREATE SCHEMA evil AUTHORIZATION {name}")
    db.sql("CREATE FUNCTION public.handle(request jsonb) RETURNS jsonb LANGUAGE sql AS 'SELECT $1'")
    return db.connect(user=name)


@pytest.mark.parametrize("repetition", ["first parse", "parsed before", "parsed for another path"])
def test_the_callers_search_path_does_not_reach_our_statements(db, mallory, repetition):
    """The caller's own schema comes before the server's."""
    set_traps(mallory, "evil")
    set_traps_of_relations(db, mallory, "evil")
    run(mallory, "SET search_path = evil, pg_catalog, pg_temp")
    if repetition != "first parse":
        if repetition == "parsed for another path":
            run(mallory, "SET search_path = pg_catalog")
        use_all(db, mallory, "before")
        run(mallory, "SET search_path = evil, pg_catalog, pg_temp")
    use_all(db, mallory, "now")


def test_temporary_objects_do_not_stand_before_ours(db, mallory):
    """Where nothing else is said, the server looks for relations and types among them first."""
    set_traps_of_relations(db, mallory, "pg_temp")
    run(mallory, "CREATE FUNCTION pg_temp.clock_timestamp() RETURNS timestamptz LANGUAGE plpgsql AS $$ BEGIN RAISE 'trapped'; END$$")
    run(mallory, "SET search_path = pg_temp, retrysafe, pg_catalog")
    use_all(db, mallory, "now")


def use_all(db, session, tag):
    """Every function and every view: what is not called here fails, by what the server has counted."""
    def call(text):
        return run(session, "SELECT * FROM retrysafe." + text)

    run(session, "BEGIN")
    call(f"idem_begin('{tag}', 'h'::pg_catalog.text, ttl => '1 microsecond')")
    call(f"idem_begin('{tag}-bytea', '\\x00'::pg_catalog.bytea)")
    call(f"idem_try_begin('{tag}-try', 'h'::pg_catalog.text)")
    call(f"idem_try_begin('{tag}-try-bytea', '\\x00'::pg_catalog.bytea)")
    call(f"outbox_emit('{tag}', '{tag}-1', 't', '{{}}', 'o', NULL)")
    call(f"outbox_emit(NULL, '{tag}-2', 't', '{{}}', 'o', NULL, 'tomorrow')")
    for key in (tag, f"{tag}-bytea", f"{tag}-try", f"{tag}-try-bytea"):
        call(f"idem_complete('{key}', '1')")
    run(session, "COMMIT")
    run(session, "BEGIN")
    call(f"idem_begin('{tag}', 'h'::pg_catalog.text)")  # takes the place of the expired one
    call(f"idem_complete('{tag}', '2')")
    run(session, "COMMIT")
    call(f"idem_peek('{tag}')")
    call(f"idem_peek('{tag}', 'h'::pg_catalog.text)")
    call("idem_hash('{}')")
    call(f"idem_run('{tag}-run', '{{}}', 'public.handle(pg_catalog.jsonb)')")
    call(f"inbox_accept('c', '{tag}')")
    call(f"inbox_accept('c', ARRAY['{tag}', '{tag}-2']::pg_catalog.text[])")
    call(f"idem_forget('{tag}')")
    call("idem_cleanup()")
    call(f"outbox_cancel('{tag}-2')")
    call(f"outbox_event_id('{tag}-1')")
    call(f"outbox_create_destination('{tag}', 'pull', '{{}}', start_at => 'earliest')")
    call(f"outbox_alter_destination('{tag}', max_attempts => 2)")
    call(f"outbox_emit(NULL, '{tag}-3', 't', '{{}}', 'o')")
    call(f"outbox_emit(NULL, '{tag}-4', 't', '{{}}', 'o', NULL, pg_catalog.clock_timestamp() OPERATOR(pg_catalog.+)"
         " '50 ms'::pg_catalog.interval)")
    eventually(lambda: db.value("SELECT NOT EXISTS (SELECT FROM outbox_scheduled_events WHERE deliver_after > now())"))
    run(session, f"CALL retrysafe.outbox_wait('{{{tag}}}', '0')")
    call(f"outbox_relay_destination('{tag}')")
    call(f"outbox_relay_options('{tag}')")
    batch, event_id = run(session, f"SELECT batch, event_id FROM retrysafe.outbox_fetch('{tag}', 1)")[0]
    call(f"outbox_renew('{batch}')")
    call(f"outbox_nack('{batch}', '{event_id}', 'no', NULL, true)")
    call(f"outbox_ack('{batch}')")
    batch = run(session, f"SELECT batch FROM retrysafe.outbox_fetch('{tag}', 1)")[0][0]
    call(f"outbox_record('{batch}')")
    call(f"outbox_retry('{tag}')")
    call(f"outbox_discard('{tag}')")
    batch = run(session, f"SELECT batch FROM retrysafe.outbox_fetch('{tag}')")[0][0]
    call(f"outbox_release('{batch}')")
    call("outbox_cleanup()")
    for _, name, kind in db.sql(RELATIONS):
        if kind == "v":
            call(name)
    destination = db.value("SELECT destination FROM outbox_destinations WHERE name = %s", tag)
    call(f"outbox_passed_position({destination}, 0)")  # which ring_status calls when a ring has turned
    call(f"outbox_pause('{tag}')")
    call(f"outbox_resume('{tag}')")
    call(f"outbox_drop_destination('{tag}')")
    call("outbox_consent('fork')")
    call("outbox_run_worker()")
    call("retrysafe_objects_of('write')")
    superuser = run(session, "SHOW is_superuser") == [("on",)]
    for name in ("revoke", "grant", "check_access", "holds", *(("apply_revoke", "apply_grant") if superuser else ())):
        call(f"retrysafe_{name}(session_user::pg_catalog.text::pg_catalog.regrole, 'write')")
    if superuser:
        call(f"outbox_register_kind('{tag}', 'retrysafe_null', '[]')")
        call(f"outbox_unregister_kind('{tag}')")
    run(session, "SELECT pg_catalog.pg_stat_force_next_flush()")
    called = {oid for oid, in db.sql("SELECT funcid FROM pg_stat_user_functions")}
    assert {name for oid, name, *_ in db.sql(FUNCTIONS) if oid not in called} == (
        set() if superuser else {"outbox_register_kind", "outbox_unregister_kind"})


def test_objects_that_wait_in_the_schema_are_not_run_by_create_extension(db):
    db.sql("DROP EXTENSION retrysafe")
    session = db.connect()
    run(session, "SET search_path = pg_catalog")
    set_traps(session, "retrysafe")
    run(session, "CREATE EXTENSION retrysafe SCHEMA retrysafe")
    # Nor do they stay, bound in what was created.
    assert run(session, """
        SELECT DISTINCT r.ev_class::regclass, pg_describe_object(d.refclassid, d.refobjid, 0)
          FROM pg_rewrite r JOIN pg_depend d ON d.classid = 'pg_rewrite'::regclass AND d.objid = r.oid
          JOIN pg_depend v ON v.classid = 'pg_class'::regclass AND v.objid = r.ev_class AND v.deptype = 'e'
         WHERE d.refclassid IN ('pg_operator'::regclass, 'pg_proc'::regclass)
           AND NOT EXISTS (SELECT FROM pg_depend m WHERE m.classid = d.refclassid AND m.objid = d.refobjid
                            AND m.deptype = 'e')""") == []
