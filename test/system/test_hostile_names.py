"""Objects of others with the names of what retrysafe uses: none of them may run with the rights of its owner."""
import pathlib
import re

import pytest

from conftest import run

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


def set_traps(connection, schema):
    words = set()
    for source in [*TOP.glob("src/**/*.cpp"), *TOP.glob("src/sql/install/*.sql")]:
        words |= set(re.findall(r"\b([a-z_0-9]+)\(", source.read_text()))
    run(connection, TRAP_OPERATORS.replace("SCHEMA", schema))
    run(connection, TRAP_FUNCTIONS.replace("SCHEMA", schema), list(words))
    # Arrays are polymorphic in the server.
    run(connection, f"""CREATE FUNCTION {schema}.unnest(text[]) RETURNS SETOF text LANGUAGE plpgsql AS $$
                        BEGIN RAISE EXCEPTION 'trapped: unnest'; END$$""")


@pytest.fixture
def mallory(db, server):
    """A session of an ordinary role with all rights of the API, whose own schema comes before the server's."""
    name = f"mallory_{db.name}"
    db.sql(f"CREATE ROLE {name} LOGIN")
    db.sql(f"CREATE SCHEMA evil AUTHORIZATION {name}")
    for access in ("write", "consume", "monitor", "admin"):
        db.sql(f"SELECT retrysafe_grant('{name}', '{access}')")
    session = db.connect(user=name)
    set_traps(session, "evil")
    run(session, "SET search_path = evil, pg_catalog, pg_temp")
    yield session
    session.close()
    db.sql(f"DROP OWNED BY {name} CASCADE")
    db.sql(f"DROP ROLE {name}")


@pytest.mark.parametrize("repetition", ["first parse", "parsed before", "parsed for another path"])
def test_the_callers_search_path_does_not_reach_our_statements(db, mallory, repetition):
    if repetition != "first parse":
        if repetition == "parsed for another path":
            run(mallory, "SET search_path = pg_catalog")
        use_all(mallory, "before")
        run(mallory, "SET search_path = evil, pg_catalog, pg_temp")
    use_all(mallory, "now")


def use_all(session, tag):
    """Every function of the API that runs statements on tables of retrysafe."""
    def call(text):
        return run(session, "SELECT * FROM retrysafe." + text)

    run(session, "BEGIN")
    call(f"idem_begin('{tag}', 'h'::text, ttl => '1 microsecond')")
    call(f"outbox_emit('{tag}', '{tag}-1', 't', '{{}}', 'o', NULL)")
    call(f"outbox_emit(NULL, '{tag}-2', 't', '{{}}', 'o', NULL, pg_catalog.clock_timestamp() OPERATOR(pg_catalog.+) '1 h'::interval)")
    call(f"idem_complete('{tag}', '1')")
    run(session, "COMMIT")
    run(session, "BEGIN")
    call(f"idem_begin('{tag}', 'h'::text)")  # takes the place of the expired one
    call(f"idem_complete('{tag}', '2')")
    run(session, "COMMIT")
    call(f"idem_peek('{tag}')")
    call(f"inbox_accept('c', '{tag}')")
    call(f"inbox_accept('c', ARRAY['{tag}', '{tag}-2'])")
    call(f"idem_forget('{tag}')")
    call("idem_cleanup()")
    call(f"outbox_cancel('{tag}-2')")
    call(f"outbox_event_id('{tag}-1')")
    call(f"outbox_create_destination('{tag}', 'pull', '{{}}', start_at => 'earliest')")
    call(f"outbox_alter_destination('{tag}', max_attempts => 2)")
    call(f"outbox_emit(NULL, '{tag}-3', 't', '{{}}', 'o')")
    call(f"outbox_emit(NULL, '{tag}-4', 't', '{{}}', 'o', NULL, pg_catalog.clock_timestamp() OPERATOR(pg_catalog.+) '50 ms'::interval)")
    run(session, "SELECT pg_catalog.pg_sleep(0.1)")
    batch, event_id = run(session, f"SELECT batch, event_id FROM retrysafe.outbox_fetch('{tag}', 1)")[0]
    call(f"outbox_renew('{batch}')")
    call(f"outbox_nack('{batch}', '{event_id}', 'no', NULL, true)")
    call(f"outbox_ack('{batch}')")
    batch = run(session, f"SELECT batch FROM retrysafe.outbox_fetch('{tag}', 1)")[0][0]
    call(f"outbox_ack('{batch}')")
    call(f"outbox_retry('{tag}')")
    call(f"outbox_discard('{tag}')")
    batch = run(session, f"SELECT batch FROM retrysafe.outbox_fetch('{tag}')")[0][0]
    call(f"outbox_release('{batch}')")
    call("outbox_cleanup()")
    for view in ("outbox_events", "outbox_status", "outbox_dead_letters", "idem_status", "idempotency_records"):
        call(view)
    call(f"outbox_pause('{tag}')")
    call(f"outbox_resume('{tag}')")
    call(f"outbox_drop_destination('{tag}')")
    call("retrysafe_grant(session_user::text::pg_catalog.regrole, 'write')")


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
