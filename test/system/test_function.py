"""The destination kind "function": called in this database, effect and progress in one transaction."""
import json
import time

import psycopg2
import pytest

from conftest import eventually, in_spite_of_crashes, kill, run
from null_destination import NullDestination

HANDLER = """
CREATE SCHEMA app AUTHORIZATION clerk;
SET ROLE clerk;
CREATE TABLE app.effects (serial bigint GENERATED ALWAYS AS IDENTITY, key text UNIQUE, event jsonb, xid xid8 DEFAULT pg_current_xact_id());
CREATE TABLE app.parent (id int PRIMARY KEY);
CREATE TABLE app.child (id int PRIMARY KEY, parent int REFERENCES app.parent DEFERRABLE INITIALLY DEFERRED);
CREATE FUNCTION app.handle(event jsonb) RETURNS void LANGUAGE plpgsql AS $$
BEGIN
  INSERT INTO app.effects (key, event) VALUES (event->>'key', event);
  IF event->'payload' ? 'sql' THEN EXECUTE event->'payload'->>'sql'; END IF;
  IF event->'payload' ? 'sqlstate' THEN
    RAISE EXCEPTION 'handler says no' USING ERRCODE = event->'payload'->>'sqlstate', DETAIL = 'secret detail';
  END IF;
END $$;
RESET ROLE;
"""

REFUSE = """
CREATE FUNCTION public.refuse() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN RAISE EXCEPTION 'no more rows'; END $$;
DO $$ BEGIN
  FOR i IN 1..3 LOOP
    EXECUTE format('CREATE TRIGGER refuse BEFORE INSERT ON outbox_batches_%s FOR EACH ROW EXECUTE FUNCTION public.refuse()', i);
  END LOOP;
END $$;
"""


@pytest.fixture
def clerk(db):
    """A role that may make destinations, and nothing else; a connection of it."""
    db.sql("CREATE ROLE clerk LOGIN")
    db.sql("SELECT retrysafe.retrysafe_grant('clerk', 'admin')")
    run(db.connect(), HANDLER)
    yield db.connect("clerk")
    db.sql("SELECT outbox_drop_destination(name) FROM outbox_status")
    db.sql("DROP OWNED BY clerk CASCADE")
    db.sql("DROP ROLE clerk")


def create(connection, options=None, name="f", **fields):
    fields = {"backoff": "20 milliseconds", "backoff_max": "50 milliseconds", **fields}
    more = "".join(f", {field} => %s" for field in fields)
    run(connection, f"SELECT outbox_create_destination(%s, 'function', %s{more})", name,
        json.dumps({"function": "app.handle", **(options or {})}), *fields.values())


def emit(db, *events):
    """All in one transaction: (key, payload[, ordering key])."""
    connection = db.connect(autocommit=False)
    for key, payload, *ordering_key in events:
        run(connection, "SELECT outbox_emit(NULL, %s, 't', %s, %s)", key, json.dumps(payload),
            ordering_key[0] if ordering_key else None)
    connection.commit()
    connection.close()


def effects(db):
    return [row[0] for row in db.sql("SELECT key FROM app.effects ORDER BY serial")]


def dead(db):
    return dict(db.sql("SELECT event_key, reason FROM outbox_dead_letters"))


def settled(db, delivered, dead_letters=0):
    seen = []

    def all_settled():
        seen[:] = [effects(db), dead(db), db.sql("SELECT * FROM outbox_status")]
        return len(seen[0]) == delivered and len(seen[1]) == dead_letters

    eventually(lambda: in_spite_of_crashes(all_settled), message=seen)


def worker_pid(db):
    return eventually(lambda: db.sql("SELECT pid FROM pg_stat_activity WHERE backend_type = 'retrysafe worker'"
                                     " AND datname = current_database()"))[0][0]


def test_gets_the_event(db, clerk):
    create(clerk)
    payload = {"n": 1.50, "text": "é \" \\ \n \U0001f600"}
    db.sql("SELECT outbox_emit(NULL, 'e1', 'order.paid', %s, 'o1', %s, NULL, 'tenant')", json.dumps(payload),
           json.dumps({"h": "v"}))
    settled(db, 1)
    event = db.value("SELECT event FROM app.effects")
    assert event.pop("created_at").endswith("Z") and "T" in db.value("SELECT event->>'created_at' FROM app.effects")
    assert event == {"id": db.value("SELECT event_id::text FROM outbox_events"), "type": "order.paid", "key": "e1",
                     "scope": "tenant", "ordering_key": "o1", "payload": payload, "headers": {"h": "v"}, "attempt": 1}
    assert db.value("SELECT (event->>'created_at')::timestamptz = created_at FROM app.effects, outbox_events")


def test_nulls_and_order(db, clerk):
    create(clerk)
    db.sql("SELECT outbox_emit(NULL, 'null', 't', NULL)")
    settled(db, 1)
    assert db.sql("SELECT event->'payload', event->'headers' FROM app.effects") == [(None, {})]
    emit(db, *[(f"e{i:03}", {"i": i}, "k") for i in range(200)])
    settled(db, 201)
    assert effects(db)[1:] == [f"e{i:03}" for i in range(200)]
    assert db.value("SELECT count(DISTINCT xid) FROM app.effects") < 20, "batches"


def test_runs_as_its_creator_and_restricted(db, clerk):
    create(clerk, max_attempts=1)
    emit(db, ("who", {"sql": "UPDATE app.effects SET event = to_jsonb(current_user::text) WHERE key = 'who'"}))
    settled(db, 1)
    assert db.value("SELECT event FROM app.effects") == "clerk"
    forbidden = {
        "role": "SET ROLE postgres", "reset": "RESET ROLE", "session": "RESET SESSION AUTHORIZATION",
        "auth": "SET SESSION AUTHORIZATION postgres", "table": "SELECT FROM pg_authid", "temp": "CREATE TEMP TABLE x ()",
        "listen": "LISTEN x", "prepare": "PREPARE x AS SELECT 1", "log": "DELETE FROM retrysafe.outbox_log",
        "hold": "DECLARE c CURSOR WITH HOLD FOR SELECT 1", "file": "COPY app.parent FROM '/etc/passwd'",
        "set": "SET session_replication_role = replica"}
    emit(db, *[(key, {"sql": sql}) for key, sql in forbidden.items()])
    settled(db, 1, len(forbidden))
    assert set(dead(db)) == set(forbidden), dead(db)


def test_security_definer_is_what_it_was(db, clerk):
    run(db.connect(), """CREATE TABLE app.vault (key text); REVOKE ALL ON app.vault FROM clerk;
      CREATE FUNCTION app.deposit(key text) RETURNS void LANGUAGE sql SECURITY DEFINER SET search_path = pg_catalog, pg_temp
        AS 'INSERT INTO app.vault VALUES (key || session_user || current_user)'""")
    create(clerk)
    emit(db, ("e1", {"sql": "SELECT app.deposit('x')"}))
    settled(db, 1)
    assert db.value("SELECT key FROM app.vault") == "xpostgrespostgres"


def test_triggers_that_would_be_deferred_run_as_the_creator_and_belong_to_their_event(db, clerk):
    run(clerk, """CREATE FUNCTION app.note() RETURNS trigger LANGUAGE plpgsql AS $$
        BEGIN
          INSERT INTO app.seen VALUES (current_user);
          IF NEW.id = 13 THEN RAISE EXCEPTION 'no thirteen' USING ERRCODE = '22000'; END IF;
          RETURN NULL;
        END $$;
      CREATE TABLE app.seen (name text);
      CREATE TABLE app.items (id int);
      CREATE CONSTRAINT TRIGGER note AFTER INSERT ON app.items DEFERRABLE INITIALLY DEFERRED
        FOR EACH ROW EXECUTE FUNCTION app.note()""")
    create(clerk)
    emit(db, *[(f"e{i}", {"sql": f"INSERT INTO app.items VALUES ({i})"}) for i in (1, 13, 2)])
    settled(db, 2, 1)
    assert effects(db) == ["e1", "e2"] and dead(db) == {"e13": "22000: no thirteen"}
    assert db.sql("SELECT name, count(*) FROM app.seen GROUP BY 1") == [("clerk", 2)]


def test_constraints_are_never_deferred(db, clerk):
    create(clerk, max_attempts=1)
    good = [(f"e{i}", {"sql": f"INSERT INTO app.parent VALUES ({i}); INSERT INTO app.child VALUES ({i}, {i})"})
            for i in range(3)]
    emit(db, *good, ("orphan", {"sql": "INSERT INTO app.child VALUES (9, 9)"}),
         ("defer", {"sql": "SET CONSTRAINTS ALL DEFERRED; INSERT INTO app.child VALUES (8, 8)"}), ("last", {}))
    settled(db, 4, 2)
    assert dead(db)["orphan"].startswith("23503: ") and dead(db)["defer"].startswith("42501: ")


def test_a_failing_event_is_tried_again_and_then_dead(db, clerk):
    create(clerk, max_attempts=3)
    run(clerk, "CREATE SEQUENCE app.tries")
    emit(db, ("a", {}, "k1"), ("bad", {"sql": "SELECT nextval('app.tries')", "sqlstate": "P0001"}, "k2"), ("c", {}, "k1"))
    settled(db, 2, 1)
    assert effects(db) == ["a", "c"]
    assert dead(db) == {"bad": "P0001: handler says no"}
    assert db.value("SELECT last_value FROM app.tries") == 3


def test_unfit_content_is_not_tried_again(db, clerk):
    create(clerk, max_attempts=3)
    run(clerk, "CREATE SEQUENCE app.tries")
    emit(db, ("bad", {"sql": "SELECT nextval('app.tries')", "sqlstate": "22023"}), ("b", {}))
    settled(db, 1, 1)
    assert db.value("SELECT last_value FROM app.tries") == 1


def test_order_of_a_key_across_a_failure(db, clerk):
    run(clerk, "CREATE TABLE app.gate (open boolean)")
    create(clerk, max_attempts=1000)
    gate = {"sql": "DO $$ BEGIN IF NOT EXISTS (SELECT FROM app.gate) THEN RAISE EXCEPTION 'shut'; END IF; END $$"}
    emit(db, ("a1", {}, "a"), ("a2", gate, "a"), ("b1", {}, "b"), ("a3", {}, "a"), ("b2", {}, "b"))
    settled(db, 3)
    assert effects(db) == ["a1", "b1", "b2"]
    run(clerk, "INSERT INTO app.gate VALUES (true)")
    settled(db, 5)
    assert effects(db) == ["a1", "b1", "b2", "a2", "a3"]


def test_a_call_that_takes_too_long_fails(db, clerk):
    create(clerk, {"statement_timeout": "200ms"}, max_attempts=1)
    emit(db, ("a", {}), ("slow", {"sql": "SELECT pg_sleep(60)"}), ("c", {}))
    settled(db, 2, 1)
    assert dead(db)["slow"].startswith("57014: ")


def test_a_cancelled_call_fails_and_the_worker_goes_on(db, clerk):
    create(clerk, max_attempts=1)
    emit(db, ("slow", {"sql": "SELECT pg_sleep(60)"}))
    pid = worker_pid(db)
    eventually(lambda: db.value("SELECT wait_event FROM pg_stat_activity WHERE pid = %s", pid) == "PgSleep")
    db.sql("SELECT pg_cancel_backend(%s)", pid)
    settled(db, 0, 1)
    emit(db, ("b", {}))
    settled(db, 1, 1)
    assert worker_pid(db) == pid


def test_a_function_that_catches_its_cancellation_does_not_keep_the_worker(db, clerk):
    create(clerk, {"statement_timeout": "100ms"})
    stubborn = """DO $$ BEGIN LOOP
      BEGIN PERFORM pg_sleep(60); EXCEPTION WHEN query_canceled THEN NULL; END;
    END LOOP; END $$"""
    emit(db, ("a", {"sql": stubborn}))
    pid = worker_pid(db)
    eventually(lambda: db.value("SELECT wait_event FROM pg_stat_activity WHERE pid = %s", pid) == "PgSleep")
    eventually(lambda: db.value("SELECT count(*) FROM pg_stat_activity WHERE pid = %s", pid) == 0, timeout=20)


EXIT = {"sql": "DO $$ BEGIN PERFORM set_config('exit_on_error', 'on', true); END $$", "sqlstate": "P0001"}
STUBBORN = {"sql": """DO $$ BEGIN WHILE EXISTS (SELECT FROM app.stop) LOOP
  BEGIN PERFORM pg_sleep(60); EXCEPTION WHEN query_canceled THEN NULL; END;
END LOOP; END $$"""}
LATE = {"sql": "DO $$ BEGIN PERFORM set_config('transaction_timeout', '1ms', true); PERFORM pg_sleep(60); END $$"}
ENDED = "the worker ended while the event was handled"


@pytest.mark.parametrize("way", ["fatal", "stubborn", "late"])
def test_an_event_that_takes_the_worker_along_has_failed(db, clerk, way):
    if way == "late" and not db.sql("SELECT 1 FROM pg_settings WHERE name = 'transaction_timeout'"):
        pytest.skip("a setting of PostgreSQL 17")
    attempts = 1 if way == "stubborn" else 2  # it takes five seconds
    create(clerk, {"statement_timeout": "100ms" if way == "stubborn" else "10s"}, max_attempts=attempts, event_types=["t"])
    run(clerk, "CREATE TABLE app.stop AS SELECT 'x' AS mark; CREATE SEQUENCE app.tries")
    neighbour = NullDestination(db, event_types="'{n}'")
    deadly = {"fatal": EXIT, "stubborn": STUBBORN, "late": LATE}[way]
    emit(db, ("before", {}), ("bad", {**deadly, "sql": "SELECT nextval('app.tries');" + deadly["sql"]}, "k"), ("behind", {}, "k"),
         ("after", {}))
    db.sql("SELECT outbox_emit(NULL, 'n', 'n', '{}')")
    settled(db, 3, 1)
    assert set(effects(db)) == {"before", "behind", "after"} and dead(db) == {"bad": ENDED}
    assert db.value("SELECT last_value FROM app.tries") == attempts
    eventually(lambda: set(neighbour.delivered()) == {"n"})


def test_many_events_that_take_the_worker_along_stop_nobody_else(db, clerk):
    """The next worker has a while for the others before it calls for this destination again."""
    create(clerk, max_attempts=1, event_types=["t"])
    neighbour = NullDestination(db, options='"delay_ms": 100', event_types="'{n}'")
    emit(db, *((f"bad{i}", EXIT) for i in range(1000)))
    for i in range(3):
        deaths = len(dead(db))
        eventually(lambda: len(dead(db)) > deaths)
        db.sql("SELECT outbox_emit(NULL, %s, 'n', '{}')", f"n{i}")
        eventually(lambda: neighbour.status()["delivered"] == i + 1)
    assert len(dead(db)) < 100


def test_a_slow_neighbour_gets_its_turn_before_the_next_call(db, clerk):
    """What takes it longer than the function's rest is recorded before a call may end the worker again."""
    create(clerk, max_attempts=1, event_types=["t"])
    neighbour = NullDestination(db, options='"delay_ms": 2500', event_types="'{n}'")
    emit(db, *((f"bad{i}", EXIT) for i in range(6)))
    eventually(lambda: dead(db))
    db.sql("SELECT outbox_emit(NULL, 'n', 'n', '{}')")
    eventually(lambda: neighbour.status()["delivered"] == 1)
    assert len(dead(db)) < 6
    assert neighbour.delivered() == ["n"]


def test_an_event_that_took_the_worker_along_is_held_when_that_is_to_be_counted(db, clerk):
    """It is parked behind an earlier one of its key, and the attempt is counted when its turn has come."""
    create(clerk, max_attempts=2, backoff="2 seconds", backoff_max="2 seconds")
    run(clerk, "CREATE SEQUENCE app.tries; CREATE SEQUENCE app.ends")
    second_fails = "DO $$ BEGIN IF nextval('app.tries') = 2 THEN RAISE 'second'; END IF; END $$"
    emit(db, ("first", {"sql": second_fails}, "k"), ("bad", {**EXIT, "sql": "SELECT nextval('app.ends');" + EXIT["sql"]}, "k"))
    settled(db, 1, 1)
    assert effects(db) == ["first"] and dead(db) == {"bad": ENDED}
    assert db.sql("SELECT (SELECT last_value FROM app.tries), (SELECT last_value FROM app.ends)") == [(3, 2)]


def test_a_worker_that_is_told_to_end_says_nothing_of_the_event(db, clerk):
    """Though the function does not let it go, and is taken along."""
    create(clerk, max_attempts=1)
    run(clerk, "CREATE TABLE app.stop AS SELECT 'x' AS mark")
    emit(db, ("a", STUBBORN))
    pid = worker_pid(db)
    eventually(lambda: db.value("SELECT wait_event FROM pg_stat_activity WHERE pid = %s", pid) == "PgSleep")
    db.sql("SELECT pg_terminate_backend(%s)", pid)
    eventually(lambda: db.value("SELECT count(*) FROM pg_stat_activity WHERE pid = %s", pid) == 0)
    run(clerk, "DELETE FROM app.stop")
    settled(db, 1)
    assert db.sql("SELECT event -> 'attempt' FROM app.effects") == [(1,)]


def test_nothing_is_left_in_the_session(db, clerk):
    create(clerk, max_attempts=1)
    leave = """DO $$ BEGIN
      SET work_mem = '77MB'; PERFORM set_config('search_path', 'app', false); PERFORM set_config('my.mark', 'left', false);
      PERFORM pg_advisory_lock(4711); SET CONSTRAINTS ALL IMMEDIATE; END $$"""
    look = """UPDATE app.effects SET event = jsonb_build_object('work_mem', current_setting('work_mem'),
      'search_path', current_setting('search_path'), 'mark', current_setting('my.mark', true), 'locks',
      (SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND database = (SELECT oid FROM pg_database WHERE
      datname = current_database()) AND objid = 4711)) WHERE key = '%s'"""
    failing = {"sql": leave, "sqlstate": "P0001"}
    emit(db, ("before", {"sql": look % "before"}), ("leave", {"sql": leave}), ("after", {"sql": look % "after"}),
         ("fail", failing), ("later", {"sql": look % "later"}))
    settled(db, 4, 1)
    found = dict(db.sql("SELECT key, event FROM app.effects WHERE key <> 'leave'"))
    assert found["before"] == {"work_mem": "4MB", "search_path": "pg_catalog, pg_temp", "mark": None, "locks": 0}
    assert found["after"] | {"mark": None} == found["before"] and not found["after"]["mark"]
    assert found["later"] | {"mark": None} == found["before"] and not found["later"]["mark"]


def test_a_role_or_function_that_is_gone_stops_the_destination_and_burns_nothing(db, clerk):
    create(clerk, max_attempts=1)
    run(clerk, "ALTER FUNCTION app.handle(jsonb) RENAME TO elsewhere")
    emit(db, ("a", {}))
    eventually(lambda: "function app.handle(pg_catalog.jsonb) does not exist" in
               (db.value("SELECT last_error FROM outbox_status") or ""))
    run(clerk, "ALTER FUNCTION app.elsewhere(jsonb) RENAME TO handle")
    settled(db, 1)
    db.sql("REVOKE ALL ON FUNCTION app.handle(jsonb) FROM PUBLIC, clerk")
    emit(db, ("b", {}))
    eventually(lambda: "permission denied for function" in db.value("SELECT last_error FROM outbox_status"))
    db.sql("GRANT EXECUTE ON FUNCTION app.handle(jsonb) TO clerk")
    settled(db, 2)
    db.sql("ALTER ROLE clerk RENAME TO clerk2")
    emit(db, ("c", {}))
    eventually(lambda: 'role "clerk", as which' in db.value("SELECT last_error FROM outbox_status"))
    db.sql("ALTER ROLE clerk2 RENAME TO clerk")
    settled(db, 3)
    run(clerk, "ALTER FUNCTION app.handle(jsonb) RENAME TO elsewhere")
    run(clerk, "CREATE FUNCTION app.handle(jsonb) RETURNS int LANGUAGE sql AS 'SELECT 1'")
    emit(db, ("d", {}))
    eventually(lambda: "does not fit" in db.value("SELECT last_error FROM outbox_status"))
    run(clerk, "DROP FUNCTION app.handle(jsonb)")
    run(clerk, "ALTER FUNCTION app.elsewhere(jsonb) RENAME TO handle")
    settled(db, 4)


@pytest.mark.parametrize("other", [
    "PROCEDURE app.handle(event jsonb) LANGUAGE sql AS ''",
    "FUNCTION app.handle(event jsonb) RETURNS SETOF void LANGUAGE sql AS ''",
    "FUNCTION app.handle(event jsonb) RETURNS SETOF void LANGUAGE plpgsql AS 'BEGIN END'",
    "FUNCTION app.handle(event jsonb) RETURNS text LANGUAGE sql AS $$ SELECT '' $$",
    "AGGREGATE app.handle(jsonb) (SFUNC = jsonb_concat, STYPE = jsonb)"])
def test_what_took_the_functions_place_is_not_called(db, clerk, other):
    create(clerk, max_attempts=1)
    run(clerk, "ALTER FUNCTION app.handle(jsonb) RENAME TO elsewhere")
    run(clerk, f"CREATE {other}")
    emit(db, ("a", {}))
    eventually(lambda: "app.handle(pg_catalog.jsonb) does not fit" in (db.value("SELECT last_error FROM outbox_status") or ""))
    run(clerk, f"DROP {other.split()[0]} app.handle(jsonb)")
    run(clerk, "ALTER FUNCTION app.elsewhere(jsonb) RENAME TO handle")
    settled(db, 1)


def test_an_error_at_commit_is_found_to_be_one_events_fault(db, clerk):
    """A key that is begun and not completed fails the transaction when it commits, not before."""
    db.sql("SELECT retrysafe.retrysafe_grant('clerk', 'write')")
    create(clerk, max_attempts=1)
    begin = {"sql": "SELECT retrysafe.idem_begin('k', '\\x01'::bytea)"}
    emit(db, ("a", {}), ("b", {}), ("open", begin), ("c", {}))
    settled(db, 3, 1)
    assert effects(db) == ["a", "b", "c"] and set(dead(db)) == {"open"}


def begin_key(key, undone=False):
    """SQL that begins a key; undone: in an exception block that is rolled back."""
    begin = f"PERFORM retrysafe.idem_begin('{key}', '\\x01'::bytea);"
    return f"DO $$ BEGIN {f'BEGIN {begin} RAISE division_by_zero; EXCEPTION WHEN OTHERS THEN END;' if undone else begin} END $$"


@pytest.mark.parametrize("mode", ["warning", "error"])
def test_a_claim_goes_with_the_call_that_failed(db, clerk, mode):
    """It was undone as a whole, so nothing is left unprotected. The reason is that of the call, the first time."""
    db.sql("SELECT retrysafe.retrysafe_grant('clerk', 'write')")
    db.sql(f'ALTER DATABASE "{db.name}" SET retrysafe.on_lost_claim = {mode}')
    db.sql("SELECT pg_terminate_backend(pid, 10000) FROM pg_stat_activity"
           " WHERE backend_type = 'retrysafe worker' AND datname = current_database()")
    create(clerk, max_attempts=3)
    plain, undone, again, lost = (f"{mode}-{name}" for name in ("plain", "undone", "again", "lost"))
    bad = [(key, {"sql": begin_key(key, undone=key == undone), "sqlstate": "22023"}) for key in (plain, undone, again)]
    answer = f"; SELECT retrysafe.idem_complete('{again}')"
    emit(db, ("before", {}), *bad, ("after", {"sql": begin_key(again) + answer}))
    settled(db, 2, 3)
    assert db.sql("SELECT event_key, attempts, reason FROM outbox_dead_letters ORDER BY id") == [
        (key, 1, "22023: handler says no") for key, _ in bad]
    assert not [key for key, _ in bad if f'"{key}" was rolled back' in db.server.log()]

    # What a call loses that does not fail is said, and is not made up for by one that fails.
    emit(db, ("loses", {"sql": begin_key(lost, undone=True)}), ("fails", {"sql": begin_key(lost), "sqlstate": "22023"}))
    settled(db, *((3, 4) if mode == "warning" else (2, 5)))
    said = f'the claim on idempotency key "{lost}" was rolled back and the key was not begun again'
    assert said in db.server.log()
    assert dead(db)["fails"] == "22023: handler says no"
    assert dead(db).get("loses") == (said if mode == "error" else None)


def test_a_cursor_ends_with_its_call(db, clerk):
    """One that the function left open, whether it failed or not."""
    create(clerk, max_attempts=1)
    run(clerk, """CREATE FUNCTION app.open(n int) RETURNS void LANGUAGE plpgsql AS $$
      DECLARE plain CURSOR FOR SELECT relname FROM pg_class; found record;
      BEGIN OPEN plain; FETCH plain INTO found; END $$""")
    events = [(f"e{i}", {"sql": f"SELECT app.open({i})", **({"sqlstate": "P0001"} if i == 3 else {})}) for i in range(8)]
    emit(db, *events, ("count", {"sql": "UPDATE app.effects SET event = to_jsonb((SELECT count(*) FROM pg_cursors))"
                                        " WHERE key = 'count'"}))
    settled(db, 8, 1)
    assert dead(db) == {"e3": "P0001: handler says no"}
    assert db.value("SELECT event FROM app.effects WHERE key = 'count'") == 0


def test_who_was_not_called_is_not_to_blame(db, clerk):
    """There is no function, and that this is so cannot be recorded either."""
    create(clerk, max_attempts=1)
    emit(db, ("first", {}))
    settled(db, 1)
    db.sql("""CREATE FUNCTION public.refuse() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN RAISE EXCEPTION 'no rests'; END $$;
              CREATE TRIGGER refuse BEFORE UPDATE ON outbox_shards FOR EACH ROW WHEN (NEW.failures > 0)
                EXECUTE FUNCTION public.refuse();
              ALTER FUNCTION app.handle(jsonb) RENAME TO gone""")
    emit(db, ("innocent", {}))
    eventually(lambda: "no rests" in (db.value("SELECT last_error FROM outbox_workers WHERE pid = %s", worker_pid(db)) or ""))
    db.sql("DROP FUNCTION public.refuse() CASCADE; ALTER FUNCTION app.gone(jsonb) RENAME TO handle")
    settled(db, 2)


@pytest.mark.parametrize("way", ["locked", "cancelled", "refused"])
def test_what_could_not_be_recorded_is_not_the_events_fault(db, clerk, way):
    """The call was in order. Its record meets a lock, is cancelled while it waits for one, or is refused by the table."""
    create(clerk, max_attempts=1)
    emit(db, ("first", {}))
    settled(db, 1)
    pid = worker_pid(db)
    admin = db.connect(autocommit=False)
    if way == "refused":
        run(admin, REFUSE)
        admin.commit()
    else:
        run(admin, "SELECT outbox_retry('f')")  # nothing is to be retried, and the shards are locked
    emit(db, ("innocent", {}))
    if way == "cancelled":
        eventually(lambda: db.value("SELECT wait_event_type FROM pg_stat_activity WHERE pid = %s", pid) == "Lock")
        db.sql("SELECT pg_cancel_backend(%s)", pid)
    said = {"locked": "lock timeout", "cancelled": "user request", "refused": "no more rows"}[way]
    eventually(lambda: said in (db.value("SELECT last_error FROM outbox_workers WHERE pid = %s", pid) or ""))
    if way == "refused":
        run(admin, "DROP FUNCTION public.refuse() CASCADE")
        admin.commit()
    else:
        admin.rollback()
    settled(db, 2)
    assert db.sql("SELECT event -> 'attempt' FROM app.effects WHERE key = 'innocent'") == [(1,)]


def test_may_emit(db, clerk):
    db.sql("SELECT retrysafe.retrysafe_grant('clerk', 'write')")
    create(clerk)
    emit(db, ("a", {"sql": "SELECT retrysafe.outbox_emit(NULL, 'b', 't', '{}')"}))
    settled(db, 2)
    assert effects(db) == ["a", "b"]


def test_a_conflict_costs_no_attempt(db, clerk):
    """The worker is the one that the deadlock detector chooses."""
    run(clerk, "INSERT INTO app.parent VALUES (1), (2)")
    create(clerk, max_attempts=1)
    client = db.connect(autocommit=False)
    run(client, "SET deadlock_timeout = '60s'")
    run(client, "SELECT FROM app.parent WHERE id = 2 FOR UPDATE")
    lock = "SELECT FROM app.parent WHERE id = %d FOR UPDATE"
    # It looks for a deadlock once, when it has waited for a while: so the client is to wait before it.
    client_works = f"SELECT FROM pg_locks WHERE pid = {client.info.backend_pid} HAVING bool_and(granted)"
    wait = f"DO $$ BEGIN WHILE EXISTS ({client_works}) LOOP PERFORM pg_sleep(0.01); END LOOP; END $$"
    emit(db, ("x", {"sql": lock % 1}), ("y", {"sql": f"{wait}; {lock % 2}"}))
    pid = worker_pid(db)
    eventually(lambda: db.value("SELECT wait_event FROM pg_stat_activity WHERE pid = %s", pid) == "PgSleep")
    run(client, lock % 1)
    client.commit()
    settled(db, 2)


def test_exactly_once_when_the_worker_dies(db, clerk):
    """Killed in the middle of a batch, and after everything was recorded but not committed."""
    create(clerk)
    run(clerk, "CREATE TABLE app.stop (on_key text)")
    run(clerk, "INSERT INTO app.stop VALUES ('e3')")
    wait = {"sql": "DO $$ BEGIN WHILE EXISTS (SELECT FROM app.stop WHERE on_key = 'e3') LOOP PERFORM pg_sleep(0.01);"
                   " END LOOP; END $$"}
    emit(db, *[(f"e{i}", wait if i == 3 else {}) for i in range(6)])
    pid = worker_pid(db)
    eventually(lambda: db.value("SELECT wait_event FROM pg_stat_activity WHERE pid = %s", pid) == "PgSleep")
    kill(pid)
    eventually(lambda: in_spite_of_crashes(lambda: db.value("WITH gone AS (DELETE FROM app.stop) SELECT true")))
    settled(db, 6)
    killed = db.server.log().count("was terminated by signal 9")
    db.server.set("retrysafe.fault_points", "function.before_commit=kill")
    try:
        in_spite_of_crashes(lambda: emit(db, *[(f"f{i}", {}) for i in range(6)]))
        eventually(lambda: db.server.log().count("was terminated by signal 9") > killed)
    finally:
        eventually(lambda: in_spite_of_crashes(lambda: db.server.set("retrysafe.fault_points", None) is None))
    settled(db, 12)
    assert effects(db) == [f"e{i}" for i in range(6)] + [f"f{i}" for i in range(6)]
    assert db.value("SELECT sum(delivered_total) FROM (SELECT max(total_delivered) AS delivered_total FROM"
                    " outbox_batches GROUP BY destination, shard) t") == 12


WAIT = {"sql": "DO $$ BEGIN WHILE EXISTS (SELECT FROM app.stop) LOOP PERFORM pg_sleep(0.01); END LOOP; END $$"}


def hold_up(db, clerk, *events, **fields):
    """Events, by default two, of which one is being handled until app.stop is empty. The worker's pid."""
    create(clerk, **{"max_attempts": 1, **fields})
    run(clerk, "CREATE TABLE app.stop (mark text)")
    run(clerk, "INSERT INTO app.stop VALUES ('x')")
    emit(db, *(events or (("a", {}), ("b", WAIT))))
    pid = worker_pid(db)
    eventually(lambda: db.value("SELECT wait_event FROM pg_stat_activity WHERE pid = %s", pid) == "PgSleep")
    return pid


def test_termination_undoes_the_call_and_records_what_was_done_before(db, clerk):
    pid = hold_up(db, clerk)
    assert effects(db) == []
    db.sql("SELECT pg_terminate_backend(%s)", pid)
    eventually(lambda: effects(db) == ["a"])
    eventually(lambda: not db.sql("SELECT 1 FROM pg_stat_activity WHERE pid = %s", pid))
    db.sql("DELETE FROM app.stop")
    settled(db, 2)
    assert dead(db) == {}


def test_who_lost_the_shard_records_nothing(db, clerk):
    """Somebody else took over while the function ran: its effects are undone with the record that is refused."""
    hold_up(db, clerk)
    db.sql("UPDATE outbox_shards SET token = token + 1, holder = NULL, holder_pid = NULL")
    db.sql("DELETE FROM app.stop")
    settled(db, 2)
    assert "before its batch was recorded" in db.server.log()
    assert db.value("SELECT delivered FROM outbox_status") == 2


REFUSED = {**WAIT, "sqlstate": "22000"}


@pytest.mark.parametrize("before, after", [("block", "dead_letter"), ("dead_letter", "block")])
def test_whether_dead_events_block_is_changed_during_a_call(db, clerk, before, after):
    hold_up(db, clerk, ("dead", REFUSED, "k"), ("next", {}, "k"), on_exhausted=before)
    run(clerk, "SELECT outbox_alter_destination('f', on_exhausted => %s)", after)
    db.sql("DELETE FROM app.stop")
    if after == "dead_letter":
        return settled(db, 1, 1)
    settled(db, 0, 1)
    assert db.sql("SELECT parked_retry, parked_blocked FROM outbox_status") == [(0, 1)]
    db.sql("SELECT outbox_discard('f')")
    settled(db, 1)


def test_the_number_of_attempts_is_changed_during_a_call(db, clerk):
    hold_up(db, clerk, ("a", {**WAIT, "sqlstate": "P0001"}), max_attempts=1000, backoff="1 day", backoff_max="1 day")
    run(clerk, "SELECT outbox_alter_destination('f', max_attempts => 1)")
    db.sql("DELETE FROM app.stop")
    settled(db, 0, 1)


@pytest.mark.alone
def test_lets_go_of_the_database(db, clerk):
    """A call that lasts does not hold up a command that needs the database for itself."""
    pid = hold_up(db, clerk)
    clerk.close()
    db.close()
    admin = db.server.connect()
    begin = time.monotonic()
    run(admin, f'ALTER DATABASE "{db.name}" RENAME TO renamed')
    assert time.monotonic() - begin < 5
    run(admin, f'ALTER DATABASE renamed RENAME TO "{db.name}"')
    db.sql("DELETE FROM app.stop")
    settled(db, 2)
    assert worker_pid(db) != pid


@pytest.mark.parametrize("deed", ["outbox_drop_destination('f')", "outbox_consent('fork')"])
def test_a_function_that_takes_its_own_shard_away_has_failed(db, clerk, deed):
    """What it did is rolled back, and others go on."""
    create(clerk, max_attempts=2)
    emit(db, ("before", {}), ("a", {"sql": f"SELECT retrysafe.{deed}"}, "k"), ("after", {}))
    settled(db, 2, 1)
    assert "lease" in dead(db)["a"]


@pytest.mark.slow
def test_the_largest_event_arrives(db, clerk):
    """A payload fits into the object that the function gets, beside all other fields at their largest, or is refused at once."""
    run(clerk, "CREATE FUNCTION app.measure(event jsonb) RETURNS void LANGUAGE sql AS"
               " $$ INSERT INTO app.effects (key, event) VALUES (event->>'key', to_jsonb(length(event->>'payload'))) $$")
    create(clerk, {"function": "app.measure", "statement_timeout": "1min"})
    connection = db.connect(autocommit=False)
    run(connection, "SET retrysafe.max_payload_bytes = '256MB'")
    run(connection, "SET retrysafe.traceparent = '00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01'")
    connection.commit()
    longest = "k" * 255
    headers = {f"{n:064}": "v" * 192 for n in range(64)}  # 16 kB
    emit = "SELECT outbox_emit(%s, NULL, %s, to_jsonb(repeat('x', %s)), %s, %s, scope => %s)"
    largest = 2**28 - 1 - 2**15 - 12  # beside it the headers of the value and its array, and its entry there

    def emit_of(size):
        run(connection, "SELECT idem_begin(%s, 'digest', %s), idem_complete(%s, scope => %s)", longest, longest, longest, longest)
        run(connection, emit, longest, longest, size, longest, json.dumps(headers), longest)

    with pytest.raises(psycopg2.Error) as error:
        emit_of(largest + 1)
    assert error.value.pgcode == "RS103"
    connection.rollback()
    emit_of(largest)
    connection.commit()
    eventually(lambda: db.sql("SELECT key, event FROM app.effects") == [(f"{longest}~1", largest)], 120, message=lambda: dead(db))
