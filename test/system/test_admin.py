"""What operators touch: destinations, rights, status, dead letters, retention."""
import re
import base64
import hmac
import json
import os
import pathlib

import psycopg2
import pytest

from conftest import Pending, cluster, eventually, make_database, run
from receiver import Receiver


def refused(connection, sqlstate, query, *parameters):
    with pytest.raises(psycopg2.Error) as error:
        run(connection, query, *parameters)
    assert error.value.pgcode == sqlstate, error.value
    return error.value


def emit(db, key, type="t", ordering_key=None, **more):
    return db.value("SELECT outbox_emit(NULL, %s, %s, '{}', %s)", key, type, ordering_key)


def fetch(db, destination, max_events=100, lease="1 minute"):
    """The batch's name and the event keys; (None, []) when there is nothing."""
    rows = db.sql("SELECT batch, event_key FROM outbox_fetch(%s, %s, lease => %s)", destination, max_events, lease)
    return (rows[0][0] if rows else None), [key for _, key in rows]


def drain(db, destination):
    """Fetches and acknowledges until nothing is left; returns the event keys in order of delivery."""
    keys = []
    while True:
        batch, some = fetch(db, destination)
        if not some:
            return keys
        keys += some
        db.sql("SELECT outbox_ack(%s)", batch)


def fail_first(db, destination, **arguments):
    """Gives the first event of the next batch back, and acknowledges what is left of the batch."""
    batch, event_id = db.sql("SELECT batch, event_id FROM outbox_fetch(%s)", destination)[0]
    names = "".join(f", {name} => %s" for name in arguments)
    db.sql(f"SELECT outbox_nack(%s, %s{names})", batch, event_id, *arguments.values())
    db.sql("SELECT outbox_ack(%s)", batch)


def bury(db, destination):
    """Makes dead letters of everything that is pending."""
    while rows := db.sql("SELECT batch, event_id FROM outbox_fetch(%s, 1)", destination):
        batch, event_id = rows[0]
        db.sql("SELECT outbox_nack(%s, %s, reason => 'refused: ' || %s, dead => true)", batch, event_id, event_id)
        db.sql("SELECT outbox_ack(%s)", batch)


def status(db, destination):
    with db.connect() as connection, connection.cursor() as cursor:
        cursor.execute("SELECT * FROM outbox_status WHERE name = %s", (destination,))
        return dict(zip([c.name for c in cursor.description], cursor.fetchone()))


# --- rights -------------------------------------------------------------------------------------------------

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


# --- destinations -------------------------------------------------------------------------------------------


def test_two_sessions_make_one_destination(db):
    first = db.connect(autocommit=False)
    run(first, "SELECT outbox_create_destination('d', 'pull')")
    second = Pending(db, "SELECT outbox_create_destination('d', 'pull')")
    assert second.blocks()
    first.commit()
    with pytest.raises(psycopg2.Error) as error:
        second.result()
    assert error.value.pgcode == "RS202"
    assert db.value("SELECT count(*) FROM outbox_status") == 1


def test_an_aborted_creation_leaves_the_name_free(db):
    first = db.connect(autocommit=False)
    run(first, "SELECT outbox_create_destination('d', 'pull')")
    second = Pending(db, "SELECT outbox_create_destination('d', 'pull')")
    assert second.blocks()
    first.rollback()
    second.result()
    assert db.value("SELECT count(*) FROM outbox_status") == 1


def test_start_now_earliest_or_at_a_position(db):
    emit(db, "a")
    second = emit(db, "b")
    emit(db, "c")
    open_writer = db.connect(autocommit=False)
    run(open_writer, "SELECT outbox_emit(NULL, 'late', 't', '{}')")
    creator = db.connect(autocommit=False)
    # The first destination of a log that has events waits for those who write some more.
    first = Pending(db, "SELECT outbox_create_destination('now', 'pull')")
    assert first.blocks()
    open_writer.commit()
    first.result()
    late = db.connect(autocommit=False)
    run(late, "SELECT outbox_emit(NULL, 'later', 't', '{}')")
    run(creator, "SELECT outbox_create_destination('own', 'pull')")
    run(creator, "SELECT outbox_emit(NULL, 'of the creator', 't', '{}')")
    creator.commit()
    db.sql("SELECT outbox_create_destination('earliest', 'pull', start_at => 'earliest')")
    db.sql("SELECT outbox_create_destination('second', 'pull', start_at => %s)", str(second))
    late.commit()
    emit(db, "d")
    assert sorted(drain(db, "now")) == ["d", "later", "of the creator"]
    assert sorted(drain(db, "own")) == ["d", "later", "of the creator"]
    assert sorted(drain(db, "earliest")) == ["a", "b", "c", "d", "late", "later", "of the creator"]
    assert sorted(drain(db, "second")) == ["b", "c", "d", "late", "later", "of the creator"]


def test_only_privileged_roles_name_files_and_variables_of_the_server(db, role):
    db.sql(f"ALTER DATABASE {db.name} SET retrysafe.allowed_secret_directory = '/srv/secrets'")
    plain = db.connect(user=role("admin"))
    reader_name = role("admin")
    db.sql(f"GRANT pg_read_server_files TO {reader_name}")
    reader = db.connect(user=reader_name)
    create = "SELECT outbox_create_destination('d', 'http', %s::jsonb)"
    for option in ('"secret_file": "a.key"', '"secret_env": "RETRYSAFE_X"', '"ca_file": "ca.pem"'):
        options = '{"url": "https://example.com", ' + option + "}"
        refused(plain, "42501", create, options)
        run(reader, create, options)
        # Whoever changes where the secret is sent to must be allowed to use it.
        refused(plain, "42501", "SELECT outbox_alter_destination('d', options => '{\"url\": \"https://evil.example\"}')")
        run(plain, "SELECT outbox_alter_destination('d', max_attempts => 3)")
        run(plain, "SELECT outbox_drop_destination('d')")


def test_only_privileged_roles_name_the_certificate_of_a_postgres_destination(db, role):
    db.sql(f"ALTER DATABASE {db.name} SET retrysafe.allowed_secret_directory = '/srv/secrets'")
    reader = role("admin")
    db.sql(f"GRANT pg_read_server_files TO {reader}")
    create = "SELECT outbox_create_destination('d', 'postgres', %s::jsonb)"
    for files in ('"ca_file": "ca.pem"', '"cert_file": "courier.pem", "key_file": "courier.key"'):
        options = '{"host": "db", "dbname": "d", "user": "u", "password": "hunter2", ' + files + "}"
        refused(db.connect(user=role("admin")), "42501", create, options)
        run(db.connect(user=reader), create, options)
        db.sql("SELECT outbox_drop_destination('d')")


def test_nobody_else_can_have_secrets_sent_to_a_server_of_their_own(db, role):
    creator, other = role("admin"), role("admin")
    run(db.connect(user=creator), """SELECT outbox_create_destination('d', 'http',
        '{"url": "https://example.com", "headers": {"Authorization": "hunter2"}}')""")
    refused(db.connect(user=other), "42501",
            "SELECT outbox_alter_destination('d', options => '{\"url\": \"https://evil.example\"}')")
    run(db.connect(user=other), "SELECT outbox_alter_destination('d', max_attempts => 3)")
    run(db.connect(user=creator), "SELECT outbox_alter_destination('d', options => '{\"url\": \"https://example.org\"}')")
    assert status(db, "d")["options"]["url"] == "https://example.org"


def test_a_postgres_destination_of_an_ordinary_role_needs_a_password(db, role):
    plain = db.connect(user=role("admin"))
    options = '{"host": "127.0.0.1", "dbname": "d", "user": "u"}'
    refused(plain, "42501", "SELECT outbox_create_destination('d', 'postgres', %s::jsonb)", options)
    db.sql("SELECT outbox_create_destination('d', 'postgres', %s::jsonb)", options)
    # It acts with the rights of the superuser that made it.
    refused(plain, "42501", "SELECT outbox_alter_destination('d', options => '{\"password\": \"x\"}')")
    refused(plain, "42501", "SELECT outbox_alter_destination('d', max_attempts => 3)")


def test_a_function_runs_as_its_creator_whoever_alters_it(db, role):
    creator, other, member = role("admin"), role("admin"), role("admin")
    db.sql(f"GRANT {creator} TO {member}")
    db.sql("CREATE FUNCTION public.handler(event jsonb) RETURNS void LANGUAGE sql AS 'SELECT'")
    db.sql("CREATE FUNCTION public.hidden(event jsonb) RETURNS void LANGUAGE sql AS 'SELECT'")
    db.sql("REVOKE ALL ON FUNCTION public.hidden FROM PUBLIC")
    refused(db.connect(user=creator), "42501",
            "SELECT outbox_create_destination('d', 'function', '{\"function\": \"public.hidden\"}')")
    run(db.connect(user=creator), "SELECT outbox_create_destination('d', 'function', '{\"function\": \"public.handler\"}')")
    refused(db.connect(user=other), "42501", "SELECT outbox_alter_destination('d', max_attempts => 3)")
    run(db.connect(user=member), "SELECT outbox_alter_destination('d', max_attempts => 3)")
    db.sql("SELECT outbox_alter_destination('d', max_attempts => 4)")
    assert status(db, "d")["run_as"] == creator


def test_kinds_are_registered_by_superusers_only(db, role):
    plain = db.connect(user=role("admin"))
    refused(plain, "42501", "SELECT outbox_register_kind('k', 'l', '[]')")
    refused(plain, "42501", "SELECT outbox_unregister_kind('k')")


def test_no_secret_is_shown(db):
    db.sql("""SELECT outbox_create_destination('d', 'http', '{"url": "https://example.com", "secret": "hunter2",
              "headers": {"Authorization": "hunter2"}}')""")
    for view in views(db):
        assert "hunter2" not in str(db.sql(f"SELECT * FROM {view}"))
    error = refused(db.connect(), "RS203", "SELECT outbox_alter_destination('d', options => "
                    "'{\"secret\": \"hunter2\", \"secret_env\": \"RETRYSAFE_X\"}')")
    assert "hunter2" not in str(error.diag.message_primary) + str(error.diag.message_hint)


def test_a_paused_destination_keeps_its_events(db):
    db.sql("SELECT outbox_create_destination('d', 'pull')")
    db.sql("SELECT outbox_pause('d')")
    emit(db, "a")
    assert fetch(db, "d") == (None, [])
    assert status(db, "d")["state"] == "paused"
    db.sql("SELECT outbox_resume('d')")
    assert drain(db, "d") == ["a"]


def test_the_number_of_shards_changes_without_losing_or_repeating(db):
    db.sql("SELECT outbox_create_destination('d', 'pull', shards => 4)")
    for i in range(20):
        emit(db, f"a{i}", ordering_key=f"k{i % 7}")
    open_writer = db.connect(autocommit=False)
    run(open_writer, "SELECT outbox_emit(NULL, 'open', 't', '{}', 'k1')")
    assert len(drain(db, "d")) == 20
    refused(db.connect(), "RS214", "SELECT outbox_alter_destination('d', shards => 0)")
    db.sql("SELECT outbox_alter_destination('d', shards => 2)")
    open_writer.commit()
    emit(db, "b", ordering_key="k2")
    refused(db.connect(), "RS206", "SELECT outbox_alter_destination('d', shards => 3)")
    assert sorted(drain(db, "d")) == ["b", "open"]
    db.sql("SELECT outbox_alter_destination('d', shards => 3)")
    assert drain(db, "d") == []
    emit(db, "c")
    assert drain(db, "d") == ["c"]


def test_what_old_shards_delivered_stays_told(db):
    emit(db, "before")
    db.sql("SELECT outbox_create_destination('d', 'pull', shards => 3)")
    for i in range(8):
        emit(db, f"a{i}", ordering_key=f"k{i}")
    drain(db, "d")
    for shards in (1, 4, 2):
        db.sql("SELECT outbox_alter_destination('d', shards => %s)", shards)
        assert status(db, "d")["delivered"] == 8
        unsent = {key for key, at in sent_at(db).items() if at is None}
        assert unsent == {"before"}
    emit(db, "b")
    assert sent_at(db)["b"] is None
    assert drain(db, "d") == ["b"]
    assert status(db, "d")["delivered"] == 9 and sent_at(db)["b"] is not None


def test_old_shards_stay_told_when_retention_took_their_start(db, no_retention):
    db.sql("SELECT outbox_create_destination('d', 'pull', shards => 2)")
    for key in "abcd":
        emit(db, key, ordering_key=key)
        drain(db, "d")
    clean_up(db, "d")
    clean_up(db)
    assert db.value("SELECT min(window_no) FROM outbox_windows") > 0
    emit(db, "e")
    drain(db, "d")
    db.sql("SELECT outbox_alter_destination('d', shards => 1)")
    assert sent_at(db)["e"] is not None
    assert status(db, "d")["delivered"] == 5


def test_a_drop_waits_for_a_record_under_way_and_leaves_nothing(db):
    db.sql("SELECT outbox_create_destination('d', 'pull', shards => 2)")
    emit(db, "a")
    batch, _ = fetch(db, "d")
    recorder = db.connect(autocommit=False)
    run(recorder, "SELECT outbox_ack(%s)", batch)
    old = db.connect(autocommit=False)
    run(old, "SET TRANSACTION ISOLATION LEVEL REPEATABLE READ")
    refused(old, "RS207", "SELECT outbox_drop_destination('d')")
    dropper = Pending(db, "SELECT outbox_drop_destination('d')")
    assert dropper.blocks()
    recorder.commit()
    assert dropper.result() == [(True,)]
    for table in ("destinations", "shards", "windows", "batches", "parked"):
        assert db.value(f"SELECT count(*) FROM outbox_{table}") == 0


def test_a_batch_of_old_shards_is_refused(db):
    db.sql("SELECT outbox_create_destination('d', 'pull')")
    emit(db, "a")
    batch, keys = fetch(db, "d")
    refused(db.connect(), "RS206", "SELECT outbox_alter_destination('d', shards => 2)")
    db.sql("SELECT outbox_drop_destination('d')")
    db.sql("SELECT outbox_create_destination('d', 'pull')")
    with pytest.raises(psycopg2.Error) as error:
        db.sql("SELECT outbox_ack(%s)", batch)
    assert error.value.pgcode in ("RS209", "RS210", "RS201")


# --- status -------------------------------------------------------------------------------------------------


def sent_at(db):
    return dict(db.sql("SELECT event_key, sent_at FROM outbox_events"))


def test_sent_at_is_when_the_last_interested_destination_has_it(db):
    emit(db, "before")
    db.sql("SELECT outbox_create_destination('all', 'pull')")
    db.sql("SELECT outbox_create_destination('orders', 'pull', event_types => '{order.*}', shards => 3)")
    emit(db, "other", "invoice")
    emit(db, "order", "order.made", "k")
    assert sent_at(db) == {"before": None, "other": None, "order": None}
    assert drain(db, "all") == ["other", "order"]
    first = sent_at(db)
    assert first["before"] is None and first["other"] is not None and first["order"] is None
    assert drain(db, "orders") == ["order"]
    second = sent_at(db)
    assert second["other"] == first["other"]
    assert second["order"] >= first["other"]


def timed_drain(db, destination, max_events=100, batches=1000):
    """Event keys with the times between which they were acknowledged."""
    delivered = {}
    for _ in range(batches):
        batch, some = fetch(db, destination, max_events)
        if not some:
            break
        before = db.value("SELECT clock_timestamp()")
        db.sql("SELECT outbox_ack(%s)", batch)
        after = db.value("SELECT clock_timestamp()")
        delivered |= {key: (before, after) for key in some}
    return delivered


def test_sent_at_is_found_among_many_batches_and_late_commits(db):
    db.sql("SELECT outbox_create_destination('d', 'pull')")
    delivered = {}
    for i in range(20):
        late = db.connect(autocommit=False)
        run(late, "SELECT outbox_emit(NULL, %s, 't', '{}')", f"late{i}")
        for key in "abc":
            emit(db, f"{key}{i}")
        delivered |= timed_drain(db, "d", max_events=1, batches=2)
        late.commit()
        delivered |= timed_drain(db, "d", max_events=1)
    times = sent_at(db)
    assert times.keys() == delivered.keys() == {f"{k}{i}" for i in range(20) for k in ("a", "b", "c", "late")}
    for key, (before, after) in delivered.items():
        assert before <= times[key] <= after, key


def test_sent_at_of_a_parked_event_is_when_it_was_delivered(db):
    db.sql("SELECT outbox_create_destination('d', 'pull')")
    emit(db, "a")
    fail_first(db, "d", reason="no", retry_after="0")
    assert sent_at(db) == {"a": None}
    assert status(db, "d")["parked_retry"] == 1
    delivered = timed_drain(db, "d")
    before, after = delivered["a"]
    assert before <= sent_at(db)["a"] <= after


def test_status_tells_depth_and_age_without_reading_the_log(db):
    db.sql("SELECT outbox_create_destination('d', 'pull', shards => 2)")
    assert status(db, "d")["state"] == "idle"
    db.sql("SELECT outbox_emit(NULL, 'k' || i, 't', '{}', 'o' || i) FROM generate_series(1, 1000) AS i")
    now = status(db, "d")
    assert now["state"] == "unclaimed" and now["backlog"] == 1000 and now["oldest_pending_age"].total_seconds() > 0
    fetch(db, "d")
    now = status(db, "d")
    assert now["state"] == "publishing" and now["holders"]
    plan = "\n".join(row[0] for row in db.sql("EXPLAIN (ANALYZE, COSTS OFF, TIMING OFF, SUMMARY OFF) SELECT * FROM outbox_status"))
    log = [line for line in plan.splitlines() if "on outbox_log" in line and "id_seq" not in line and "(never executed)" not in line]
    rows = [int(re.search(r"rows=(\d+)", line)[1]) for line in log]
    assert sum(rows) == 1, plan
    assert all("Index Scan" in line for line, n in zip(log, rows) if n), plan


@pytest.mark.parametrize("view", ["idem_status", "outbox_dead_letters", "outbox_kind_options", "outbox_status", "outbox_workers",
                                  "ring_status"])
def test_what_is_polled_is_not_compiled_first(db, view):
    """A plan that seems dear, without statistics as here, is compiled for seconds by a server that can."""
    plan, = db.value(f"EXPLAIN (FORMAT json) SELECT * FROM {view}")
    assert plan["Plan"]["Total Cost"] < float(db.value("SHOW jit_above_cost"))


def test_status_shows_a_broken_off_shard(db):
    db.sql("SELECT outbox_create_destination('d', 'pull')")
    db.sql("UPDATE outbox_shards SET retry_at = now() + '1 hour', failures = 3, last_error = 'refused', error_at = now()")
    now = status(db, "d")
    assert (now["state"], now["failures"], now["last_error"]) == ("backing off", 3, "refused")


# --- dead letters -------------------------------------------------------------------------------------------


def dead(db):
    return [row[0] for row in db.sql("SELECT event_key FROM outbox_dead_letters ORDER BY id")]


def test_dead_letters_are_sent_again_in_order(db):
    db.sql("SELECT outbox_create_destination('d', 'pull')")
    for i in range(5):
        emit(db, f"p{i}", ordering_key="P")
        emit(db, f"q{i}", ordering_key="Q")
    bury(db, "d")
    assert sorted(dead(db)) == sorted(f"{k}{i}" for k in "pq" for i in range(5))
    row = db.sql("SELECT destination, reason, attempts, dead_since IS NOT NULL, event_id::text FROM outbox_dead_letters")[0]
    assert row[:4] == ("d", "refused: " + row[4], 1, True)
    emit(db, "p5", ordering_key="P")
    assert db.value("SELECT outbox_retry('d', ordering_key => 'P')") == 5
    assert drain(db, "d") == [f"p{i}" for i in range(6)]
    assert sorted(dead(db)) == [f"q{i}" for i in range(5)]
    assert db.value("SELECT outbox_retry('d')") == 5
    assert drain(db, "d") == [f"q{i}" for i in range(5)]
    assert dead(db) == [] and db.value("SELECT outbox_retry('d')") == 0


def test_filters_choose_dead_letters(db):
    db.sql("SELECT outbox_create_destination('d', 'pull')")
    db.sql("SELECT outbox_create_destination('e', 'pull')")
    for i in range(4):
        emit(db, f"a{i}", type=f"type{i % 2}")
    bury(db, "d")
    bury(db, "e")
    one = db.value("SELECT outbox_event_id('a3')")
    assert db.value("SELECT outbox_discard('d', reason_like => '%nothing%')") == 0
    assert db.value("SELECT outbox_retry('d', event_id => %s)", one) == 1
    assert drain(db, "d") == ["a3"]
    assert db.value("SELECT outbox_retry('d', event_type => 'type0', max_events => 1)") == 1
    assert drain(db, "d") == ["a0"]
    assert db.value("SELECT outbox_discard('d', reason_like => 'refused%')") == 2
    assert db.value("SELECT count(*) FROM outbox_dead_letters WHERE destination = 'd'") == 0
    assert db.value("SELECT count(*) FROM outbox_dead_letters WHERE destination = 'e'") == 4
    assert drain(db, "d") == []


def test_revived_events_go_before_a_later_one_that_waits(db):
    db.sql("SELECT outbox_create_destination('d', 'pull')")
    emit(db, "first", ordering_key="K")
    emit(db, "second", ordering_key="K")
    bury(db, "d")
    emit(db, "third", ordering_key="K")
    fail_first(db, "d", reason="later", retry_after="0")
    assert (status(db, "d")["parked_retry"], status(db, "d")["parked_blocked"]) == (1, 0)
    db.sql("SELECT outbox_retry('d')")
    assert (status(db, "d")["parked_retry"], status(db, "d")["parked_blocked"]) == (1, 2)
    assert drain(db, "d") == ["first", "second", "third"]


def test_discarding_the_head_lets_the_others_go(db):
    db.sql("SELECT outbox_create_destination('d', 'pull', on_exhausted => 'block')")
    for i in range(3):
        emit(db, f"k{i}", ordering_key="K")
    fail_first(db, "d", reason="never", dead=True)
    assert drain(db, "d") == []
    now = status(db, "d")
    assert (now["dead"], now["parked_blocked"]) == (1, 2)
    assert db.value("SELECT outbox_discard('d')") == 1
    assert drain(db, "d") == ["k1", "k2"]


def test_redrive_waits_for_a_record_that_is_under_way(db):
    db.sql("SELECT outbox_create_destination('d', 'pull')")
    emit(db, "a")
    bury(db, "d")
    emit(db, "b")
    batch, _ = fetch(db, "d")
    recorder = db.connect(autocommit=False)
    run(recorder, "SELECT outbox_ack(%s)", batch)
    redrive = Pending(db, "SELECT outbox_retry('d')")
    assert redrive.blocks()
    recorder.commit()
    assert redrive.result() == [(1,)]
    assert drain(db, "d") == ["a"]


# --- retention ----------------------------------------------------------------------------------------------


@pytest.fixture
def no_retention(server, db):
    """Nothing needs to be kept, and no worker removes it before the test does."""
    server.set("retrysafe.outbox_retention", "0")
    server.set("retrysafe.workers_per_database", "0")
    eventually(lambda: db.value("SHOW retrysafe.outbox_retention") == "0" and not db.value(
        "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND backend_type = 'retrysafe worker'"))
    yield
    server.set("retrysafe.outbox_retention", None)
    server.set("retrysafe.workers_per_database", None)


def kept(db):
    return [row[0] for row in db.sql("SELECT event_key FROM outbox_log ORDER BY id")]


def test_retention_keeps_what_a_destination_has_not_had(db, no_retention):
    db.sql("SELECT outbox_create_destination('fast', 'pull', shards => 2)")
    db.sql("SELECT outbox_create_destination('slow', 'pull')")
    for i in range(10):
        emit(db, f"k{i}")
    assert len(drain(db, "fast")) == 10
    db.sql("SELECT outbox_cleanup()")
    assert len(kept(db)) == 10
    assert len(drain(db, "slow")) == 10
    db.sql("SELECT pg_current_xact_id()")
    eventually(lambda: db.sql("SELECT outbox_cleanup()") and drain(db, "fast") == drain(db, "slow") == kept(db) == [],
               timeout=40)
    emit(db, "next")
    assert drain(db, "fast") == drain(db, "slow") == ["next"]


def clean_up(db, *destinations):
    """Each call takes one step; destinations look in between, as their clients do."""
    for _ in range(2):
        while db.value("SELECT outbox_cleanup()") > 0:
            pass
        for name in destinations:
            assert drain(db, name) == []


def test_retention_by_age_without_a_destination(db, no_retention):
    emit(db, "a")
    clean_up(db)
    assert kept(db) == []


def test_retention_time_counts(db):
    emit(db, "a")
    db.sql("SELECT outbox_create_destination('d', 'pull')")
    emit(db, "b")
    drain(db, "d")
    assert db.value("SELECT outbox_cleanup()") == 0
    assert kept(db) == ["a", "b"]


def test_a_destination_that_holds_back_too_much_is_lost_loudly(db, no_retention):
    db.sql("SELECT outbox_create_destination('fast', 'pull')")
    db.sql("SELECT outbox_create_destination('slow', 'pull', shards => 2)")
    db.sql("""SELECT outbox_emit(NULL, 'k' || i, 't', to_jsonb(encode(sha512(i::text::bytea), 'hex') || repeat('x', 900)))
                FROM generate_series(1, 2000) AS i""")
    assert len(drain(db, "fast")) == 2000
    clean_up(db, "fast")
    assert len(kept(db)) == 2000 and status(db, "slow")["holds_back_bytes"] > 2 << 20
    assert status(db, "fast")["holds_back_bytes"] == 0
    db.server.set("retrysafe.max_retained_bytes", "2MB")
    try:
        eventually(lambda: db.value("SHOW retrysafe.max_retained_bytes") == "2MB")
        clean_up(db, "fast")
        clean_up(db)
    finally:
        db.server.set("retrysafe.max_retained_bytes", None)
    assert kept(db) == []
    assert status(db, "slow")["state"] == "lost" and status(db, "fast")["state"] != "lost"
    assert 'destination "slow" is lost' in db.server.log()
    session = db.connect()
    refused(session, "RS218", "SELECT * FROM outbox_fetch('slow')")
    refused(session, "RS218", "SELECT outbox_resume('slow')")
    db.sql("SELECT outbox_drop_destination('slow')")
    db.sql("SELECT outbox_create_destination('slow', 'pull', start_at => 'earliest')")
    emit(db, "after")
    assert drain(db, "slow") == drain(db, "fast") == ["after"]


def test_progress_rows_do_not_grow_for_ever(db, no_retention):
    db.sql("SELECT outbox_create_destination('d', 'pull')")
    for i in range(50):
        emit(db, f"k{i}")
        assert drain(db, "d") == [f"k{i}"]
    clean_up(db, "d")
    clean_up(db)
    assert len(kept(db)) <= 1
    assert db.value("SELECT count(*) FROM outbox_batches") <= 3
    assert db.value("SELECT count(*) FROM outbox_windows") <= 3
    emit(db, "next")
    assert drain(db, "d") == ["next"]


def test_progress_rows_stay_while_kept_events_need_them(db, no_retention):
    db.sql("SELECT outbox_create_destination('d', 'pull')")
    db.sql("SELECT outbox_create_destination('slow', 'pull')")
    for i in range(20):
        emit(db, f"k{i}")
        drain(db, "d")
    db.sql("SELECT outbox_drop_destination('slow')")
    before = sent_at(db)
    assert None not in before.values()
    db.sql("SELECT outbox_create_destination('slow', 'pull', start_at => 'earliest')")
    db.sql("SELECT outbox_cleanup()")
    db.sql("SELECT outbox_drop_destination('slow')")
    assert sent_at(db) == before


def test_dead_letters_outlive_the_log(db, no_retention):
    db.sql("SELECT outbox_create_destination('d', 'pull')")
    emit(db, "a")
    bury(db, "d")
    emit(db, "b")
    drain(db, "d")
    eventually(lambda: db.sql("SELECT outbox_cleanup()") and drain(db, "d") == kept(db) == [], timeout=40)
    assert dead(db) == ["a"]
    db.sql("SELECT outbox_retry('d')")
    assert drain(db, "d") == ["a"]
    db.sql("SELECT outbox_cleanup()")
    assert db.value("SELECT count(*) FROM outbox_parked") == 0


def test_retention_does_not_remove_what_commits_late(db, no_retention):
    db.sql("SELECT outbox_create_destination('d', 'pull')")
    late = db.connect(autocommit=False)
    run(late, "SELECT outbox_emit(NULL, 'late', 't', '{}')")
    for i in range(5):
        emit(db, f"k{i}")
        drain(db, "d")
    db.sql("SELECT outbox_cleanup()")
    late.commit()
    db.sql("SELECT outbox_cleanup()")
    assert "late" in kept(db)
    assert drain(db, "d") == ["late"]


# --- secrets ------------------------------------------------------------------------------------------------


def test_a_secret_is_read_from_its_file_when_events_are_sent(db, secrets):
    key = bytes(range(24))
    (secrets / "hook.key").write_text("whsec_" + base64.b64encode(key).decode() + "\n")
    with Receiver() as receiver:
        db.sql("SELECT outbox_create_destination('d', 'http', %s)", json.dumps({"url": receiver.url, "secret_file": "hook.key"}))
        emit(db, "a")
        eventually(lambda: receiver.requests)
        request = receiver.requests[0]
        signed = f'{request.header("webhook-id")}.{request.header("webhook-timestamp")}.'.encode() + request.body
        assert request.header("webhook-signature") == "v1," + base64.b64encode(hmac.digest(key, signed, "sha256")).decode()


def test_a_secret_is_taken_from_the_environment_of_the_server(monkeypatch):
    monkeypatch.setenv("RETRYSAFE_TEST_KEY", "sesame")
    with cluster() as own, Receiver() as receiver:
        db = make_database(own)
        db.sql("SELECT outbox_create_destination('d', 'http', %s)",
               json.dumps({"url": receiver.url, "secret_env": "RETRYSAFE_TEST_KEY"}))
        emit(db, "a")
        eventually(lambda: receiver.requests)
        request, = receiver.requests
        signed = f'{request.header("webhook-id")}.{request.header("webhook-timestamp")}.'.encode() + request.body
        assert request.header("webhook-signature") == "v1," + base64.b64encode(hmac.digest(b"sesame", signed, "sha256")).decode()


def test_a_secret_that_cannot_be_read_stops_its_destination_only(db, secrets):
    (secrets.parent / "elsewhere.key").write_text("hunter2")
    (secrets / "link.key").symlink_to(secrets.parent / "elsewhere.key")
    (secrets / "empty.key").write_text("\n")
    (secrets / "large.key").write_text("x" * 65537)
    (secrets / "folder.key").mkdir()
    expected = {
        "link": ('"secret_file": "link.key"', "outside of the allowed directory"),
        "missing": ('"secret_file": "missing.key"', "cannot be found"),
        "empty": ('"secret_file": "empty.key"', "empty or not text"),
        "large": ('"secret_file": "large.key"', "cannot be read"),
        "folder": ('"secret_file": "folder.key"', "cannot be read"),
        "environment": ('"secret_env": "RETRYSAFE_NO_SUCH_VARIABLE"', "is not set"),
    }
    with Receiver() as receiver:
        for name, (option, _) in expected.items():
            db.sql("SELECT outbox_create_destination(%s, 'http', %s)", name, f'{{"url": "{receiver.url}", {option}}}')
        db.sql("SELECT outbox_create_destination('good', 'http', %s)", json.dumps({"url": receiver.url}))
        emit(db, "a")
        eventually(lambda: receiver.requests)
        for name, (_, error) in expected.items():
            assert error in eventually(lambda: status(db, name)["last_error"]), name
            assert status(db, name)["backlog"] == 1
        assert len(receiver.requests) == 1
        # A mended secret is tried again.
        (secrets / "missing.key").write_text("no secret")
        eventually(lambda: len(receiver.requests) == 2)
