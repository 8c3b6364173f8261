"""Arguments that mean harm: whatever a role passes to what it may call, it gets an answer or an error. Nobody's session
ends, no worker does, and nothing is left half done."""
import itertools
import json
import random

import psycopg2
import psycopg2.extras
import pytest

from conftest import eventually, run
from hostile import healthy_neighbour, worker_pid
from test_security_access import FUNCTIONS, TRIGGERS

VALUES = {
    "text": ["NULL", "''", "'x'", "repeat('x', 300)", "repeat('é', 5000)", "E'a\\r\\nb: c'", "E'\\x01\\x7f'", "'%s%n%n$1\\'", "'now'",
             "'''; DROP TABLE x; --'", "'{id}'", "'{batch}'", "'d'", "'hook'", "'\\x'", "'\\x0g'", "'-1'", "'pull'",
             "repeat('x', 5000000)"],
    "text[]": ["NULL", "'{}'", "'{NULL}'", "ARRAY[ARRAY['a']]", "array_fill('x'::text, '{2000}')", "ARRAY['*', '**', 'a*b']",
               "'[2147483646:2147483647]={a,b}'"],
    "bytea[]": ["NULL", "'{}'", "'{NULL}'", "ARRAY[ARRAY['\\x01'::bytea]]", "array_fill('\\x01'::bytea, '{2000}')"],
    "bytea": ["NULL", "''", "'\\x00'", "decode(repeat('00', 64), 'hex')", "decode(repeat('00', 65), 'hex')"],
    "jsonb": ["NULL", "'null'", "'{}'", "'[]'", "'1e999'", "'\"\\u0001\"'", "repeat('[', 5000)::text::jsonb || ''",
              "(repeat('[', 2000) || repeat(']', 2000))::jsonb",
              "(SELECT jsonb_object_agg(i, i) FROM generate_series(1, 20000) i)", "'{\"url\": {\"url\": []}, \"a\": null}'",
              "'{\"a\": \"b\"}'", "'{\"headers\": {\"a\\r\\nb\": \"c\"}}'", "'[{\"name\": \"a\", \"type\": \"enum\"}]'",
              "'{\"00000000-0000-0000-0000-000000000000\": {\"status\": \"dead\"}}'"],
    "integer": ["NULL", "0", "1", "-1", "2147483647", "'-2147483648'"],
    "bigint": ["NULL", "0", "1", "-1", "9223372036854775807", "'-9223372036854775808'"],
    "boolean": ["NULL", "true", "false"],
    "interval": ["NULL", "'0'", "'1 s'", "'-1 s'", "'178000000 years'", "'-178000000 years'", "'1 month -30 days'", "'1 microsecond'",
                 "'2147483647 days'"],
    "timestamp with time zone": ["NULL", "'infinity'", "'-infinity'", "'294276-12-31 UTC'", "'4713-01-01 BC'", "now()"],
    "uuid": ["NULL", "'00000000-0000-0000-0000-000000000000'", "'ffffffff-ffff-ffff-ffff-ffffffffffff'"],
    "xid8": ["NULL", "'0'", "'1'", "'18446744073709551615'"],
    "regprocedure": ["NULL", "0", "4294967295", "'pg_catalog.now()'", "'pg_catalog.jsonb_strip_nulls(jsonb)'",
                     "'pg_catalog.pg_terminate_backend(int4,int8)'"],
    "regrole": ["NULL", "0", "4294967295", "'{role}'", "'pg_monitor'"],
}
# These start processes or wait.
LEFT_OUT = {"outbox_run_worker"}


def calls(functions, rng, how_many):
    """Each function with each value of each argument, the others being drawn; and some wholly drawn."""
    for _, name, kind, _, types, _ in functions:
        if name in TRIGGERS | LEFT_OUT:
            continue
        verb = "CALL" if kind == "p" else "SELECT * FROM"
        drawn = [[rng.choice(VALUES[t]) for t in types] for _ in range(how_many)]
        varied = [[value if i == place else rng.choice(VALUES[t]) for i, t in enumerate(types)]
                  for place, type_name in enumerate(types) for value in VALUES[type_name]]
        for values in itertools.chain(varied, drawn):
            yield f"{verb} retrysafe.{name}({', '.join(f'{v}::{t}' for v, t in zip(values, types))})"


@pytest.mark.parametrize("seed", [1, 2])
def test_functions_take_anything(server, db, seed):
    """The role has all rights of the interface. A crash would be found in the log, and be the end of the session."""
    role = f"{db.name}_r"
    db.sql(f"CREATE ROLE {role} LOGIN")
    for access in ("write", "consume", "relay", "monitor", "admin"):
        db.sql("SELECT retrysafe_grant(%s::regrole, %s)", role, access)
    db.sql("SELECT outbox_create_destination('d', 'pull', start_at => 'earliest')")
    for i in range(50):
        db.sql("SELECT outbox_emit(NULL, %s, 't', '{}', %s)", f"e{i}", f"k{i % 5}")
    batch, event = db.sql("SELECT batch, event_id FROM outbox_fetch('d', 20, lease => '1 hour')")[0]
    session = db.connect(user=role)
    run(session, "SET statement_timeout = '5s'")
    run(session, "SET lock_timeout = '1s'")
    psycopg2.extras.register_default_jsonb(session, loads=str)  # Python's own limit is lower
    session.autocommit = False
    outcomes = {"answers": 0, "errors": 0}
    unexpected = []
    for call in calls(db.sql(FUNCTIONS), random.Random(seed), 30):
        call = call.replace("{batch}", batch).replace("{id}", event).replace("{role}", role)
        try:
            run(session, "SAVEPOINT s")
            run(session, call)
            outcomes["answers"] += 1
        except psycopg2.Error as error:
            outcomes["errors"] += 1
            assert not session.closed, (call[:500], error)
            # An internal error is a case that nobody thought of.
            if error.pgcode is None or error.pgcode.startswith("XX"):
                unexpected.append((call[:300], str(error)[:200]))
        session.rollback()
    assert unexpected == []
    assert min(outcomes.values()) > 100, outcomes
    run(session, "SELECT count(*) FROM outbox_status")
    session.close()
    db.sql(f"DROP OWNED BY {role}")
    db.sql(f"DROP ROLE {role}")


def test_tokens_of_batches_that_were_made_up(db):
    """A handle says which shard it is of; a wrong one never takes the server along. It settles nothing unless it names the
    lease and the events, and keeps or gives back nothing unless it names the lease."""
    for name in "d", "not-fetched":
        db.sql("SELECT outbox_create_destination(%s, 'pull', start_at => 'earliest')", name)
    db.sql("SELECT outbox_emit(NULL, 'e' || i, 't', '{}') FROM generate_series(1, 10) i")
    batch, event_id = db.sql("SELECT batch, event_id FROM outbox_fetch('d')")[0]
    batch_and_events, _, transaction = batch.partition(":")  # which has to have committed
    numbers = [int(number) for number in batch_and_events.split(".")]
    rng = random.Random(7)
    session = db.connect()
    made_up = [batch[:i] for i in range(len(batch))] + [batch + "0", batch * 100, "0" * 1000]
    made_up += ["".join(c if rng.random() > 0.1 else rng.choice("0123456789abcdef.-:/") for c in batch) for _ in range(300)]
    made_up += [".".join(str(n + step * (i == place)) for i, n in enumerate(numbers)) for place in range(len(numbers)) for step in (1, -1)]
    made_up.append(not_committed := f"{batch_and_events}:{int(transaction) + 1000000}")
    succeeded = set()
    for handle in [batch, *made_up]:
        for call in ("outbox_ack(%s)", f"outbox_nack(%s, '{event_id}')", "outbox_record(%s)", "outbox_renew(%s)", "outbox_release(%s)"):
            try:
                run(session, "BEGIN")
                run(session, f"SELECT {call}", handle)
                succeeded.add(call)
                if call.startswith(("outbox_renew", "outbox_release")):
                    assert handle.split(".")[:3] == batch.split(".")[:3], (call, handle, batch)
                else:
                    assert handle.partition(":")[0] == batch_and_events and handle != not_committed, (call, handle, batch)
            except psycopg2.Error as error:
                assert error.pgcode in ("RS209", "RS210", "RS211"), (handle, error)
            run(session, "ROLLBACK")
    assert len(succeeded) == 5
    assert db.value("SELECT outbox_ack(%s)", batch) == 10


def deepest_payload(db):
    """As a literal, which is parsed where the session has next to nothing on its stack."""
    deepest = 1
    for step in (4096, 1024, 256, 64, 16, 4, 1):
        while True:
            payload = "'" + "[" * (deepest + step) + "]" * (deepest + step) + "'"
            try:
                db.sql(f"SELECT outbox_emit(NULL, 'nested {deepest + step}', 'probe', {payload})")
            except psycopg2.Error as error:
                assert error.pgcode in ("RS110", "54001"), error
                break
            deepest += step
    return "'" + "[" * deepest + "]" * deepest + "'"


def test_the_deepest_payload_is_fetched(db):
    db.sql("SELECT outbox_create_destination('d', 'pull', event_types => '{t}')")
    db.sql(f"SELECT outbox_emit(NULL, 'deep', 't', {deepest_payload(db)}, 'k')")
    db.sql("SELECT outbox_emit(NULL, 'other', 't', '{}', 'o')")
    assert db.sql("SELECT event_key FROM outbox_fetch('d')") == [("deep",), ("other",)]


PAYLOADS = {
    "many members": "(SELECT jsonb_object_agg('k' || i, i) FROM generate_series(1, 60000) i)",
    "a long key": "jsonb_build_object(repeat('k', 900000), 1)",
    "a long number": "to_jsonb(('1' || repeat('0', 100000))::numeric)",
    "escapes": "to_jsonb(repeat(E'\\x01', 170000))",
    "a long text": "to_jsonb(repeat('é', 500000))",
    "null": "NULL::jsonb",
    "a scalar": "'1'::jsonb",
}


@pytest.mark.parametrize("kind", ["http", "function", "postgres"])
def test_payloads_that_are_made_to_break_the_worker(server, db, kind):
    db.sql("CREATE TABLE public.got (payload jsonb); CREATE FUNCTION public.take(event jsonb) RETURNS void LANGUAGE sql AS"
           " $$ INSERT INTO public.got VALUES (event->'payload') $$;"
           "CREATE TABLE public.retrysafe_inbox (event_id uuid PRIMARY KEY)")
    with healthy_neighbour(db) as neighbour_works:
        pid = worker_pid(db)
        payloads = {**PAYLOADS, "nested": deepest_payload(db)}
        options = {"http": {"url": "http://127.0.0.1:1/"}, "function": {"function": "public.take"},
                   "postgres": {"host": "127.0.0.1", "port": server.port, "dbname": db.name, "user": "postgres",
                                "function": "public.take"}}[kind]
        if kind == "http":
            options["url"] = db.value("SELECT options->>'url' FROM outbox_status WHERE name = 'healthy'")
        db.sql("SELECT outbox_create_destination('d', %s, %s, max_attempts => 1, event_types => '{t}')", kind, json.dumps(options))
        for name, payload in payloads.items():
            db.sql(f"SELECT outbox_emit(NULL, '{name}', 't', {payload})")
        eventually(lambda: db.value("SELECT delivered + dead FROM outbox_status WHERE name = 'd'") == len(payloads))
        assert db.sql("SELECT event_key, reason FROM outbox_dead_letters") == []
        neighbour_works()
        assert worker_pid(db) == pid


def test_lists_without_measure(db):
    session = db.connect()
    for query, sqlstate in (
            ("SELECT outbox_emit(NULL, 'e', 't', '{}', headers => (SELECT jsonb_object_agg('h' || i, 'v') FROM"
             " generate_series(1, 1000000) i))", "RS105"),
            ("SELECT outbox_emit(NULL, 'e', 't', '{}', headers => jsonb_build_object('h', repeat('v', 200000000)))", "RS105"),
            ("SELECT outbox_emit(NULL, 'e', repeat('t', 200000000), '{}')", "RS104"),
            ("SELECT outbox_emit(NULL, 'e', 't', to_jsonb(repeat('v', 200000000)))", "RS103"),
            ("SELECT outbox_emit(NULL, 'e', 't', to_jsonb(repeat(E'\\x01', 180000)))", "RS103"),  # a byte is six as JSON
            ("SELECT idem_begin(repeat('k', 200000000), 'h'::text)", "RS002"),
            ("SELECT idem_begin('k', repeat('h', 200000000)::text)", "RS003"),
            ("SELECT idem_begin('k', 'h'::text, also_accept => array_fill('h'::text, '{1000000}'))", "RS008"),
            ("SELECT inbox_accept('c', array_fill(repeat('x', 256), '{100000}'))", "RS016"),
            ("SELECT outbox_create_destination('d', 'http', (SELECT jsonb_object_agg('o' || i, i) FROM generate_series(1, 300000) i))",
             "RS203"),
            ("SELECT outbox_create_destination('d', 'http', jsonb_build_object('url', 'http://e', 'headers',"
             " (SELECT jsonb_object_agg('h' || i, 'v') FROM generate_series(1, 300000) i)))", None),
            ("SELECT outbox_create_destination('d', 'http', jsonb_build_object('url', 'http://' || repeat('e', 100000000)))", "RS203"),
            ("SELECT outbox_create_destination('d', 'pull', event_types => array_fill('t'::text, '{1000000}'))", "RS214"),
            ("SELECT outbox_create_destination(repeat('d', 100000000), 'pull')", "RS214"),
            ("SELECT outbox_create_destination('d', repeat('k', 100000000))", "RS204"),
            ("SELECT outbox_pause(repeat('d', 100000000))", "RS201"),
            ("SELECT outbox_fetch(repeat('é', 50000000))", "RS201"),
            ("CALL outbox_wait(array_fill('d'::text, '{1000000}'), '0')", "RS214")):
        try:
            run(session, query)
            assert sqlstate is None, query
        except psycopg2.Error as error:
            assert error.pgcode == sqlstate, (query, error.pgcode, str(error)[:300])
            assert len(str(error)) < 10000, query


def test_many_destinations(db):
    """A worker that has more of them than it can take up at once takes turns, and dies of none."""
    pid = worker_pid(db) if db.sql("SELECT outbox_emit(NULL, 'first', 't', '{}')") else None
    with healthy_neighbour(db) as neighbour_works:
        db.sql("SELECT outbox_create_destination('bad' || i, 'http', '{\"url\": \"http://127.0.0.1:1/\"}', shards => 4)"
               " FROM generate_series(1, 150) i")
        db.sql("SELECT outbox_emit(NULL, 'e' || i, 't', '{}', 'k' || i) FROM generate_series(1, 50) i")
        for _ in range(3):
            neighbour_works()
        assert worker_pid(db) == pid
