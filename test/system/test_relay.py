"""retrysafe-relay: the publisher outside of the server."""
import base64
import collections
import hashlib
import hmac
import json
import os
import shutil
import signal
import socket
import subprocess
import time

import psycopg2
import pytest

from conftest import TOP, cluster, eventually, make_database, run
from names import names
from null_destination import DELIVERED, NullDestination, emit
from receiver import Answer, Hang, Receiver, Reset
from relay_process import Relay, emit_many

BACKOFF = {"backoff": "'100 ms'", "backoff_max": "'200 ms'"}


def null(db, name="d", **parameters):
    """A destination that is left to relays."""
    return NullDestination(db, name, **{"workers": "false", **parameters})


def http(db, receiver, name="d", options="", **parameters):
    extra = "".join(f", {key} => {value}" for key, value in {"workers": "false", **BACKOFF, **parameters}.items())
    db.sql(f"SELECT outbox_create_destination('{name}', 'http', '{{\"url\": \"{receiver.url}\"{options}}}'{extra})")


def relay(db, *arguments, **options):
    return Relay(db, "--allowed-addresses", "127.0.0.1, ::1", *arguments, **options)


def status(db, name="d"):
    return dict(zip(("delivered", "retry", "dead", "failures", "last_error", "holders"), db.sql(
        "SELECT delivered, parked_retry, dead, failures, last_error, holders FROM outbox_status WHERE name = %s", name)[0]))


def assert_in_order(attempts, keys):
    """Each event once, those of an ordering key in order."""
    numbers = [int(a.key.lstrip("e")) for a in attempts]
    assert len(numbers) == len(set(numbers))
    of_key = collections.defaultdict(list)
    for number in numbers:
        of_key[number % keys].append(number)
    assert all(some == sorted(some) for some in of_key.values())


# --- what it sends ----------------------------------------------------------------------------------------------


def test_events_are_what_a_worker_sends(db):
    """Bit for bit: one event to two destinations, one of a worker, one of the relay."""
    with Receiver() as of_worker, Receiver() as of_relay:
        http(db, of_worker, "w", workers="true")
        http(db, of_relay, "r")
        headers = {"X-Tenant": "a\"b\\c", "traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01", "u": "é€😀"}
        for payload in ('{"b": 1.50, "a": ["\\u00e9", "😀", "\\n"]}', "null", None, '"x"', "[]"):
            for scope, key in (("", None), ("pay ments/é", "k é")):
                db.sql("SELECT outbox_emit(NULL, %s, 'order.placed', %s, %s, %s, scope => %s)", f"e-{payload}-{scope}",
                       payload, key, json.dumps(headers), scope)
        with relay(db, "--drain", "r") as process:
            assert process.wait() == 0, process.log()
        eventually(lambda: len(of_worker.requests) == 10)

        def shown(receiver):
            skip = ("webhook-timestamp", "host")
            return sorted((sorted((n, v) for n, v in r.headers if n.lower() not in skip), r.body) for r in receiver.requests)
        assert shown(of_relay) == shown(of_worker)


def test_drain_publishes_everything_and_ends(db):
    destination = null(db, shards=3)
    emit_many(db, 3000, keys=60)
    with relay(db, "--drain", "--connections", "2", "d") as process:
        assert process.wait() == 0, process.log()
    attempts = destination.attempts()
    assert len(attempts) == 3000 and {a.pid for a in attempts} == {str(process.pid)}
    assert_in_order(attempts, 60)
    assert status(db)["delivered"] == 3000
    assert status(db)["holders"] is None, "the shards are free at once"


@pytest.mark.parametrize("mode", ["--drain", "--once"])
def test_drain_does_not_end_at_a_fetch_that_got_on_without_events(db, mode):
    """It had read for long through events that are not wanted, or moved some that came due."""
    try:
        db.sql("SET retrysafe.fault_points = 'fetch.time_is_up'")
    except psycopg2.Error:
        pytest.skip("the build has no fault points")
    destination = null(db, event_types="'{t}'")
    db.sql("SELECT count(outbox_emit(NULL, 'o' || i, 'other', '{}')) FROM generate_series(1, 45000) i")
    emit(db, "a")
    connection = db.server.dsn(db.name) + " options='-c retrysafe.fault_points=fetch.time_is_up'"
    with relay(db, mode, "d", connection=connection) as process:
        assert process.wait() == 0, process.log()
    assert destination.delivered() == ["a"]
    db.sql("SELECT outbox_emit(NULL, 'b', 't', '{}', deliver_after => clock_timestamp() + interval '1 ms'), pg_sleep(0.01)")
    with relay(db, mode, "d", connection=connection) as process:
        assert process.wait() == 0, process.log()
    assert destination.delivered() == ["a", "b"]


def test_an_event_that_breaks_its_destination_stops_no_other(db):
    """It is all that was there when the relay fetched, and what comes later has to go beside it."""
    destination = null(db, options='"breaks": "bad"', **BACKOFF)
    with relay(db, "d") as process:
        for good in "a", "b":
            emit(db, f"bad-{good}")
            eventually(lambda: status(db)["failures"] > 0, message=process.log())
            emit(db, good)
            eventually(lambda: good in destination.delivered(), message=process.log())


@pytest.mark.parametrize("limit", [{"batch_events": 1}, {"batch_bytes": 10000}], ids=["events", "bytes"])
def test_an_event_that_breaks_its_destination_alone_in_its_batch_stops_no_other(db, limit):
    destination = null(db, options='"breaks": "bad"', **limit, **BACKOFF)
    large = "SELECT outbox_emit(NULL, %s, 't', to_jsonb(repeat('x', 20000)))"
    with relay(db, "d") as process:
        db.sql(large, "bad")
        eventually(lambda: status(db)["failures"] > 0, message=process.log())
        for key in "a", "b":
            db.sql(large, key)
        eventually(lambda: set(destination.delivered()) == {"a", "b"}, message=process.log())


def test_a_destination_that_is_gone_costs_the_server_no_memory(db):
    """The relay asks whether it is back, and the server refuses: with the statement that it has from the first time."""
    null(db)
    with relay(db, "d") as process:
        process.ready()
        pid = eventually(lambda: db.value("SELECT pid FROM pg_stat_activity WHERE application_name LIKE 'retrysafe-relay%%'"))
        refused = 'destination "d" does not exist'
        db.sql("SELECT outbox_drop_destination('d')")

        def plans():
            seen = len(db.server.log())
            db.sql("SELECT pg_log_backend_memory_contexts(%s)", pid)
            contexts = eventually(lambda: "Grand total" in db.server.log()[seen:] and db.server.log()[seen:])
            return contexts.count("CachedPlanSource")

        eventually(lambda: db.server.log().count(refused) > 1)
        before, refusals = plans(), db.server.log().count(refused)
        eventually(lambda: db.server.log().count(refused) >= refusals + 4, message=process.log())
        assert plans() <= before + 1, process.log()  # what was asked for the first time meanwhile


def test_once_publishes_one_batch(db):
    destination = null(db, batch_events=10)
    emit_many(db, 25)
    for left in (10, 20, 25, 25):
        with relay(db, "--once", "d") as process:
            assert process.wait() == 0, process.log()
        assert len(destination.attempts()) == left


def test_what_is_not_delivered_shows_in_the_exit_status(db):
    destination = null(db, max_attempts=1, **BACKOFF)
    for word, key in (("unreachable", "a"), ("final", "b")):
        destination.tell(word)
        emit(db, key)
        db.sql("SELECT outbox_resume('d')")
        with relay(db, "--drain", "d") as process:
            assert process.wait() == 4, process.log()
    assert status(db)["dead"] == 2
    with relay(db, "--drain", "d") as process:
        assert process.wait() == 0


# --- as a service -----------------------------------------------------------------------------------------------


def test_a_commit_wakes_it(db, server):
    """Nothing polls here: without the wake-up an event would come when the sleep ends, after 30 s."""
    destination = null(db)
    server.set("retrysafe.poll_interval", "1h")
    try:
        with relay(db, "d") as process:
            process.ready()
            for i in range(20):
                emit(db, f"e{i}")
                eventually(lambda: len(destination.attempts()) == i + 1, timeout=15)
            eventually(lambda: status(db)["delivered"] == 20)
            assert process.stop() == 0
    finally:
        server.set("retrysafe.poll_interval", None)


def cpu_seconds(pid):
    fields = open(f"/proc/{pid}/stat").read().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def test_it_does_nothing_while_there_is_nothing_to_do(db):
    """Also when the far side has closed the connection that the sink keeps."""
    db.sql("CREATE TABLE public.retrysafe_inbox (event_id uuid PRIMARY KEY)")
    options = {"host": "127.0.0.1", "port": db.server.port, "dbname": db.name, "user": "postgres", "application_name": "sink"}
    db.sql("SELECT outbox_create_destination('d', 'postgres', %s, workers => false)", json.dumps(options))
    with relay(db, "d") as process:
        process.ready()
        emit(db, "a")
        eventually(lambda: status(db)["delivered"] == 1, message=process.log)
        db.sql("SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE application_name = 'sink'")
        eventually(lambda: db.value("SELECT count(*) FROM pg_stat_activity WHERE application_name = 'sink'") == 0)
        before, until = cpu_seconds(process.pid), time.monotonic() + 2
        eventually(lambda: time.monotonic() > until)
        assert cpu_seconds(process.pid) - before < 0.5
        emit(db, "b")
        eventually(lambda: status(db)["delivered"] == 2)


def test_secrets_are_read_again_when_it_is_told(db):
    directory = db.server.directory
    (directory / "rotated").write_text("old")
    with Receiver() as receiver:
        db.sql("SELECT outbox_create_destination('d', 'pull')")
        config = f"[destination d]\nkind = http\nurl = {receiver.url}\nsecret_file = rotated\n"
        with relay(db, config=config) as process:
            process.ready()
            (directory / "rotated").write_text("new")
            os.kill(process.pid, signal.SIGHUP)
            eventually(lambda: process.lines("options and secrets are read again"))
            emit(db, "a")
            eventually(lambda: receiver.requests)
        request, = receiver.requests
        signed = f"{request.header('webhook-id')}.{request.header('webhook-timestamp')}.".encode() + request.body
        signature = base64.b64encode(hmac.new(b"new", signed, hashlib.sha256).digest()).decode()
        assert request.header("webhook-signature") == f"v1,{signature}"


def test_it_holds_no_snapshot_while_it_sleeps(db):
    null(db)
    with relay(db, "d") as process:
        process.ready()
        eventually(lambda: db.value("SELECT count(*) FROM pg_stat_activity WHERE application_name = 'retrysafe-relay'"
                                    " AND query LIKE 'CALL%%' AND state = 'active'") == 1)
        assert db.value("SELECT count(*) FROM pg_stat_activity WHERE application_name = 'retrysafe-relay'"
                        " AND (backend_xmin IS NOT NULL OR backend_xid IS NOT NULL)") == 0


def test_failures_and_retries(db):
    with Receiver() as receiver:
        http(db, receiver, max_attempts=3)
        outcomes = {"bad": [422], "late": [500, 204]}
        receiver.behave(lambda r: (lambda left: left.pop(0) if left else 204)(outcomes.get(r.header("ce-eventkey"), [])))
        with relay(db, "d") as process:
            process.ready()
            for key in ("good", "bad", "late", "better"):
                emit(db, key, ordering_key=key)
            eventually(lambda: status(db)["delivered"] == 3 and status(db)["dead"] == 1, message=process.log)
        assert db.sql("SELECT event_key, attempts FROM outbox_dead_letters") == [("bad", 1)]


def test_an_unreachable_destination_costs_nothing(db):
    """P6: no attempt is burnt and nothing is written for each event; the reason is to be seen; then it goes on."""
    with Receiver() as receiver:
        http(db, receiver)
        receiver.stop()
        emit_many(db, 200)
        with relay(db, "d") as process:
            process.ready()
            eventually(lambda: status(db)["failures"] >= 3)
            assert db.value("SELECT count(*) FROM outbox_parked") == 0
            assert "connect" in status(db)["last_error"]
            receiver.start()
            eventually(lambda: status(db)["delivered"] == 200)
            assert status(db)["failures"] == 0
            assert len(process.lines("the destination is unreachable")) == 1
            eventually(lambda: process.lines("the destination is back"))
        assert {r.header("ce-eventkey") for r in receiver.requests} == {f"e{i}" for i in range(1, 201)}


def test_an_event_that_breaks_its_receiver_is_found(db):
    """As a worker does: the culprit is counted as failed, the others go on."""
    with Receiver() as receiver:
        http(db, receiver, max_attempts=1)
        receiver.behave(lambda r: Reset() if r.header("ce-eventkey") == "e1" else 204)
        emit_many(db, 20)
        with relay(db, "d"):
            eventually(lambda: status(db)["delivered"] == 19 and status(db)["dead"] == 1, timeout=40)


def test_changes_of_the_destination_are_noticed(db):
    with Receiver() as first, Receiver() as second:
        http(db, first)
        with relay(db, "d") as process:
            process.ready()
            emit(db, "a")
            eventually(lambda: len(first.requests) == 1)
            db.sql("SELECT outbox_alter_destination('d', options => %s)", json.dumps({"url": second.url}))

            def arrived_there():
                emit(db, f"b{time.monotonic_ns()}")
                return second.requests
            eventually(arrived_there)
            db.sql("SELECT outbox_pause('d')")
            emit(db, "paused")
            db.sql("SELECT outbox_resume('d')")
            eventually(lambda: "paused" in [r.header("ce-eventkey") for r in second.requests])


def test_a_change_that_cannot_work_is_shown_and_the_others_go_on(db):
    """It was idle and had sent nothing: noticed at once, by the line in its log."""
    with Receiver() as receiver:
        http(db, receiver, "bad"), http(db, receiver, "good")
        with relay(db, "bad", "good") as process:
            process.ready()
            db.sql("SELECT outbox_alter_destination('bad', options => %s)",
                   json.dumps({"url": receiver.url, "secret_env": "RETRYSAFE_NOT_ON_THIS_MACHINE"}))
            eventually(lambda: process.lines("the destination cannot be published to"), timeout=8)
            emit(db, "a")
            eventually(lambda: status(db, "good")["delivered"] == 1)
            reason = process.lines("the destination cannot be published to")[0]["reason"]
            eventually(lambda: status(db, "bad")["last_error"] == reason)
            assert status(db, "bad")["retry"] == 0, "nothing is written for the event"
            db.sql("""SELECT outbox_alter_destination('bad', options => '{"secret_env": null}')""")
            eventually(lambda: status(db, "bad")["delivered"] == 1)
            assert len(receiver.requests) == 2
            assert process.stop() == 0


def test_workers_leave_nothing_to_a_relay_that_cannot_publish(db):
    """Its secret is gone. The worker does not even wait until it sees that nobody works the shards."""
    key = db.server.directory / "key-of-the-relay"
    key.write_text("sesame")
    with Receiver() as receiver:
        http(db, receiver, workers="true", shards=4)
        with relay(db, config=f"[destination d]\nsecret_file = {key.name}\n") as process:
            process.ready()

            def holders():
                emit_many(db, 40, keys=40, prefix=f"x{time.monotonic_ns()}")
                names = db.sql("SELECT holder FROM outbox_shards WHERE lease_until > clock_timestamp() AND holder IS NOT NULL")
                return sorted(name.split()[0] for (name,) in names)
            eventually(lambda: holders() == ["session", "session", "worker", "worker"], timeout=60)
            key.unlink()
            db.sql("SELECT outbox_alter_destination('d', batch_events => 50)")
            eventually(lambda: process.lines("the destination cannot be published to"))
            eventually(lambda: holders() == ["worker"] * 4, timeout=60)
            key.write_text("sesame")
            eventually(lambda: holders() == ["session", "session", "worker", "worker"], timeout=60)
            assert process.stop() == 0


def test_a_dropped_destination_leaves_the_others_alone(db):
    with Receiver() as first, Receiver() as second:
        http(db, first, "a"), http(db, first, "b")
        with relay(db, "a", "b") as process:
            process.ready()
            db.sql("SELECT outbox_drop_destination('b')")
            eventually(lambda: process.lines("the destination was dropped"))
            db.sql("SELECT outbox_alter_destination('a', options => %s)", json.dumps({"url": second.url}))

            def arrived_there():
                emit(db, f"x{time.monotonic_ns()}")
                return second.requests
            eventually(arrived_there)
            # Nobody looks every second: what wakes it is the commit.
            eventually(lambda: db.value("SELECT count(*) FROM pg_stat_activity WHERE query LIKE 'CALL %%outbox_wait%%'"
                                        " AND state = 'active' AND datname = current_database()") == 1)
            assert len(process.lines("the destination was dropped")) == 1
            http(db, second, "b")
            emit(db, "again")
            eventually(lambda: status(db, "b")["delivered"] == 1)
            assert process.lines("the destination is there again")
            assert process.stop() == 0


# --- together ---------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_two_relays_and_a_worker_share_a_destination(db):
    destination = null(db, workers="true", shards=6, batch_events=20, lease="'4 s'", options='"delay_ms": 5, "parallel": 4')
    emitted = 0
    with relay(db, "d") as one, relay(db, "d") as two:
        one.ready(), two.ready()
        pids = set()

        def all_have_worked():
            nonlocal emitted
            emit_many(db, 600, keys=60, prefix=f"{emitted}-")
            emitted += 600
            eventually(lambda: status(db)["delivered"] == emitted, timeout=60)
            last = {a.pid for a in destination.attempts()[-600:]}
            pids.update(last)
            return len(last) == 3
        eventually(all_have_worked, timeout=60)
        assert {str(one.pid), str(two.pid)} < pids
        attempts = destination.attempts(DELIVERED)
        assert len(attempts) == emitted == len({a.id for a in attempts}), "nothing was sent twice"
        assert one.stop() == 0 and two.stop() == 0
        emit_many(db, 600, keys=60, prefix="last-")
        eventually(lambda: status(db)["delivered"] == emitted + 600)
        assert {a.pid for a in destination.attempts()[-600:]} == pids - {str(one.pid), str(two.pid)}


@pytest.mark.slow
def test_four_relays_of_which_one_is_killed(db):
    """The others have its shards when its leases end."""
    destination = null(db, shards=8, batch_events=10, lease="'3 s'", options='"delay_ms": 5, "parallel": 4')
    relays = [relay(db, "d", connection=f"{db.server.dsn(db.name)} application_name=relay-{i}").ready() for i in range(4)]

    def of_first():
        return db.value("""SELECT count(*) FROM outbox_shards s JOIN pg_stat_activity a ON s.holder LIKE '%%.' || to_hex(a.pid)
            WHERE a.application_name = 'relay-0' AND s.lease_until > clock_timestamp()""")
    try:
        emit_many(db, 4000, keys=80)
        eventually(lambda: len({a.pid for a in destination.attempts()}) == 4 and of_first() > 0, timeout=60)
        relays[0].kill()
        assert status(db)["delivered"] < 4000
        leases_end = db.value("SELECT max(lease_until) FROM outbox_shards WHERE holder IS NOT NULL")
        eventually(lambda: db.value("SELECT clock_timestamp()") > leases_end)
        # Long before their sleep of 30 s ends.
        eventually(lambda: status(db)["delivered"] == 4000, timeout=20)
        arrived = destination.attempts(DELIVERED)
        ids = collections.Counter(a.id for a in arrived)
        assert len(ids) == 4000
        assert sum(ids.values()) - 4000 <= 10 * 8, "no more copies than were in flight"
        first_copies = {}
        for attempt in arrived:
            first_copies.setdefault(attempt.id, attempt)
        assert_in_order(first_copies.values(), 80)
        assert [r.stop() for r in relays[1:]] == [0, 0, 0]
    finally:
        for process in relays:
            process.kill()


def test_a_killed_relay_hands_its_shard_over_within_the_lease(db):
    destination = null(db, lease="'2 s'")
    destination.tell("hang")
    emit_many(db, 50)
    with relay(db, "d") as first:
        eventually(lambda: status(db)["holders"])
        first.kill()
    destination.tell("ok")
    with relay(db, "d"):
        eventually(lambda: status(db)["delivered"] == 50, timeout=2 + 8)
    assert_in_order(destination.attempts(DELIVERED), 10)


# --- stopping ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_it_stops_in_the_middle_of_a_batch(db, number):
    """What is in flight is finished and recorded, the rest is given back at once."""
    with Receiver() as receiver:
        http(db, receiver, options=', "max_in_flight": 2')
        receiver.behave(lambda r: Answer(204, delay=0.3))
        emit_many(db, 100)
        with relay(db, "d") as process:
            eventually(lambda: len(receiver.requests) >= 4)
            assert process.stop(number, timeout=10) == 0
        sent = len(receiver.requests)
        assert sent < 20
        assert status(db)["holders"] is None
        receiver.behave(204)
        with relay(db, "--drain", "d") as process:
            assert process.wait() == 0
        assert len(receiver.requests) == 100, "nothing twice, nothing lost"


def test_it_does_not_wait_for_ever_for_a_far_side_that_hangs(db):
    with Receiver() as receiver:
        http(db, receiver, options=', "max_in_flight": 2, "timeout": "60s"')
        receiver.behave(Hang)
        emit_many(db, 10)
        with relay(db, "--stop-timeout", "500ms", "d") as process:
            eventually(lambda: len(receiver.requests) == 2)
            begun = time.monotonic()
            assert process.stop() == 0
            assert time.monotonic() - begun < 5
        assert status(db)["holders"] is None
        receiver.behave(204)
        with relay(db, "--drain", "d") as process:
            assert process.wait() == 0
        assert {r.header("ce-eventkey") for r in receiver.requests} == {f"e{i}" for i in range(1, 11)}
        assert status(db)["delivered"] == 10


def test_stopped_in_the_middle_of_a_batch_it_repeats_nothing_that_was_delivered(db):
    """The first event hangs, and the second one behind it in its key was not sent."""
    with Receiver() as receiver:
        http(db, receiver, options=', "timeout": "60s"')
        receiver.behave(lambda r: Hang() if r.header("ce-eventkey") == "e1" else 204)
        emit_many(db, 30)  # e1, e11 and e21 are of one key
        with relay(db, "--stop-timeout", "500ms", "d") as process:
            eventually(lambda: len(receiver.requests) == 28)
            assert process.stop() == 0
        receiver.behave(204)
        with relay(db, "--drain", "d") as process:
            assert process.wait() == 0
        sent = [r.header("ce-eventkey") for r in receiver.requests]
        assert sorted(sent) == sorted(["e1", *(f"e{i}" for i in range(1, 31))])
        assert sent[-3:] == ["e1", "e11", "e21"]
        assert status(db)["delivered"] == 30


@pytest.mark.parametrize("table, attempted", [("outbox_shards", 0), ("outbox_batches", 1)], ids=["fetching", "recording"])
def test_it_stops_while_the_database_keeps_it_waiting(db, table, attempted):
    """What it had asked for comes after it was told to stop, and goes back."""
    destination = null(db, shards=4, batch_events=1)
    with relay(db, "d") as process:
        process.ready()
        destination.tell("hang")
        if attempted:
            emit_many(db, 10)
            eventually(lambda: status(db)["holders"])
        session = db.connect(autocommit=False)
        run(session, f"LOCK TABLE {table} IN SHARE MODE")
        if not attempted:
            emit_many(db, 10)
        destination.tell("ok")
        eventually(lambda: db.value("SELECT count(*) FROM pg_stat_activity WHERE application_name = 'retrysafe-relay'"
                                    " AND wait_event_type = 'Lock'"))
        os.kill(process.pid, signal.SIGTERM)
        eventually(lambda: process.lines("stopping"))
        session.rollback()
        assert process.wait() == 0
    assert (len(destination.attempts()), status(db)["delivered"], status(db)["holders"]) == (attempted, attempted, None)
    with relay(db, "--drain", "d") as process:
        assert process.wait() == 0
    assert sorted(destination.delivered()) == sorted(f"e{i}" for i in range(1, 11))


def test_a_batch_that_takes_longer_than_its_lease_keeps_it(db):
    destination = null(db, lease="'1 s'")
    destination.tell("hang")
    emit_many(db, 5)
    with relay(db, "d") as process:
        process.ready()
        token = eventually(lambda: db.value("SELECT token FROM outbox_shards WHERE holder IS NOT NULL"
                                            " AND lease_until > clock_timestamp()") if status(db)["holders"] else None)
        until = time.monotonic() + 2.5
        eventually(lambda: time.monotonic() > until)
        destination.tell("ok")
        eventually(lambda: status(db)["delivered"] == 5)
        assert db.value("SELECT token FROM outbox_shards") == token
        assert len(destination.attempts(DELIVERED)) == 5


def test_a_sink_that_forgets_to_ask_for_a_call_is_looked_after(db):
    """Nothing wakes the relay for it but the renewal of the lease."""
    destination = null(db, lease="'1 s'")
    destination.tell("forget")
    with relay(db, "d") as process:
        process.ready()
        emit(db, "a")
        eventually(lambda: status(db)["holders"])
        destination.tell("ok")
        eventually(lambda: status(db)["delivered"] == 1, message=process.log)


def test_a_late_record_is_refused_and_the_batch_dropped(db):
    destination = null(db, lease="'5 s'")
    destination.tell("hang")
    emit_many(db, 5)
    with relay(db, "d") as process:
        eventually(lambda: status(db)["holders"])
        db.sql("UPDATE outbox_shards SET token = token + 1, holder = 'somebody', lease_until = clock_timestamp() + interval '1 s'")
        destination.tell("ok")
        eventually(lambda: process.lines("a batch was lost"))
        eventually(lambda: status(db)["delivered"] == 5)


def test_a_lease_that_ends_while_there_is_no_connection(db, role):
    """Somebody else may have the batch by now: it is fetched again, with the next connection."""
    destination = null(db, lease="'1 s'")
    destination.tell("hang")
    emit_many(db, 5)
    courier = role("relay")
    with relay(db, "d", connection=db.server.dsn(db.name, courier)) as process:
        eventually(lambda: status(db)["holders"])
        db.sql(f"ALTER ROLE {courier} NOLOGIN")
        db.sql("SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE usename = %s", courier)
        eventually(lambda: process.lines("a batch was lost"), message=process.log)
        assert not process.lines("connected to the database again")
        db.sql(f"ALTER ROLE {courier} LOGIN")
        destination.tell("ok")
        eventually(lambda: status(db)["delivered"] == 5, message=process.log)
        assert len(destination.attempts(DELIVERED)) == 5
        assert process.stop() == 0


def test_a_batch_that_cannot_be_recorded_is_not_sent_again(db, role):
    destination = null(db)
    destination.tell("hang")
    emit_many(db, 5)
    courier = role("relay")
    with relay(db, "d", connection=db.server.dsn(db.name, courier)) as process:
        eventually(lambda: status(db)["holders"])
        function = db.value("SELECT oid::regprocedure::text FROM pg_proc WHERE proname = 'outbox_ack'")
        db.sql(f"REVOKE EXECUTE ON FUNCTION {function} FROM {courier}")
        destination.tell("ok")
        eventually(lambda: process.lines("could not record what became of events"), message=process.log)
        db.sql(f"GRANT EXECUTE ON FUNCTION {function} TO {courier}")
        eventually(lambda: status(db)["delivered"] == 5, message=process.log)
        assert len(destination.attempts(DELIVERED)) == 5


# --- the database goes away -------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("how", ["fast", "immediate"])
def test_the_server_restarts(how):
    with cluster() as server:
        db = make_database(server)
        destination = null(db, shards=2, batch_events=20, lease="'5 s'", options='"delay_ms": 10, "parallel": 4')
        emit_many(db, 1000, keys=20)
        with relay(db, "--connections", "2", "d") as process:
            eventually(lambda: len(destination.attempts()) > 100)
            server.pg_ctl("restart", "-m", how)
            eventually(lambda: status(db)["delivered"] == 1000, timeout=60)
            ids = collections.Counter(a.id for a in destination.attempts(DELIVERED))
            assert len(ids) == 1000
            assert sum(ids.values()) - 1000 <= 2 * 20
            assert process.lines("no connection to the database") and process.lines("connected to the database again")
            assert process.stop() == 0


def test_a_connection_that_breaks_while_a_batch_is_sent(db):
    """The next one records it: nothing is sent twice."""
    destination = null(db)
    destination.tell("hang")
    emit_many(db, 20)
    with relay(db, "d") as process:
        eventually(lambda: status(db)["holders"])
        db.sql("SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE application_name = 'retrysafe-relay'")
        eventually(lambda: process.lines("connected to the database again"))
        destination.tell("ok")
        eventually(lambda: status(db)["delivered"] == 20)
        assert len(destination.attempts(DELIVERED)) == 20


def test_a_connection_that_breaks_between_batches(db):
    """The next one does not wait until the lease of the one before ends."""
    destination = null(db, shards=3, lease="'1 hour'")
    with relay(db, "d") as process:
        process.ready()
        emit_many(db, 30, keys=30)
        eventually(lambda: status(db)["delivered"] == 30)
        db.sql("SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE application_name = 'retrysafe-relay'")
        emit_many(db, 30, keys=30, prefix="f")
        eventually(lambda: status(db)["delivered"] == 60)
        assert len(destination.attempts()) == 60


def test_the_first_host_that_takes_writes(db):
    destination = null(db)
    emit(db, "a")
    connection = f"host=127.0.0.1,{db.server.directory} port=1,{db.server.port} dbname={db.name} user=postgres"
    with relay(db, "--drain", "d", connection=connection) as process:
        assert process.wait() == 0, process.log()
    assert len(destination.attempts(DELIVERED)) == 1
    with relay(db, "d", connection=connection) as process:
        emit(db, "b")
        eventually(lambda: len(destination.attempts(DELIVERED)) == 2)


# --- the extension goes elsewhere -------------------------------------------------------------------------------


def rename_schema(db, before, now):
    db.sql(f"ALTER SCHEMA {before} RENAME TO {now}")
    db.sql(f"ALTER DATABASE {db.name} SET search_path = {now}, public")


def complaints(process):
    return [line for line in process.lines() if line["level"] in ("warning", "error")]


def test_the_schema_is_renamed(db):
    destination = null(db, lease="'1 hour'")
    with relay(db, "d") as process:
        process.ready()
        emit_many(db, 1)
        eventually(lambda: status(db)["delivered"] == 1)
        rename_schema(db, "retrysafe", "elsewhere")
        db.sql("SELECT outbox_emit(NULL, 'e2', 't', '{}')")
        eventually(lambda: destination.delivered() == ["e1", "e2"], message=process.log)
        db.sql("SELECT outbox_alter_destination('d', batch_events => 7)")  # is noticed as ever
        db.sql("SELECT outbox_emit(NULL, 'e3', 't', '{}')")
        eventually(lambda: status(db)["delivered"] == 3, message=process.log)
        rename_schema(db, "elsewhere", '"we ird"')
        assert process.stop() == 0
        assert status(db)["holders"] is None, "its shard is free at once"
        assert complaints(process) == []


def test_the_schema_is_renamed_while_a_batch_is_sent(db):
    """Its lease is renewed, and it is recorded, under the new name."""
    destination = null(db, lease="'1 s'", batch_events=10)
    destination.tell("hang")
    emit_many(db, 20)
    with relay(db, "d") as process:
        eventually(lambda: status(db)["holders"])
        token = db.value("SELECT token FROM outbox_shards")
        rename_schema(db, "retrysafe", "elsewhere")
        until = time.monotonic() + 2.5
        eventually(lambda: time.monotonic() > until)
        destination.tell("ok")
        eventually(lambda: status(db)["delivered"] == 20, message=process.log)
        assert db.value("SELECT token FROM outbox_shards") == token
        assert len(destination.attempts()) == 20
        assert complaints(process) == []


@pytest.mark.parametrize("mode, delivered", [("--drain", 20), ("--once", 10)])
def test_the_schema_is_renamed_below_a_run(db, mode, delivered):
    destination = null(db, batch_events=10)
    destination.tell("hang")
    emit_many(db, 20)
    with relay(db, mode, "d") as process:
        eventually(lambda: status(db)["holders"])
        rename_schema(db, "retrysafe", "elsewhere")
        destination.tell("ok")
        assert process.wait() == 0, process.log()
    assert (status(db)["delivered"], len(destination.attempts())) == (delivered, delivered)
    assert status(db)["holders"] is None


def test_the_old_name_of_the_schema_is_taken(db, role):
    """By one that the relay's role may not use."""
    destination = null(db)
    courier = role("relay")
    with relay(db, "d", connection=db.server.dsn(db.name, courier)) as process:
        process.ready()
        rename_schema(db, "retrysafe", "elsewhere")
        db.sql("CREATE SCHEMA retrysafe")
        db.sql("SELECT outbox_emit(NULL, 'a', 't', '{}')")
        eventually(lambda: destination.delivered() == ["a"], message=process.log)
        assert complaints(process) == []


def test_the_extension_is_made_anew_in_another_schema(db):
    """What was in flight is of the log that is gone. Its destination is not there until one of that name is made."""
    before = null(db)
    before.tell("hang")
    emit_many(db, 20)
    with relay(db, "d") as process:
        eventually(lambda: status(db)["holders"])
        db.sql("DROP EXTENSION retrysafe")
        before.tell("ok")
        eventually(lambda: process.lines("no connection to the database"), message=process.log)
        assert "not installed" in process.lines("no connection to the database")[0]["reason"]
        db.sql("CREATE SCHEMA elsewhere")
        db.sql("CREATE EXTENSION retrysafe SCHEMA elsewhere")
        db.sql(f"ALTER DATABASE {db.name} SET search_path = elsewhere, public")
        eventually(lambda: process.lines("a batch was lost"), message=process.log)
        eventually(lambda: process.lines("could not look the destination up"), message=process.log)
        assert process.lines("could not look the destination up")[0]["sqlstate"] == "RS201"
        eventually(lambda: process.lines("the destination was dropped"), message=process.log)
        now = null(db)
        db.sql("SELECT outbox_emit(NULL, 'a', 't', '{}')")
        eventually(lambda: status(db)["delivered"] == 1, message=process.log)
        eventually(lambda: process.lines("the destination is there again"))
        assert (now.delivered(), len(before.attempts())) == (["a"], 20)
        assert process.stop() == 0


@pytest.mark.parametrize("step_by_step", [True, False], ids=["step by step", "at once"])
def test_an_extension_that_is_made_anew_in_another_schema_has_another_destination(db, step_by_step):
    """Of the same name, to another receiver."""
    with Receiver() as before, Receiver() as now:
        http(db, before)
        with relay(db, "d") as process:
            process.ready()
            emit(db, "a")
            eventually(lambda: status(db)["delivered"] == 1)
            session = db.connect(autocommit=step_by_step)
            for command in ("DROP EXTENSION retrysafe", "CREATE SCHEMA elsewhere", "CREATE EXTENSION retrysafe SCHEMA elsewhere",
                            "SET search_path = elsewhere", "SELECT outbox_emit(NULL, 'b', 't', '{}')",
                            f"""SELECT outbox_create_destination('d', 'http', '{{"url": "{now.url}"}}', workers => false,
                                                                 start_at => 'earliest')"""):
                run(session, command)
            session.commit()
            eventually(lambda: now.requests, timeout=60, message=process.log)
            assert [r.header("ce-eventkey") for r in before.requests + now.requests] == ["a", "b"]


# --- what it is told --------------------------------------------------------------------------------------------


def test_hosts_of_a_service_file(db):
    """Each has its time: the first one takes connections and says nothing."""
    null(db)
    emit_many(db, 1)
    services = db.server.directory / "services"
    with socket.create_server(("127.0.0.1", 0)) as silent:
        services.write_text(f"[shop]\nhost=127.0.0.1,{db.server.directory}\nport={silent.getsockname()[1]},{db.server.port}\n"
                            f"dbname={db.name}\nuser=postgres\n")
        with relay(db, "d", connection="service=shop connect_timeout=1",
                   environment={"PGSERVICEFILE": str(services)}) as process:
            eventually(lambda: status(db)["delivered"] == 1, message=process.log)


def test_a_name_that_nobody_resolves_holds_up_nothing(db):
    """Neither its end nor the next host; and the time that a host has includes its name."""
    null(db)
    with names() as (known, environment):
        known.say("hangs.test", "hang")
        known.say("db.test")
        where = f"port={db.server.port} dbname={db.name} user=postgres connect_timeout=1"
        began = time.monotonic()
        with relay(db, "d", connection=f"host=hangs.test,db.test {where}", environment=environment) as process:
            process.ready()
            assert time.monotonic() - began < 6, "a name takes eight seconds"
        with relay(db, "--connections", "2", "d", connection=f"host=hangs.test {where}", environment=environment) as process:
            eventually(lambda: process.lines("no connection to the database"))
            began = time.monotonic()
            assert process.stop() == 0
            assert time.monotonic() - began < 6


def test_a_pull_destination_is_described_by_the_configuration_file(db):
    """The database holds no secret."""
    with Receiver() as receiver:
        db.sql("SELECT outbox_create_destination('d', 'pull')")
        emit(db, "a")
        (db.server.directory / "key").write_text("sesame-of-the-file\n")
        config = f"""
            # comment
            allowed_addresses = 127.0.0.1
            [destination d]
            kind = http
            url = {receiver.url}
            secret_file = key
            headers.Authorization = Bearer sesame-of-the-line
            timeout = 5s
            http2 = false
        """
        db.sql("CREATE ROLE courier_of_events LOGIN")
        try:
            db.sql("SELECT retrysafe_grant('courier_of_events', 'consume')")  # reads no secret of any destination
            with Relay(db, "--drain", config=config, connection=db.server.dsn(db.name, "courier_of_events")) as process:
                assert process.wait() == 0, process.log()
                assert "sesame" not in process.log()
        finally:
            db.sql("DROP OWNED BY courier_of_events")
            db.sql("DROP ROLE courier_of_events")
        request, = receiver.requests
        assert request.header("Authorization") == "Bearer sesame-of-the-line"
        assert request.header("webhook-signature")
        assert "sesame" not in str(db.sql("SELECT * FROM outbox_status"))


def test_the_configuration_file_goes_before_the_database(db):
    with Receiver() as receiver:
        db.sql("SELECT outbox_create_destination('d', 'http', '{\"url\": \"http://127.0.0.1:1/\"}', workers => false)")
        emit(db, "a")
        with relay(db, "--drain", config=f"[destination d]\nurl = {receiver.url}\nsource = here\n") as process:
            assert process.wait() == 0, process.log()
        assert receiver.requests[0].header("ce-source") == "here"


def test_secrets_of_the_database_are_read_on_the_machine_of_the_relay(db):
    directory = db.server.directory
    admin = db.server.connect()
    run(admin, f"ALTER DATABASE {db.name} SET retrysafe.allowed_secret_directory = '/somewhere/else'")
    (directory / "secrets").mkdir(exist_ok=True)
    (directory / "secrets/key").write_text("sesame")
    with Receiver() as receiver:
        http(db, receiver, "f", options=', "secret_file": "key"')
        http(db, receiver, "e", options=', "secret_env": "RETRYSAFE_TEST_KEY"')
        http(db, receiver, "o", options=', "ca_file": "/somewhere/else/passwd"')
        emit(db, "a")
        with relay(db, "--drain", "--secret-directory", directory / "secrets", "f", "e",
                   environment={"RETRYSAFE_TEST_KEY": "sesame"}) as process:
            assert process.wait() == 0, process.log()
        assert all(r.header("webhook-signature") for r in receiver.requests) and len(receiver.requests) == 2
        for arguments in (("f",), ("e",), ("--secret-directory", directory / "secrets", "o")):
            with relay(db, "--drain", *arguments) as process:
                assert process.wait() == 2
                assert "sesame" not in process.log()


def test_wrong_options_end_it_at_once(db):
    null(db)
    db.sql("SELECT outbox_create_destination('p', 'pull')")
    cases = [
        ((), None, "name a destination"),
        (("--no-such-option", "d"), None, "try --help"),
        (("--connections", "0", "d"), None, "connections"),
        (("--connections", "x", "d"), None, "connections"),
        (("--log-level", "loud", "d"), None, "log_level"),
        (("--statistics-interval", "5", "d"), None, "statistics_interval"),
        (("--once", "--drain", "d"), None, "exclude"),
        (("--config", "/no/such/file"), None, "cannot read the configuration file /no/such/file: No such file"),
        (("--config", "/etc"), None, "Is a directory"),
        (("--allowed-addresses", "10.0.0.0/99", "d"), None, "allowed_addresses"),
        (("--library-path", "/no/such", "d"), None, "is not installed in /no/such"),
        (("p",), None, "must tell which kind"),
        ((), "[destination p]\nkind = htpp\nurl = http://x/\n", "kind \"htpp\" is unknown"),
        ((), "[destination p]\nkind = other\nlibrary = retrysafe_null\ndelay_ms = 1\n", "outbox_register_kind"),
        ((), "[destination p]\nkind = http\nurl = http://x/\nsecret_file = nowhere\n", "/nowhere of option \"secret\" cannot be read: No"),
        ((), "[destination p]\nkind = http\nkind = http\n", "line 3: \"kind\" is set twice"),
        (("nobody",), None, "does not exist"),
        ((), "no_such = 1\n[destination d]\n", "line 1"),
        ((), "[nonsense]\n", "line 1"),
        ((), "[destination d]\njust text\n", "line 2"),
        ((), "[destination d]\nkind = http\n", "of kind"),
        ((), "[destination d]\nno_such = 1\n", "unknown option"),
        ((), "[destination d]\ndelay_ms = soon\n", "delay_ms"),
        ((), "[destination d]\nlibrary = retrysafe_missing\n", "not installed"),
    ]
    for arguments, config, expected in cases:
        with Relay(db, *arguments, config=config, log_format="text") as process:
            assert process.wait() == 2, (arguments, config, process.log())
            assert expected in process.log(), (arguments, config, process.log())
    with Relay(db, "--connections", "0", "d") as process:
        assert process.wait() == 2
        line, = process.lines()
        assert (line["level"], line["message"]) == ("error", "connections must be a number from 1 to 256")
    with Relay(db, "d", connection=f"{db.server.dsn(db.name)} password=sesame") as process:
        assert process.wait() == 2
        assert "sesame" not in process.log()
    with Relay(db, "d", config="connection = host='\n", log_format="text") as process:
        assert process.wait() == 2


def test_check(db):
    destination = null(db)
    emit(db, "a")
    with relay(db, "--check", "d") as process:
        assert process.wait() == 0
        line, = process.lines()
        assert (line["message"], line["destination"], line["kind"]) == ("the destination can be published to", "d", "null")
    assert destination.attempts() == []
    with relay(db, "--check", "d", "nobody") as process:
        assert process.wait() == 2
    with relay(db, "--check", "d", connection="host=127.0.0.1 port=1 dbname=x") as process:
        assert process.wait() == 3
    with relay(db, "--check", "d", connection=db.server.dsn("postgres")) as process:
        assert process.wait() == 3
        assert "not installed" in process.log()


def test_it_needs_the_access_and_no_more(db):
    null(db)
    emit(db, "a")
    db.sql("CREATE ROLE courier_of_events LOGIN")
    try:
        connection = db.server.dsn(db.name, "courier_of_events")
        with relay(db, "--drain", "d", connection=connection) as process:
            assert process.wait() == 3
            assert "retrysafe_grant('ROLE', 'relay')" in process.log()
        db.sql("SELECT retrysafe_grant('courier_of_events', 'relay')")
        with relay(db, "--drain", "d", connection=connection) as process:
            assert process.wait() == 0, process.log()
        assert status(db)["delivered"] == 1
        with relay(db, "d", connection=connection) as process:
            process.ready()
            emit(db, "b")
            eventually(lambda: status(db)["delivered"] == 2)
    finally:
        db.sql("DROP OWNED BY courier_of_events")
        db.sql("DROP ROLE courier_of_events")


def test_help_and_version(db):
    for argument, expected in (("--help", b"Usage:"), ("-h", b"Exit status"), ("--version", b"retrysafe-relay 0.1.0"), ("-V", b"0.1")):
        with Relay(db, argument) as process:
            assert process.wait() == 0
            assert expected in process.process.stdout.read()


def test_logs_and_process_list_hold_no_secret(db):
    secret = "sesame-1234567890"
    with Receiver() as receiver:
        http(db, receiver, options=f', "secret": "{secret}", "headers": {{"Authorization": "{secret}"}}')
        receiver.behave(lambda r: Answer(500, body=secret.encode()))
        emit(db, "a")
        config = f"connection = {db.server.dsn(db.name)} password={secret}\n[destination d]\n"
        with relay(db, "--log-level", "debug", "--statistics-interval", "200ms", config=config) as process:
            process.ready()
            eventually(lambda: receiver.requests and len(process.lines("statistics")) > 2)
            shown = open(f"/proc/{process.pid}/cmdline").read()
            assert process.stop() == 0
            assert secret not in process.log() and secret not in shown
            assert {"time", "level", "message"} <= set(process.lines()[0])
            assert process.lines("statistics")[0].keys() >= {"delivered", "failed", "dead", "unreachable"}


def test_the_unit_is_one_that_systemd_takes(tmp_path):
    if not shutil.which("systemd-analyze"):
        pytest.skip("systemd is not there")
    unit = tmp_path / "retrysafe-relay@.service"
    unit.write_text((TOP / "src/relay" / unit.name).read_text().replace("@bindir@", str(TOP)))
    done = subprocess.run(["systemd-analyze", "verify", unit], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


def test_readiness_is_told_to_the_service_manager(db):
    import socket
    null(db)
    path = str(db.server.directory / "notify")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(path)
        os.chmod(path, 0o777)
        manager.settimeout(20)
        with relay(db, "d", environment={"NOTIFY_SOCKET": path}) as process:
            assert manager.recv(100) == b"READY=1"
            assert process.stop() == 0
            assert manager.recv(100) == b"STOPPING=1"
    os.unlink(path)
