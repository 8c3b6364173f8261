"""Settings of a role or a database reach every process that connects to it. None of them may change what is done."""
import json
import re

import psycopg2
import pytest

from conftest import cluster, eventually, make_database, run
from receiver import Receiver
from relay_process import Relay

# What a setting could change: whether a statement runs, what it means, how a value is written.
HOSTILE = {
    "array_nulls": "off", "bytea_output": "escape", "check_function_bodies": "off", "client_encoding": "LATIN1",
    "client_min_messages": "debug5", "commit_delay": "1000", "commit_siblings": "0", "constraint_exclusion": "on",
    "createrole_self_grant": "set, inherit", "cursor_tuple_fraction": "0", "DateStyle": "German, DMY", "deadlock_timeout": "1ms",
    "debug_parallel_query": "on", "debug_pretty_print": "on", "default_statistics_target": "1",
    "default_tablespace": "nowhere", "default_toast_compression": "pglz", "default_transaction_deferrable": "on",
    "default_transaction_isolation": "serializable", "default_transaction_read_only": "on", "enable_bitmapscan": "off",
    "enable_indexonlyscan": "off", "enable_indexscan": "off", "enable_nestloop": "off", "enable_seqscan": "off",
    "enable_sort": "off", "escape_string_warning": "on", "exit_on_error": "on", "extra_float_digits": "-15", "force_parallel_mode": "on",
    "from_collapse_limit": "1", "geqo_threshold": "2", "gin_fuzzy_search_limit": "1", "idle_in_transaction_session_timeout": "1",
    "idle_session_timeout": "1", "IntervalStyle": "sql_standard", "jit_above_cost": "0", "lc_messages": "C.UTF-8",
    "lc_monetary": "C.UTF-8", "lc_numeric": "C.UTF-8", "lc_time": "C.UTF-8", "lock_timeout": "1", "log_min_messages": "fatal",
    "log_statement": "all", "parallel_setup_cost": "0", "plan_cache_mode": "force_generic_plan", "quote_all_identifiers": "on",
    "restrict_nonsystem_relation_kind": "view", "role": "intruder", "row_security": "off", "search_path": "nowhere", "session_preload_libraries": "nothing",
    "session_authorization": "intruder", "session_replication_role": "replica", "standard_conforming_strings": "off", "statement_timeout": "1",
    "synchronize_seqscans": "off", "synchronous_commit": "remote_apply", "temp_buffers": "100", "temp_tablespaces": "nowhere",
    "TimeZone": "Asia/Kathmandu", "timezone_abbreviations": "Australia", "track_activities": "off", "track_counts": "off",
    "transaction_timeout": "1", "transform_null_equals": "on", "wal_compression": "on", "work_mem": "64", "xmlbinary": "hex",
    "xmloption": "document"}
# A session that asks for these cannot do what the test needs of it.
OF_SESSIONS = {"search_path": "retrysafe,public", "role": "none", "statement_timeout": "0", "lock_timeout": "0", "transaction_timeout": "0",
               "idle_session_timeout": "0", "idle_in_transaction_session_timeout": "0", "default_transaction_read_only": "off",
               "default_transaction_isolation": "read committed", "default_transaction_deferrable": "off",
               "client_encoding": "UTF8", "synchronous_commit": "local", "client_min_messages": "warning", "deadlock_timeout": "1s",
               "default_tablespace": "", "temp_tablespaces": "", "session_preload_libraries": "", "exit_on_error": "off",
               "standard_conforming_strings": "on", "restrict_nonsystem_relation_kind": "",
               "debug_parallel_query": "off", "force_parallel_mode": "off"}  # parallel workers have the role's transaction_timeout

PARALLEL_WORKER = 'starting background worker process "parallel worker for PID'


@pytest.fixture(scope="module")
def own():
    with cluster("retrysafe.poll_interval = 200ms", "retrysafe.idem_rotation_age = 1s", "retrysafe.outbox_rotation_age = 1s",
                 "retrysafe.outbox_retention = 0", "log_min_messages = debug1") as server:
        connection = server.connect()
        run(connection, "CREATE ROLE intruder")
        connection.close()
        yield server


@pytest.fixture(scope="module")
def receiver():
    """Refuses one event, once in each database."""
    refused = set()

    def answer(request):
        if request.header("ce-type") != "order.refused" or request.path in refused:
            return 204
        refused.add(request.path)
        return 503
    with Receiver() as r:
        r.behave(answer)
        yield r


@pytest.fixture(scope="module")
def expected(own, receiver):
    return Scene(own, receiver, "plain").work()


def renew_worker(admin, database):
    """It has the settings of its start."""
    worker = "FROM pg_stat_activity WHERE backend_type = 'retrysafe worker' AND datname = %s"
    (before,) = eventually(lambda: run(admin, f"SELECT pid {worker}", database))
    run(admin, f"SELECT pg_terminate_backend(pid) {worker}", database)
    eventually(lambda: run(admin, f"SELECT pid {worker}", database) not in ([], [before]))


class Scene:
    """The same work in each database, and what is seen of it outside."""

    def __init__(self, server, receiver, name):
        self.server, self.receiver, self.name = server, receiver, name
        self.options = ""
        make_database(server, name)

    def harden(self, whose):
        """Such settings are those of the database, or of the role that workers connect as. Its worker starts anew."""
        admin = self.server.connect()
        known = {name for (name,) in run(admin, "SELECT name FROM pg_settings")} | {"role", "session_authorization"}  # not shown there
        for name in HOSTILE.keys() & known:
            run(admin, f"ALTER {whose} SET {name} = %s", HOSTILE[name])
        self.options = " ".join(f"-c {name}={value}".replace("read committed", "read\\ committed")
                                for name, value in OF_SESSIONS.items() if name in known) + " -c jit=off"
        renew_worker(admin, self.name)
        admin.close()

    def connect(self):
        connection = psycopg2.connect(self.server.dsn(self.name), options=self.options)
        connection.autocommit = True
        return connection

    def work(self):
        session = self.connect()
        run(session, "SET search_path = retrysafe, public")
        run(session, "CREATE TABLE public.calls (serial bigint GENERATED ALWAYS AS IDENTITY, event jsonb)")
        run(session, """CREATE FUNCTION public.note(event jsonb) RETURNS void LANGUAGE sql AS
                        $$INSERT INTO public.calls (event) VALUES (event || jsonb_build_object('of', session_user))$$""")
        run(session, """CREATE FUNCTION public.refuse(event jsonb) RETURNS void LANGUAGE plpgsql AS
                        $$BEGIN RAISE EXCEPTION 'refused'; END$$""")
        run(session, "CREATE FUNCTION public.handle(jsonb) RETURNS jsonb LANGUAGE sql AS $$SELECT $1 || '{\"done\": 1.10}'$$")
        run(session, "SELECT outbox_create_destination('hook', 'http', %s, backoff => '100 ms', batch_events => 3)",
            json.dumps({"url": f"{self.receiver.url}{self.name}", "secret": "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLw=="}))
        run(session, "SELECT outbox_create_destination('f', 'function', '{\"function\": \"public.note\"}')")
        run(session, """SELECT outbox_create_destination('r', 'function', '{"function": "public.refuse"}', max_attempts => 1,
                                                         event_types => '{order.refused}')""")
        run(session, "SELECT outbox_create_destination('p', 'pull', shards => 2)")
        payload = '{"float": 0.1, "big": 1e300, "precise": 12345678901234567890.10, "text": "é😀\\\\ \'", "null": null, "array": [null, 1]}'
        for i in range(7):
            run(session, "SELECT outbox_emit(NULL, %s, 'order.placed', %s, %s, headers => '{\"a\": \"b\"}', scope => 's')",
                f"e{i}", payload, f"o{i % 3}")
        run(session, "SELECT outbox_emit(NULL, 'refused', 'order.refused', %s)", payload)
        run(session, "SELECT outbox_emit(NULL, 'delayed', 'order.late', %s, deliver_after => clock_timestamp() + '300 ms')", payload)
        run(session, "SELECT idem_run('k', '{\"a\": 1.50}', 'public.handle(jsonb)')")
        replay = run(session, "SELECT outcome, response::text, status FROM idem_begin('k', idem_hash('{\"a\": 1.50}'))")
        run(session, "BEGIN")
        run(session, "SELECT idem_begin('short', 'h', ttl => '1 s')")
        run(session, "SELECT idem_complete('short', '1')")
        run(session, "COMMIT")
        eventually(lambda: run(session, "SELECT name FROM outbox_status WHERE state <> 'idle' AND name <> 'p'") == [], timeout=60)
        pulled = []

        def pull():
            while rows := run(session, "SELECT batch, event_key, payload::text, headers::text, attempt FROM outbox_fetch('p', 100)"):
                pulled.extend(row[1:] for row in rows)
                run(session, "SELECT outbox_ack(%s)", rows[0][0])
            return "delayed" in {row[0] for row in pulled}  # an event that is not due yet keeps nobody from being idle
        eventually(pull)
        # What workers do for the tables goes on as well: answers expire, rings turn.
        eventually(lambda: run(session, "SELECT count(*) FROM idempotency_records WHERE key = 'short'") == [(0,)])
        eventually(lambda: run(session, """SELECT count(DISTINCT ring) FROM ring_status WHERE generation > 1
                                            AND ring IN ('records', 'log')""") == [(2,)], timeout=40)
        called = run(session, r"""SELECT (event - 'id' - 'created_at')::text,
                                         event ->> 'created_at' ~ '^\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{6}Z$'
                                    FROM public.calls ORDER BY event ->> 'key', serial""")
        session.close()
        requests = [self._seen(r) for r in self.receiver.requests if r.path == f"/{self.name}"]
        return {"requests": sorted(set(requests)), "called": called, "pulled": sorted(map(str, pulled)), "replay": replay}

    def _seen(self, request):
        """Without what is another in each database, or at each time, but for its form."""
        headers = {name.lower(): value for name, value in request.headers}
        form = {"ce-id": r"[0-9a-f-]{36}", "ce-time": r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{6}Z", "webhook-id": r"[0-9a-f-]{36}",
                "webhook-timestamp": r"\d{10}", "webhook-signature": r"v1,[A-Za-z0-9+/=]{44}"}
        for name, pattern in form.items():
            assert re.fullmatch(pattern, headers[name]), (name, headers[name])
            headers[name] = "as it should be"
        headers["ce-source"] = headers["ce-source"].replace(self.name, "NAME")
        headers["host"] = "there"
        return json.dumps(headers, sort_keys=True), request.body


@pytest.mark.slow
@pytest.mark.parametrize("whose", ["DATABASE hostile", "ROLE postgres IN DATABASE hostile_too"])
def test_nothing_changes(own, receiver, expected, whose):
    scene = Scene(own, receiver, whose.split()[-1])
    scene.harden(whose)
    seen = scene.work()
    for part, of in expected.items():
        assert (part, seen[part]) == (part, of)


def test_nothing_is_done_in_parallel_workers(own, receiver):
    """They have the timeouts of the role before they are told those of whom they work for."""
    db = make_database(own, "parallel")
    ((force,),) = db.sql("SELECT name FROM pg_settings WHERE name IN ('force_parallel_mode', 'debug_parallel_query')")
    db.sql(f"ALTER DATABASE parallel SET {force} = on")
    db.sql("SELECT count(*) FROM pg_class")
    known = own.log().count(PARALLEL_WORKER)
    assert known > 0, "this is how they show"
    ordinary = psycopg2.connect(own.dsn("parallel"), options=f"-c {force}=off")
    ordinary.autocommit = True
    renew_worker(ordinary, db.name)
    run(ordinary, """CREATE FUNCTION public.look(event jsonb) RETURNS void LANGUAGE plpgsql AS
                     $$BEGIN PERFORM count(*) FROM pg_class; END$$""")
    run(ordinary, "SELECT outbox_create_destination('f', 'function', '{\"function\": \"public.look\"}')")
    run(ordinary, "SELECT outbox_create_destination('h', 'http', %s, workers => false)", json.dumps({"url": receiver.url}))
    run(ordinary, "SELECT outbox_emit(NULL, 'e', 't', '1')")
    relay = Relay(db, "--allowed-addresses", "127.0.0.1", "--drain", "h")
    assert relay.wait() == 0, relay.log()
    eventually(lambda: run(ordinary, "SELECT name, delivered FROM outbox_status ORDER BY name") == [("f", 1), ("h", 1)])
    ordinary.close()
    assert own.log().count(PARALLEL_WORKER) == known
