"""The destination kind "postgres", its module driven alone: what becomes of a batch in the database on the far side."""
import json
import sys
import threading

import pytest

from conftest import TOP, eventually, run
from far_database import effects, event_id, far, sinks, statuses  # noqa: F401 (the fixtures far and sinks)

sys.path.insert(0, str(TOP / "test/sinks"))
from sink import DELIVERED, FAILED_FINAL, FAILED_RETRY, UNREACHABLE  # noqa: E402


def test_fills_the_inbox(far, sinks):
    sink = sinks(far)
    payload = {"n": 1.5, "text": "é \U0001f600 \\ \" \u2028"}
    assert sink.submit("e1", json.dumps(payload), ordering_key="order 1", type="order.paid", scope="s",
                       headers={"traceparent": "00-1", "quote\"": "a\nb"})
    assert sink.submit("e2", None)
    sink.flush()
    assert statuses(sink.wait()) == {"e1": DELIVERED, "e2": DELIVERED}
    rows = far.sql("SELECT event_id::text, event_type, source, event_key, scope, ordering_key, payload, headers,"
                   " created_at = '2026-01-02 03:04:05.678901+00' FROM public.retrysafe_inbox ORDER BY serial")
    assert rows == [(event_id("e1"), "order.paid", "retrysafe/shop/", "e1", "s", "order 1", payload,
                     {"traceparent": "00-1", "quote\"": "a\nb"}, True),
                    (event_id("e2"), "order.created", "retrysafe/shop/", "e2", "", None, None, {}, True)]


def test_function_gets_the_event_and_only_new_ones(far, sinks):
    sink = sinks(far, function="public.handle")
    assert sink.submit("e1", '{"a": [1]}', ordering_key="k", headers={"h": "v"}, attempt=3)
    sink.flush()
    assert statuses(sink.wait()) == {"e1": DELIVERED}
    assert far.value("SELECT event FROM public.effects") == {
        "id": event_id("e1"), "type": "order.created", "key": "e1", "scope": "", "ordering_key": "k", "payload": {"a": [1]},
        "headers": {"h": "v"}, "created_at": "2026-01-02T03:04:05.678901Z", "attempt": 3}
    assert statuses(sink.deliver("e1", "e2", "e2x")) == {"e1": DELIVERED, "e2": DELIVERED, "e2x": DELIVERED}
    assert effects(far) == ["e1", "e2", "e2x"]
    assert far.value("SELECT count(*) FROM public.retrysafe_inbox") == 3


def test_an_event_twice_in_one_batch_has_one_effect(far, sinks):
    sink = sinks(far, function="public.handle")
    sink.submit("e1"), sink.submit("e1")
    sink.flush()
    assert statuses(sink.wait()) == {"e1": DELIVERED}
    assert effects(far) == ["e1"]


def test_a_batch_is_one_transaction_in_order(far, sinks):
    sink = sinks(far, function="public.handle")
    keys = [f"e{i}" for i in range(300)]
    assert set(statuses(sink.deliver(*keys)).values()) == {DELIVERED}
    assert effects(far) == keys
    assert far.value("SELECT count(DISTINCT xmin::text) FROM public.effects") == 1


def test_the_function_sees_the_inbox_and_the_events_before(far, sinks):
    far.sql("""CREATE FUNCTION public.look(event jsonb) RETURNS void LANGUAGE plpgsql AS $$
      BEGIN
        INSERT INTO public.effects (key) SELECT count(*)::text FROM public.retrysafe_inbox;
      END $$""")
    sinks(far, function="public.look").deliver("a", "b", "c")
    assert effects(far) == ["1", "2", "3"]


def test_what_the_function_returns_does_not_matter(far, sinks):
    far.sql("""CREATE FUNCTION public.many(event jsonb) RETURNS SETOF text LANGUAGE plpgsql AS $$
      BEGIN
        INSERT INTO public.effects (key) VALUES (event->>'key');
        RETURN QUERY SELECT 'x' FROM generate_series(1, 100);
      END $$""")
    assert statuses(sinks(far, function="public.many(jsonb)").deliver("a", "b")) == {"a": DELIVERED, "b": DELIVERED}
    assert effects(far) == ["a", "b"]


def test_poisoned_events_fail_alone(far, sinks):
    sink = sinks(far, function="public.handle")
    bad = {"e3": "P0001", "e7": "22023", "e8": "23503"}
    for i in range(12):
        key = f"e{i}"
        assert sink.submit(key, json.dumps({"sqlstate": bad[key]} if key in bad else {}))
    sink.flush()
    outcomes = sink.wait()
    assert statuses(outcomes) == {f"e{i}": DELIVERED for i in range(12)} | {
        "e3": FAILED_RETRY, "e7": FAILED_FINAL, "e8": FAILED_RETRY}
    assert outcomes["e3"].reason == "P0001: handler says no"
    assert effects(far) == [f"e{i}" for i in range(12) if f"e{i}" not in bad]
    assert far.value("SELECT count(*) FROM public.retrysafe_inbox") == 9
    assert statuses(sink.deliver("e3")) == {"e3": DELIVERED}, "the failed try left no trace"


def test_nothing_of_a_key_goes_out_behind_a_failure(far, sinks):
    sink = sinks(far, function="public.handle")
    for number, key in enumerate(["a", "b", "a", "b", "a"]):
        assert sink.submit(f"e{number}", '{"sqlstate": "P0001"}' if number == 2 else "{}", ordering_key=key)
    sink.flush()
    assert statuses(sink.wait()) == {"e0": DELIVERED, "e1": DELIVERED, "e2": FAILED_RETRY, "e3": DELIVERED,
                                     "e4": FAILED_RETRY}
    assert effects(far) == ["e0", "e1", "e3"]


def test_deferred_constraints_fail_the_event_that_broke_them(far, sinks):
    far.sql("""CREATE TABLE public.parent (id int PRIMARY KEY);
      CREATE TABLE public.child (id int REFERENCES public.parent DEFERRABLE INITIALLY DEFERRED);
      CREATE FUNCTION public.adopt(event jsonb) RETURNS void LANGUAGE sql AS
        $$ INSERT INTO public.child SELECT (event->'payload'->>'id')::int $$;
      INSERT INTO public.parent VALUES (1)""")
    sink = sinks(far, function="public.adopt")
    for i in range(6):
        assert sink.submit(f"e{i}", json.dumps({"id": 2 if i == 4 else 1}))
    sink.flush()
    outcomes = sink.wait()
    assert statuses(outcomes) == {f"e{i}": FAILED_RETRY if i == 4 else DELIVERED for i in range(6)}
    assert outcomes["e4"].reason.startswith("23503: ")
    assert far.value("SELECT count(*) FROM public.child") == 5


def test_a_handler_that_takes_too_long_is_a_failing_event(far, sinks):
    far.sql("""CREATE FUNCTION public.slow(event jsonb) RETURNS void LANGUAGE plpgsql AS $$
      BEGIN
        PERFORM pg_sleep((event->'payload'->>'seconds')::float8);
        INSERT INTO public.effects (key) VALUES (event->>'key');
      END $$""")
    sink = sinks(far, function="public.slow", statement_timeout=300)
    for key, seconds in (("a", 0), ("b", 30), ("c", 0)):
        assert sink.submit(key, json.dumps({"seconds": seconds}))
    sink.flush()
    outcomes = sink.wait()
    assert statuses(outcomes) == {"a": DELIVERED, "b": FAILED_RETRY, "c": DELIVERED}
    assert outcomes["b"].reason.startswith("57014: ")
    assert effects(far) == ["a", "c"]


def test_a_conflict_with_another_transaction_costs_no_attempt(far, sinks):
    """A deadlock between the sink and a client: the batch is sent again."""
    far.sql("""CREATE TABLE public.account (id text PRIMARY KEY, n int); INSERT INTO public.account VALUES ('x', 0), ('y', 0);
      CREATE FUNCTION public.add(event jsonb) RETURNS void LANGUAGE plpgsql AS $$
      BEGIN
        UPDATE public.account SET n = n + 1 WHERE id = event->>'key';
      END $$""")
    sink = sinks(far, function="public.add")
    client = far.connect(autocommit=False)
    run(client, "SET deadlock_timeout = '60s'")  # the other one notices first
    run(client, "UPDATE public.account SET n = n + 1 WHERE id = 'y'")
    assert sink.submit("x") and sink.submit("y")
    sink.flush()

    def waits():
        sink.collect()
        return far.value("SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND"
                         " application_name = 'retrysafe' AND wait_event_type = 'Lock'") == 1

    eventually(waits)
    thread = threading.Thread(target=lambda: (run(client, "UPDATE public.account SET n = n + 1 WHERE id = 'x'"),
                                              client.commit()))
    thread.start()
    outcomes = sink.wait()
    thread.join()
    assert statuses(outcomes) == {"x": DELIVERED, "y": DELIVERED}
    assert far.sql("SELECT id, n FROM public.account ORDER BY id") == [("x", 2), ("y", 2)]


def test_a_minimal_inbox_is_enough(db, sinks):
    db.sql("CREATE TABLE public.seen (event_id text PRIMARY KEY, payload int, created_at date)")
    sink = sinks(db, inbox_table="public.seen")
    assert statuses(sink.deliver("a", "b", "a")) == {"a": DELIVERED, "b": DELIVERED}
    assert db.sql("SELECT event_id, payload, created_at FROM public.seen ORDER BY event_id") == sorted(
        [(event_id("a"), None, None), (event_id("b"), None, None)])


def test_an_inbox_for_several_consumers(far, sinks):
    far.sql('CREATE TABLE public."In Box" (consumer text, event_id uuid, PRIMARY KEY (consumer, event_id))')
    for consumer in ("one", "two"):
        sinks(far, inbox_table='public."In Box"', function="public.handle", consumer=consumer).deliver("a")
    sinks(far, inbox_table='public."In Box"', function="public.handle").deliver("a")
    assert effects(far) == ["a"] * 3
    assert far.sql('SELECT consumer FROM public."In Box" ORDER BY 1') == [("one",), ("test",), ("two",)]


def test_an_inbox_function(far, sinks):
    far.sql("""CREATE TABLE public.accepted (consumer text, event_id text, PRIMARY KEY (consumer, event_id));
      CREATE FUNCTION public.accept(consumer text, event_id text) RETURNS boolean LANGUAGE plpgsql AS $$
      BEGIN
        INSERT INTO public.accepted VALUES (consumer, event_id) ON CONFLICT DO NOTHING;
        RETURN FOUND;
      END $$""")
    sink = sinks(far, inbox_function="public.accept", function="public.handle")
    sink.deliver("a", "b")
    sink.deliver("b", "c")
    assert effects(far) == ["a", "b", "c"]
    assert far.value("SELECT count(*) FROM public.accepted WHERE consumer = 'test'") == 3
    assert far.value("SELECT count(*) FROM public.retrysafe_inbox") == 0


@pytest.mark.parametrize("change, options, reason", [
    ("DROP TABLE public.retrysafe_inbox", {}, "table public.retrysafe_inbox does not exist there; at least: CREATE TABLE"),
    ("ALTER TABLE public.retrysafe_inbox DROP CONSTRAINT retrysafe_inbox_pkey", {}, "has no unique index on event_id"),
    ("ALTER TABLE public.retrysafe_inbox ALTER event_id TYPE int USING 0", {}, "has no column event_id"),
    ("SELECT", {"function": "public.handel"}, "function public.handel(jsonb) does not exist there"),
    ("SELECT", {"function": "public.handle", "inbox_function": "public.handle"}, "returning boolean does not exist there"),
    ("SELECT", {"dbname": "no such database"}, "does not exist"),
    ("SELECT", {"port": 1}, "refused"),
    ("SELECT", {"host": "no-such-host.invalid"}, "could not resolve host"),
])
def test_a_destination_that_cannot_work_says_why(far, sinks, change, options, reason):
    far.sql(change)
    outcomes = sinks(far, **options).deliver("a", "b")
    assert statuses(outcomes) == {"a": UNREACHABLE, "b": UNREACHABLE}
    assert reason in outcomes["a"].reason


def test_what_breaks_while_connected_counts_against_no_event(far, sinks):
    sink = sinks(far, function="public.handle")
    assert statuses(sink.deliver("a")) == {"a": DELIVERED}
    far.sql("ALTER TABLE public.retrysafe_inbox RENAME TO elsewhere")
    outcomes = sink.deliver("b", "c")
    assert statuses(outcomes) == {"b": UNREACHABLE, "c": UNREACHABLE}
    assert "does not exist there" in outcomes["b"].reason
    far.sql("ALTER TABLE public.elsewhere RENAME TO retrysafe_inbox")
    assert statuses(sink.deliver("b", "c")) == {"b": DELIVERED, "c": DELIVERED}
    assert effects(far) == ["a", "b", "c"]


def test_a_handler_that_is_wrong_for_one_event_fails_that_event(far, sinks):
    """The same SQLSTATE as a missing table, but the table is there."""
    sink = sinks(far, function="public.handle")
    sink.submit("a"), sink.submit("b", '{"sqlstate": "42P01"}'), sink.submit("c")
    sink.flush()
    assert statuses(sink.wait()) == {"a": DELIVERED, "b": FAILED_RETRY, "c": DELIVERED}
    assert effects(far) == ["a", "c"]


def test_roles_need_few_rights(far, sinks):
    far.sql("CREATE ROLE courier LOGIN")
    try:
        outcomes = sinks(far, user="courier").deliver("a")
        assert statuses(outcomes) == {"a": UNREACHABLE} and "may insert into" in outcomes["a"].reason
        far.sql("GRANT INSERT ON public.retrysafe_inbox TO courier")
        assert statuses(sinks(far, user="courier").deliver("a")) == {"a": DELIVERED}
    finally:
        far.sql("DROP OWNED BY courier")
        far.sql("DROP ROLE courier")


def test_durable_means_durable(far, sinks):
    far.sql(f'ALTER DATABASE "{far.name}" SET synchronous_commit = off')
    far.sql("""CREATE FUNCTION public.show(event jsonb) RETURNS void LANGUAGE sql AS
      $$ INSERT INTO public.effects (key) VALUES (current_setting('synchronous_commit')) $$""")
    sinks(far, function="public.show").deliver("a")
    assert effects(far) == ["on"]


def test_a_connection_that_died_while_idle_is_made_anew(far, sinks):
    sink = sinks(far, function="public.handle")
    for i in range(3):
        assert statuses(sink.deliver(f"e{i}")) == {f"e{i}": DELIVERED}
        assert far.value("SELECT count(pg_terminate_backend(pid, 5000)) FROM pg_stat_activity"
                         " WHERE datname = current_database() AND application_name = 'retrysafe'") == 1
    assert statuses(sink.deliver("last")) == {"last": DELIVERED}


def test_a_backend_that_dies_in_the_middle(far, sinks):
    far.sql("""CREATE FUNCTION public.die(event jsonb) RETURNS void LANGUAGE plpgsql AS $$
      BEGIN
        INSERT INTO public.effects (key) VALUES (event->>'key');
        IF event->>'key' = 'b' THEN PERFORM pg_terminate_backend(pg_backend_pid()); END IF;
      END $$""")
    sink = sinks(far, function="public.die")
    assert statuses(sink.deliver("a", "b", "c")) == dict.fromkeys("abc", UNREACHABLE)
    assert effects(far) == []
    assert statuses(sink.deliver("a", "c")) == dict.fromkeys("ac", DELIVERED)
    assert effects(far) == ["a", "c"]
