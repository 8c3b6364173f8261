"""What must not be read: secrets of destinations, payloads and answers of others, and what the server's log repeats of
them."""
import json

import psycopg2
import pytest

import hostile
from conftest import cluster, eventually, make_database, run
from receiver import Answer, Receiver
from relay_process import Relay
from test_security_access import ACCESSES

SECRET = "hunter2-hunter2"
OPTIONS = {"url": "https://example.com", "secret": SECRET, "headers": {"Authorization": "Bearer " + SECRET}}


def refused(session, query, *parameters, sqlstate="42501"):
    error = hostile.refused(session, query, *parameters, sqlstate=sqlstate)
    assert SECRET not in str(error)
    return error


def new_lines(server, action):
    before = len(server.log())
    action()
    return server.log()[before:]


# -- secrets of destinations --

def test_an_administrator_does_not_read_the_secrets_of_others(db, role):
    """Neither directly nor by giving itself, or somebody else, the access that does."""
    alice, mallory, friend = role("admin"), role("admin"), role()
    run(db.connect(user=alice), "SELECT outbox_create_destination('d', 'http', %s)", json.dumps(OPTIONS))
    session = db.connect(user=mallory)
    refused(session, "SELECT * FROM outbox_relay_options('d')")
    for name in (mallory, friend):
        assert "secrets" in refused(session, "SELECT retrysafe_grant(%s, 'relay')", name).diag.message_hint
    refused(session, "SELECT retrysafe_apply_grant(%s, 'relay')", mallory)
    refused(session, "SELECT outbox_alter_destination('d', '{\"url\": \"https://mallory.example\"}')")
    refused(session, "SELECT outbox_alter_destination('d', '{}')")
    for view in ("outbox_status", "outbox_kind_options", "outbox_workers"):
        assert SECRET not in str(run(session, f"SELECT * FROM {view}"))
    refused(session, "SELECT * FROM retrysafe.outbox_destinations")


def test_the_right_to_call_counts_and_not_who_the_session_is(db, role):
    """A function of mallory's that runs with her rights, in a session of a superuser."""
    mallory = role("admin")
    db.sql(f"CREATE SCHEMA trap AUTHORIZATION {mallory}")
    run(db.connect(user=mallory), f"""CREATE FUNCTION trap.spring() RETURNS void LANGUAGE sql SECURITY DEFINER
        SET search_path = retrysafe AS $$ SELECT retrysafe_grant('{mallory}', 'relay') $$""")
    refused(db.connect(), "SELECT trap.spring()")
    session = db.connect()
    run(session, f"SET ROLE {mallory}")
    refused(session, f"SELECT retrysafe_grant('{mallory}', 'relay')")


def test_who_reads_secrets_hands_that_on(db, role):
    both, friend = role("admin", "relay"), role()
    session = db.connect(user=both)
    run(session, "SELECT retrysafe_grant(%s, 'relay')", friend)
    run(session, "SELECT outbox_create_destination('d', 'http', %s)", json.dumps(OPTIONS))
    assert SECRET in str(run(db.connect(user=friend), "SELECT * FROM retrysafe.outbox_relay_options('d')"))
    run(session, "SELECT retrysafe_revoke(%s, 'relay')", friend)
    refused(db.connect(user=friend), "SELECT * FROM retrysafe.outbox_relay_options('d')")
    db.sql("SELECT retrysafe_revoke(%s, 'admin')", both)
    refused(session, "SELECT * FROM retrysafe.outbox_relay_options('d')")


@pytest.mark.parametrize("statement", [
    "SELECT outbox_create_destination('d', 'http', '{options}', 'tomorrow')",
    "SELECT outbox_create_destination('d', 'no such kind', '{options}')",
    "SELECT outbox_create_destination('taken', 'http', '{options}')",
    "SELECT outbox_alter_destination('taken', '{options}', shards => 0)",
    "SELECT outbox_alter_destination('nobody', '{options}')",
    "DO $$ BEGIN PERFORM outbox_create_destination('d', 'http', '{options}', 'tomorrow'); END $$",
    "DO $$ BEGIN EXECUTE 'SELECT outbox_create_destination(''d'', ''http'', ''{options}'', ''tomorrow'')'; END $$"])
def test_the_statement_of_an_error_is_not_logged(server, db, statement):
    """By default the server logs the text of every statement that fails; here that text holds secrets."""
    session = db.connect()  # the server tells where it looks for a function's library, at its first call
    run(session, "SELECT outbox_create_destination('taken', 'http', '{\"url\": \"https://example.com\"}')")
    run(session, "SET log_min_messages = 'debug5'")
    run(session, "SET log_error_verbosity = 'verbose'")

    def fail():
        with pytest.raises(psycopg2.Error):
            run(session, statement.replace("{options}", json.dumps(OPTIONS)))
    lines = new_lines(server, fail)
    assert "ERROR:  RS2" in lines and SECRET not in lines


def test_an_error_of_other_functions_is_logged_with_its_statement(server, db):
    session = db.connect()
    lines = new_lines(server, lambda: refused(session, "SELECT outbox_drop_destination(NULL), 'seen'", sqlstate="RS214"))
    assert "STATEMENT:  SELECT outbox_drop_destination(NULL), 'seen'" in lines
    with pytest.raises(psycopg2.Error):
        run(session, "SELECT outbox_create_destination('d', 'no such kind', '{}')")
    lines = new_lines(server, lambda: refused(session, "SELECT outbox_drop_destination(NULL), 'again'", sqlstate="RS214"))
    assert "'again'" in lines, "what was hidden is over"


def test_a_wait_within_is_logged_without_its_statement(server, db):
    """Not only errors: log_lock_waits writes a line of its own."""
    holder = db.connect(autocommit=False)
    run(holder, "SELECT outbox_create_destination('d', 'pull')")
    session = db.connect()
    run(session, "SET log_lock_waits = on")
    run(session, "SET deadlock_timeout = '10ms'")
    run(session, "SET lock_timeout = '300ms'")
    lines = new_lines(server, lambda: refused(session, "SELECT outbox_create_destination('d', 'http', %s)",
                                              json.dumps(OPTIONS), sqlstate="55P03"))
    assert "still waiting for" in lines and SECRET not in lines
    holder.rollback()


# -- the worker --

def test_a_worker_says_nothing_of_payloads_and_secrets(server, db):
    """Not in pg_stat_activity, and not in the log at its most talkative, also not when events fail."""
    payload = json.dumps({"card": "4111-1111-1111-1111"})
    noisy = {"log_min_messages": "debug5", "log_statement": "all", "log_min_duration_statement": "0", "debug_print_parse": "on",
             "debug_print_plan": "on", "log_error_verbosity": "verbose", "log_parameter_max_length_on_error": "-1"}
    with Receiver() as receiver:
        db.sql("SELECT outbox_create_destination('d', 'http', %s, max_attempts => 2, backoff => '10 ms')",
               json.dumps(OPTIONS | {"url": receiver.url}))
        receiver.behave(lambda request: Answer(500 if len(receiver.requests) % 2 else 422, body=SECRET.encode()))
        for name, value in noisy.items():
            server.set(name, value)
        try:
            before = len(server.log())
            session = db.connect()
            for name in noisy:  # only what the worker writes counts here
                run(session, f"SET {name} = DEFAULT" if name == "debug_print_parse" else f"RESET {name}")
            run(session, "SET log_min_messages = 'panic'; SET log_statement = 'none'; SET log_min_duration_statement = -1;"
                         " SET debug_print_parse = off; SET debug_print_plan = off")
            run(session, "SELECT outbox_emit(NULL, 'e' || i, 't', %s) FROM generate_series(1, 5) i", payload)
            activity = []

            def all_dead():
                activity.extend(run(session, "SELECT query FROM pg_stat_activity WHERE backend_type LIKE 'retrysafe%%'"))
                return run(session, "SELECT dead FROM outbox_status") == [(5,)]
            eventually(all_dead)
        finally:
            for name in noisy:
                server.set(name, None)
    lines = server.log()[before:]
    assert "retrysafe" in lines and "4111-1111" not in lines and SECRET not in lines
    assert activity and "4111" not in str(activity) and SECRET not in str(activity)
    assert SECRET not in str(db.sql("SELECT reason FROM outbox_dead_letters"))


@pytest.fixture
def port():
    """Of a server that agrees to TLS, in the words of PostgreSQL, and says nothing more."""
    def talk(line):
        line.read()
        line.send(b"S")
        line.read()

    server = hostile.Hostile(talk)
    yield server.port
    server.close()


LOGIN = {"host": "127.0.0.1", "user": "u", "password": "p"}
WITH_TLS = {
    "http": lambda port: {"url": f"https://127.0.0.1:{port}/"},
    "kafka": lambda port: {"brokers": f"127.0.0.1:{port}", "topic": "t", "tls": True},
    "nats": lambda port: {"servers": f"tls://127.0.0.1:{port}", "subject": "s"},
    "postgres": lambda port: LOGIN | {"port": port, "dbname": "d", "sslmode": "require"},
    "rabbitmq": lambda port: LOGIN | {"port": port, "tls": True, "exchange": "e", "routing_key": "k"},
    "redis": lambda port: LOGIN | {"port": port, "tls": True, "stream": "s"},
}


@pytest.mark.parametrize("kind", WITH_TLS)
def test_an_error_does_not_tell_where_the_server_keeps_its_files(db, role, secrets, port, kind):
    """The setting that names the folder is hidden from ordinary roles. Options start there."""
    (secrets / "empty").touch()
    for name, files in (("authority", ["ca_file"]), ("certificate", ["cert_file", "key_file"])):
        db.sql("SELECT outbox_create_destination(%s, %s, %s)", name, kind,
               json.dumps(WITH_TLS[kind](port) | dict.fromkeys(files, "empty")))
    db.sql("SELECT outbox_emit(NULL, 'e', 't', '{}')")
    session = db.connect(user=role("monitor"))
    errors = "SELECT name::text, last_error FROM outbox_status WHERE last_error IS NOT NULL"
    eventually(lambda: len(run(session, errors)) == 2)
    assert str(secrets) not in str(run(session, errors))


def test_an_error_of_a_relay_does_not_tell_where_it_keeps_its_files(db, secrets, port):
    (secrets / "empty").touch()
    for name, option in (("certificate", "ca_file"), ("signature", "secret_file")):
        db.sql("SELECT outbox_create_destination(%s, 'http', %s, workers => false)", name,
               json.dumps(WITH_TLS["http"](port) | {option: "empty"}))
    db.sql("SELECT outbox_emit(NULL, 'e', 't', '{}')")
    arguments = "--allowed-addresses", "127.0.0.1", "--secret-directory", secrets
    with Relay(db, "certificate", *arguments) as relay:
        error = eventually(lambda: db.value("SELECT last_error FROM outbox_status WHERE name = 'certificate'"))
        assert str(secrets) not in error + relay.log()
    with Relay(db, "signature", *arguments) as relay:  # which ends at once
        assert relay.wait() == 2
        assert 'the file empty of option \\"secret\\" is empty' in relay.log() and str(secrets) not in relay.log()


def test_errors_of_workers_of_other_databases_are_not_shown(server, db, role):
    """An error quotes what a far side said, of events of that database."""
    other = make_database(server)
    with Receiver() as receiver:
        receiver.behave(Answer(503, body=b"no such customer: Ada"))
        for database in (db, other):
            database.sql("SELECT outbox_create_destination('billing', 'http', %s)", json.dumps({"url": receiver.url}))
            database.sql("SELECT outbox_emit(NULL, 'e', 't', '{}')")
            eventually(lambda: run(database.connect(), "SELECT last_error LIKE '%Ada%' FROM outbox_workers"
                                                       " WHERE database = current_database()") == [(True,)])
    monitor = role("monitor")
    query = "SELECT database::text, last_error IS NOT NULL, error_at IS NOT NULL FROM retrysafe.outbox_workers" \
            " WHERE database IN (%s, %s)"
    assert dict((row[0], row[1:]) for row in run(db.connect(user=monitor), query, db.name, other.name)) == {
        db.name: (True, True), other.name: (False, False)}
    db.sql(f"GRANT pg_read_all_stats TO {monitor}")
    assert all(row[1] for row in run(db.connect(user=monitor), query, db.name, other.name))
    db.sql(f"REVOKE pg_read_all_stats FROM {monitor}")
    other.close()
    db.sql(f"DROP DATABASE {other.name} WITH (FORCE)")


# -- payloads and answers of others --

def test_a_service_reads_no_answer_without_the_digest_of_its_request(db, role):
    owner, other = db.connect(user=role("write"), autocommit=False), db.connect(user=role("write"))
    run(owner, "SELECT idem_begin('pay-1', idem_hash('{\"card\": \"4111\"}'))")
    run(owner, "SELECT idem_complete('pay-1', '{\"receipt\": \"r-1\"}')")
    owner.commit()
    refused(other, "SELECT idem_peek('pay-1')")
    refused(other, "SELECT idem_peek('pay-1', NULL::bytea)")
    refused(other, "SELECT idem_peek('pay-1', request_hash => NULL::bytea, scope => '')")
    refused(other, "SELECT idem_peek('pay-1', NULL::text)")
    for function in ("idem_begin", "idem_try_begin", "idem_peek"):
        assert run(other, f"SELECT * FROM {function}('pay-1', '\\x00'::bytea)") == [("conflict", None, None)]
    with pytest.raises(psycopg2.Error) as error:
        run(other, "SELECT idem_run('pay-1', '{}', 'pg_catalog.jsonb_strip_nulls(jsonb)')")
    assert "r-1" not in str(error.value) and "4111" not in str(error.value)
    refused(other, "SELECT idem_complete('pay-1', '{}')", sqlstate="RS005")
    refused(other, "SELECT idem_forget('pay-1')")


@pytest.mark.parametrize("query", [
    "SELECT outbox_emit(NULL, 'order-7', 'order.placed', '{\"card\": \"5000\"}')",
    "SELECT outbox_emit(NULL, 'order-7', 'guess', '{}')",
    "SELECT outbox_emit(NULL, 'order-7', 'order.placed', '{}', 'guess')",
    "SELECT outbox_emit(NULL, 'order-7', 'order.placed', '{}', deliver_after => now() + interval '1 h')"])
def test_a_conflict_of_event_keys_shows_nothing_of_the_other_event(server, db, role, query):
    db.sql("SELECT outbox_emit(NULL, 'order-7', 'order.placed', '{\"card\": \"4111\"}', 'customer-4111', '{\"h\": \"4111\"}')")
    session = db.connect(user=role("write"))
    run(session, "SET client_min_messages = 'debug5'")
    told = []
    lines = new_lines(server, lambda: told.append(refused(session, query, sqlstate="RS102")))
    assert "4111" not in lines + str(told[0]) + str(session.notices)
    run(session, "SET client_min_messages = 'notice'")
    for statement in ("SELECT * FROM outbox_events", "SELECT * FROM outbox_scheduled_events", "SELECT * FROM outbox_dead_letters",
                      "SELECT * FROM outbox_fetch('d')", "SELECT * FROM retrysafe.outbox_log_1", "TABLE retrysafe.outbox_parked",
                      "COPY retrysafe.outbox_log TO STDOUT", "CREATE STATISTICS s ON payload, headers FROM retrysafe.outbox_log_1"):
        refused(session, statement)
    # Statistics of the planner hold values too.
    db.sql("ANALYZE")
    assert run(session, "SELECT count(*) FROM pg_stats WHERE schemaname = 'retrysafe'") == [(0,)]


def test_a_publisher_sees_only_events_of_destinations_and_nothing_else(db, role):
    db.sql("SELECT outbox_create_destination('d', 'pull')")
    db.sql("SELECT outbox_create_destination('hook', 'http', %s)", json.dumps(OPTIONS | {"url": "http://127.0.0.1:1"}))
    session = db.connect(user=role("consume"))
    run(session, "SELECT * FROM outbox_fetch('d')")
    assert SECRET not in str(run(session, "SELECT * FROM outbox_relay_destination('hook')"))
    refused(session, "SELECT * FROM outbox_relay_options('hook')")
    for statement in ("SELECT * FROM outbox_status", "SELECT * FROM outbox_events", "SELECT outbox_redacted_options('http', '{}')",
                      "SELECT outbox_emit(NULL, 'e', 't', '{}')", "SELECT idem_begin('k', 'h'::text)",
                      "SELECT outbox_pause('d')", "SELECT outbox_discard('d')"):
        refused(session, statement)


# -- settings --

@pytest.mark.parametrize("accesses", [(), *((access,) for access in ACCESSES), ACCESSES], ids=lambda a: "+".join(a) or "none")
def test_no_ordinary_role_changes_more_than_two_settings(server, db, role, accesses):
    name = role(*accesses)
    session = db.connect(user=name)
    settings = db.sql("SELECT name, context, setting FROM pg_settings WHERE name LIKE 'retrysafe.%%'")
    assert {setting for setting, context, _ in settings if context == "user"} == {"retrysafe.on_lost_claim", "retrysafe.traceparent"}
    for setting, value in [(name, value) for name, context, value in settings if context != "user"]:
        for statement in ("SET {} = '{}'", "SELECT set_config('{}', '{}', false)", f"ALTER ROLE {name} SET {{}} = '{{}}'",
                          f"ALTER DATABASE {db.name} SET {{}} = '{{}}'", "ALTER SYSTEM SET {} = '{}'"):
            with pytest.raises(psycopg2.Error) as error:
                run(session, statement.format(setting, value))
            assert error.value.pgcode in ("42501", "55P02"), (statement, error.value)
        with pytest.raises(psycopg2.OperationalError, match="permission denied to set|cannot be changed"):
            psycopg2.connect(server.dsn(db.name, name), options=f"-c {setting}={value}")
    for setting in ("allowed_addresses", "allowed_secret_directory"):
        refused(session, f"SHOW retrysafe.{setting}")
        refused(session, f"SELECT current_setting('retrysafe.{setting}')")
        assert run(session, "SELECT setting FROM pg_settings WHERE name = %s", f"retrysafe.{setting}") == []


def test_nor_by_naming_a_setting_before_the_library_is_loaded():
    """When it is only a word with a dot in it, which everybody may set."""
    with cluster("shared_preload_libraries = ''") as server:
        database = make_database(server)
        database.sql("CREATE ROLE mallory LOGIN; GRANT pg_read_server_files TO mallory")
        for access in ("write", "admin"):
            database.sql("SELECT retrysafe_grant('mallory', %s)", access)
        settings = {"max_payload_bytes": "256MB", "allowed_secret_directory": "/etc"}
        beside = psycopg2.connect(server.dsn(database.name, "mallory"),
                                  options=" ".join(f"-c retrysafe.{name}={value}" for name, value in settings.items()))
        within = database.connect(user="mallory")
        for name, value in settings.items():
            run(within, f"SET retrysafe.{name} = '{value}'")
            for whom in ("ROLE mallory", f"DATABASE {database.name}"):
                refused(within, f"ALTER {whom} SET retrysafe.{name} = '{value}'")
        for session in (beside, within):
            session.autocommit = True
            refused(session, "SELECT outbox_emit(NULL, 'e', 't', to_jsonb(repeat('x', 2000000)))", sqlstate="RS103")
            error = refused(session, "SELECT outbox_create_destination('d', 'http', '{\"url\": \"https://example.com\","
                                     " \"secret_file\": \"passwd\"}')", sqlstate="RS203")
            assert "no directory is allowed" in str(error)
            assert any("permission denied to set parameter" in notice for notice in session.notices)
        beside.close()
        database.close()
