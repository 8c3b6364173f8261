"""Who may do what: each access is a set of functions and views, and nobody has anything without one."""
import pytest

from conftest import run
from operating import refused

MEMBERS = """
  SELECT d.classid, d.objid FROM pg_depend d JOIN pg_extension e ON e.oid = d.refobjid
   WHERE e.extname = 'retrysafe' AND d.refclassid = 'pg_extension'::regclass AND d.deptype = 'e'"""


def executable(db, role):
    return {row[0] for row in db.sql(
        f"SELECT p.proname FROM ({MEMBERS}) m JOIN pg_proc p ON m.classid = 'pg_proc'::regclass AND p.oid = m.objid"
        " WHERE has_function_privilege(%s, p.oid, 'EXECUTE')", role)}


def accessible(db, role):
    return {row[0] for row in db.sql(
        f"SELECT c.relname FROM ({MEMBERS}) m JOIN pg_class c ON m.classid = 'pg_class'::regclass AND c.oid = m.objid,"
        " unnest(ARRAY['SELECT', 'INSERT', 'UPDATE', 'DELETE', 'TRUNCATE', 'REFERENCES', 'TRIGGER']) AS privilege"
        " WHERE c.relkind IN ('r', 'v') AND has_table_privilege(%s, c.oid, privilege)"
        " UNION SELECT c.relname"
        f" FROM ({MEMBERS}) m JOIN pg_class c ON m.classid = 'pg_class'::regclass AND c.oid = m.objid,"
        " unnest(ARRAY['SELECT', 'USAGE', 'UPDATE']) AS privilege"
        " WHERE c.relkind = 'S' AND has_sequence_privilege(%s, c.oid, privilege)", role, role)}


def views(db):
    return {row[0] for row in db.sql(
        f"SELECT c.relname FROM ({MEMBERS}) m JOIN pg_class c ON m.classid = 'pg_class'::regclass AND c.oid = m.objid"
        " WHERE c.relkind = 'v'")}


def test_nothing_is_given_to_public(db, role):
    nobody = role()
    assert executable(db, nobody) == set()
    assert accessible(db, nobody) == set()
    assert not db.value("SELECT has_schema_privilege(%s, 'retrysafe', 'USAGE')", nobody)
    # Columns as well.
    assert db.value(f"SELECT count(*) FROM ({MEMBERS}) m JOIN pg_attribute a ON a.attrelid = m.objid"
                    " WHERE m.classid = 'pg_class'::regclass AND a.attacl IS NOT NULL") == 0


def test_default_privileges_give_nothing(db, role):
    db.sql("DROP EXTENSION retrysafe")
    nobody = role()
    for kind in ("TABLES", "SEQUENCES", "FUNCTIONS"):
        for grantee in ("PUBLIC", nobody):
            db.sql(f"ALTER DEFAULT PRIVILEGES GRANT ALL ON {kind} TO {grantee}")
            db.sql(f"ALTER DEFAULT PRIVILEGES IN SCHEMA retrysafe GRANT ALL ON {kind} TO {grantee}")
    db.sql("CREATE EXTENSION retrysafe SCHEMA retrysafe")
    assert executable(db, nobody) == set()
    assert accessible(db, nobody) == set()


def test_the_schema_may_be_renamed(db, role):
    service = role("write", "consume")
    session = db.connect()
    assert run(session, "SELECT inbox_accept('c', 'e1')") == [(True,)]
    db.sql('ALTER SCHEMA retrysafe RENAME TO "we ird"')
    for s in (session, db.connect()):
        run(s, 'SET search_path = "we ird"')
        assert run(s, "SELECT inbox_accept('c', 'e1')") == [(False,)]
        run(s, "SELECT outbox_emit(NULL, 'e', 't', '1'), count(*) FROM outbox_status, idem_status")
        run(s, "SELECT retrysafe_grant(%s, 'monitor')", service)
        assert accessible(db, service) == views(db)
        run(s, "SELECT retrysafe_revoke(%s, 'monitor')", service)
        assert executable(db, service) == WRITE | CONSUME

WRITE = {"idem_begin", "idem_try_begin", "idem_complete", "idem_run", "idem_hash", "idem_peek", "outbox_emit",
         "outbox_cancel", "outbox_event_id", "inbox_accept"}

CONSUME = {"outbox_fetch", "outbox_ack", "outbox_nack", "outbox_renew", "outbox_release", "outbox_record", "outbox_wait",
           "outbox_relay_destination", "outbox_options_of_kind"}

RELAY = CONSUME | {"outbox_relay_options"}

ADMIN_ONLY = {"outbox_create_destination", "outbox_alter_destination", "outbox_drop_destination", "outbox_pause",
              "outbox_resume", "outbox_retry", "outbox_discard", "outbox_consent", "outbox_cleanup", "idem_forget",
              "idem_cleanup", "retrysafe_grant", "retrysafe_revoke", "outbox_register_kind"}


def test_each_access_is_exactly_its_set(db, role):
    assert executable(db, role("write")) == WRITE
    assert executable(db, role("consume")) == CONSUME
    assert executable(db, role("relay")) == RELAY
    monitor = role("monitor")
    assert not executable(db, monitor) & (ADMIN_ONLY | CONSUME - {"outbox_options_of_kind"} | {"outbox_emit", "idem_begin"})
    assert accessible(db, monitor) == views(db)
    for view in views(db):
        run(db.connect(user=monitor), f"SELECT * FROM {view}")
    admin = role("admin")
    assert executable(db, admin) >= WRITE | CONSUME | ADMIN_ONLY
    assert accessible(db, admin) == views(db)
    for other in ("write", "consume", "relay"):
        assert accessible(db, role(other)) == set()


def test_the_tables_are_nobodys(db, role):
    """No access lets a role read or write a table, or put code of its own on it."""
    session = db.connect(user=role("write", "consume", "monitor", "admin"))
    tables = [row[0] for row in db.sql(
        f"SELECT c.oid::regclass::text FROM ({MEMBERS}) m JOIN pg_class c ON m.classid = 'pg_class'::regclass"
        " AND c.oid = m.objid WHERE c.relkind = 'r'")]
    assert len(tables) > 5
    for table in tables:
        for statement in ("SELECT * FROM {}", "DELETE FROM {}", "TRUNCATE {}", "DO 'BEGIN LOCK TABLE {} IN SHARE MODE; END'",
                          "ALTER TABLE {} DISABLE TRIGGER ALL", "CREATE INDEX ON {} ((1))",
                          "CREATE TRIGGER t AFTER INSERT ON {} EXECUTE FUNCTION pg_catalog.suppress_redundant_updates_trigger()",
                          "CREATE RULE r AS ON INSERT TO {} DO ALSO NOTHING", "GRANT SELECT ON {} TO PUBLIC"):
            refused(session, "42501", statement.format(table))
    refused(session, "42501", "SELECT nextval('outbox_log_id_seq')")
    refused(session, "42501", "CREATE TABLE retrysafe.mine ()")
    refused(session, "42501", "CREATE FUNCTION retrysafe.mine() RETURNS int LANGUAGE sql AS 'SELECT 1'")


def test_access_is_granted_and_revoked(db, role):
    name = role("write", "monitor")
    assert executable(db, name) > WRITE
    db.sql("SELECT retrysafe_revoke(%s::regrole, 'monitor')", name)
    assert executable(db, name) == WRITE, "what both accesses include stays"
    assert accessible(db, name) == set()
    db.sql("SELECT retrysafe_revoke(%s::regrole, 'write')", name)
    assert executable(db, name) == set()
    assert not db.value("SELECT has_schema_privilege(%s, 'retrysafe', 'USAGE')", name)
    db.sql("SELECT retrysafe_grant(%s::regrole, 'admin')", name)
    other = role()
    session = db.connect(user=name)
    run(session, f"SELECT retrysafe.retrysafe_grant('{other}', 'write')")
    assert executable(db, other) == WRITE
    run(session, f"SELECT retrysafe.retrysafe_revoke('{other}', 'write')")
    db.sql("SELECT retrysafe_revoke(%s::regrole, 'admin')", name)
    assert executable(db, name) == set() and accessible(db, name) == set()
    refused(session, "42501", f"SELECT retrysafe.retrysafe_grant('{other}', 'write')")


def test_nobody_takes_the_rights_of_the_owner(db, role):
    """Whatever others call runs with them, and the owner need not be a superuser."""
    maker, owner = role(attributes="SUPERUSER"), role()
    db.sql("DROP EXTENSION retrysafe; DROP SCHEMA retrysafe")
    run(db.connect(user=maker), "CREATE SCHEMA retrysafe; CREATE EXTENSION retrysafe SCHEMA retrysafe")
    db.sql(f"REASSIGN OWNED BY {maker} TO {owner}")
    admin, service = db.connect(user=role("admin")), db.connect(user=role("write", "consume"))
    run(admin, "SELECT retrysafe.outbox_create_destination('p', 'pull')")
    for access in ("write", "consume", "relay", "monitor", "admin"):
        assert "REASSIGN OWNED" in refused(
            admin, "RS214", f"SELECT retrysafe.retrysafe_revoke('{owner}', '{access}')").diag.message_hint
    run(service, "SELECT retrysafe.outbox_emit(NULL, 'e', 't', '{}')")
    assert run(service, "SELECT event_key FROM retrysafe.outbox_fetch('p')") == [("e",)]
    run(admin, f"SELECT retrysafe.retrysafe_grant('{role()}', 'monitor')")


@pytest.mark.parametrize("function", ["retrysafe_grant", "retrysafe_revoke"])
def test_grants_need_a_role_and_a_known_access(db, role, function):
    session = db.connect()
    name = role()
    for access in (None, "", "all", "WRITE"):
        assert "write, consume, relay, monitor" in refused(
            session, "RS214", f"SELECT {function}(%s::regrole, %s)", name, access).diag.message_hint
    refused(session, "RS214", f"SELECT {function}(NULL, 'write')")
    refused(session, "RS214", f"SELECT {function}(0::regrole, 'write')")
    refused(session, "42704", f"SELECT {function}('no_such_role', 'write')")


def test_access_reaches_roles_whose_names_need_quotes(db, server):
    name = f'{db.name} "odd"; role'
    quoted = '"' + name.replace('"', '""') + '"'
    db.sql(f"CREATE ROLE {quoted}")
    try:
        db.sql("SELECT retrysafe_grant(%s::regrole, 'write')", quoted)
        assert executable(db, name) == WRITE
    finally:
        db.sql(f"DROP OWNED BY {quoted}")
        db.sql(f"DROP ROLE {quoted}")
