"""What every kind of destination that is a broker has to pass, with the real broker and a real worker.

A file of tests has a fixture `broker` that gives a started one, and a subclass of Contract:

    @pytest.fixture(scope="module")
    def broker():
        with Redis() as one:
            yield one

    class TestRedis(Contract):
        pass
"""
import collections
import json
import re
import threading

import pytest

import closing
import odd_values
from brokers.broker import Broker, Message  # noqa: F401
from conftest import eventually, run
from receiver import Receiver
from relay_process import Relay
from test_security_injection import emit_evil

EVENTS, KEYS = 10_000, 100


def create(db, name, kind, options, **parameters):
    parameters = {"backoff": "100 ms", "backoff_max": "500 ms"} | parameters
    names = "".join(f", {key} => %s" for key in parameters)
    db.sql(f"SELECT outbox_create_destination(%s, %s, %s, 'earliest'{names})", name, kind, json.dumps(options),
           *parameters.values())


def emit(db, event_key, payload="{}", ordering_key=None, event_type="order.paid", headers=None, at_most=None):
    """`at_most`: bytes that a payload may have."""
    connection = db.server.connect(db.name)
    try:
        if at_most:
            run(connection, "SELECT set_config('retrysafe.max_payload_bytes', %s, false)", f"{at_most}B")
        run(connection, "SELECT outbox_emit(NULL, %s, %s, %s, %s, %s)", event_key, event_type, payload, ordering_key,
            json.dumps(headers) if headers else None)
    finally:
        connection.close()


def emit_many(db, first, count, keys=KEYS):
    """Numbered events in transactions of 500, each key in the order of the numbers."""
    for start in range(first, first + count, 500):
        db.sql("""SELECT count(outbox_emit(NULL, 'event-' || n, 'number', jsonb_build_object('n', n), 'key-' || n %% %s))
                    FROM generate_series(%s::int, %s::int) AS n""", keys, start, min(start + 500, first + count) - 1)


def status(db, name):
    columns = ("state", "backlog", "delivered", "parked_retry", "parked_blocked", "dead", "failures", "last_error")
    return dict(zip(columns, db.sql(f"SELECT {', '.join(columns)} FROM outbox_status WHERE name = %s", name)[0]))


def settled(db, name):
    now = status(db, name)
    return now["backlog"] == now["parked_retry"] == now["parked_blocked"] == 0


def await_delivery(db, name, count, timeout=60):
    eventually(lambda: status(db, name)["delivered"] >= count and settled(db, name), timeout,
               message=f"{count} events were not delivered")


def messages(db, broker):
    """What the broker has of the events of this database, copies included. Others may have used it before."""
    ours = {event_id for event_id, in db.sql("SELECT event_id::text FROM outbox_events")}
    return [m for m in broker.read() if m.id in ours]


def first_copies(received):
    first = {}
    for message in received:
        first.setdefault(message.id, message)
    return list(first.values())


def assert_complete_and_in_order(db, received):
    """Every event of the log is there, under its id and as it was emitted, and the first copies are in key order."""
    events = {event_id: Message(event_id, *rest, {re.sub("[^a-z0-9]", "", name.lower()): text for name, text in headers.items()})
              for event_id, *rest, headers in db.sql("""SELECT event_id::text, event_key, scope, ordering_key, event_type,
                  payload::text, coalesce(headers, '{}') FROM outbox_events ORDER BY id""")}
    first = first_copies(received)
    assert {m.id for m in first} == events.keys()
    for m in received:
        assert m == events[m.id]
    positions = {event_id: position for position, event_id in enumerate(events)}
    arrived = collections.defaultdict(list)
    for m in first:
        if m.ordering_key is not None:
            arrived[m.ordering_key].append(positions[m.id])
    for key, order in arrived.items():
        assert order == sorted(order), f"the order of {key}"


def backs_off(db, name):
    """What is shown when the destination as a whole fails: tried again and again, and no attempt of an event counted."""
    now = eventually(lambda: (now := status(db, name))["state"] == "backing off" and now["failures"] >= 3 and now,
                     message="it does not back off")
    assert now["last_error"] and now["delivered"] == now["parked_retry"] == now["dead"] == 0
    return now["last_error"]


class Contract:
    def test_an_event_arrives_as_it_is(self, db, broker):
        create(db, "d", broker.kind, broker.options())
        given = [("plain", '{"total": 1.50, "name": "Zoë \\u0001 \\"😀"}', "order-1", "order.paid"),
                 ("without key", "[]", None, "order.paid"),
                 ("other names", "null", "Ärger im Büro / 100 %", "größe.geändert"),
                 ("longer", json.dumps("x" * 100_000), "k" * 255, "t" * 100)]
        for key, payload, ordering_key, event_type in given:
            emit(db, key, payload, ordering_key, event_type, {"traceparent": "00-1-2-01", "X-Tenant": "Ö"})
        await_delivery(db, "d", len(given))
        received = messages(db, broker)
        assert len(received) == len(given)
        assert_complete_and_in_order(db, received)
        assert status(db, "d")["last_error"] is None

    def test_an_odd_value_arrives_bit_for_bit(self, db, broker):
        """Those that are refused get to no destination: test_odd_values.py."""
        create(db, "d", broker.kind, broker.options_for_any_type())
        for value in odd_values.ACCEPTED.values():
            odd_values.emit(db, value)
        await_delivery(db, "d", len(odd_values.ACCEPTED))
        ids = dict(db.sql("SELECT event_key, event_id::text FROM outbox_events"))
        received = messages(db, broker)
        assert sorted(m.event_key for m in received) == sorted(odd_values.ACCEPTED)
        for m in received:
            value = odd_values.ACCEPTED[m.event_key]
            assert m == Message(ids[value.key], value.key, value.key, value.key, value.type, value.stored,
                                value.extensions()), value.about
        closing.balance(db, "d", [m.id for m in received], committed=odd_values.ACCEPTED)

    def test_no_text_frames_a_message(self, db, broker):
        """Line breaks and commands in each place that takes a text: one message, and the text in it bit for bit."""
        before = len(broker.read())
        create(db, "d", broker.kind, broker.options_for_any_type())
        count = emit_evil(db)
        await_delivery(db, "d", count)
        received = messages(db, broker)
        assert len(broker.read()) - before == len(received) == count
        assert_complete_and_in_order(db, received)

    def test_ten_thousand_events_arrive_complete_and_in_key_order(self, db, broker):
        create(db, "d", broker.kind, broker.options(), shards=2)
        emit_many(db, 0, EVENTS)
        await_delivery(db, "d", EVENTS)
        received = messages(db, broker)
        assert len(received) == EVENTS, "no copies without a failure"
        assert_complete_and_in_order(db, received)

    def test_killed_in_the_middle(self, db, broker):
        create(db, "d", broker.kind, broker.options())
        killed = threading.Event()

        def emit_before_and_after():  # however fast the first part is delivered, the broker is missed
            emit_many(db, 0, EVENTS // 2)
            killed.wait()
            emit_many(db, EVENTS // 2, EVENTS // 2)
        emitter = threading.Thread(target=emit_before_and_after)
        emitter.start()
        try:
            eventually(lambda: status(db, "d")["delivered"] >= EVENTS // 10)
            broker.kill()
            killed.set()
            try:
                emitter.join()
                eventually(lambda: status(db, "d")["last_error"])
            finally:
                broker.start()
        finally:
            killed.set()
            emitter.join()
        await_delivery(db, "d", EVENTS)
        assert status(db, "d")["dead"] == 0
        received = messages(db, broker)
        assert_complete_and_in_order(db, received)
        closing.balance(db, "d", [m.id for m in received], committed=[f"event-{n}" for n in range(EVENTS)])

    def test_a_relay_is_killed_in_the_middle_and_then_the_broker(self, db, broker):
        """Another relay goes on when the lease of the first one ends, and when the broker is back."""
        create(db, "d", broker.kind, broker.options(), workers=False, lease="2 s", batch_events=100)
        emit_many(db, 0, EVENTS // 2)
        arguments = "--allowed-addresses", "127.0.0.1, ::1", "d"
        with Relay(db, *arguments) as first:
            eventually(lambda: status(db, "d")["delivered"] >= EVENTS // 10, message=first.log)
            first.kill()
        emit_many(db, EVENTS // 2, 500)  # however fast it was, there is something for the other one
        with Relay(db, *arguments) as second:
            eventually(lambda: status(db, "d")["delivered"] >= EVENTS // 2 + 500, message=second.log)
            broker.kill()
            try:
                emit_many(db, EVENTS // 2 + 500, EVENTS // 2 - 500)
                eventually(lambda: status(db, "d")["last_error"], message=second.log)
            finally:
                broker.start()
            await_delivery(db, "d", EVENTS)
            assert second.stop() == 0
        assert status(db, "d")["dead"] == 0
        received = messages(db, broker)
        assert_complete_and_in_order(db, received)
        closing.balance(db, "d", [m.id for m in received], committed=[f"event-{n}" for n in range(EVENTS)])

    def test_what_is_too_large_is_a_dead_letter_at_once(self, db, broker):
        create(db, "d", broker.kind, broker.options())
        for key in "before", "large", "after":
            large = key == "large"
            emit(db, key, json.dumps("x" * broker.too_large() if large else key), "k", at_most=2 * broker.too_large())
            emit(db, f"{key} of another", "{}", "other")
        eventually(lambda: status(db, "d")["dead"] == 1)
        await_delivery(db, "d", 5)
        (key, attempts, reason), = db.sql("SELECT event_key, attempts, reason FROM outbox_dead_letters")
        assert (key, attempts) == ("large", 1) and reason
        large = db.value("SELECT event_id::text FROM outbox_events WHERE event_key = 'large'")
        assert {m.id for m in messages(db, broker)} == {
            event_id for event_id, in db.sql("SELECT event_id::text FROM outbox_events")} - {large}

    def test_wrong_credentials(self, db, broker):
        logged = len(db.server.log())
        create(db, "d", broker.kind, broker.wrong_credentials())
        emit(db, "waits", "{}", "k")
        assert "hunter2" not in backs_off(db, "d")
        assert "hunter2" not in json.dumps(db.sql("SELECT options FROM outbox_status"))
        assert "hunter2" not in db.server.log()[logged:]
        self.put_right(db, broker, broker.wrong_credentials())

    def test_wrong_host(self, db, broker):
        create(db, "d", broker.kind, broker.wrong_host())
        emit(db, "waits", "{}", "k")
        backs_off(db, "d")
        self.put_right(db, broker, broker.wrong_host())

    @staticmethod
    def put_right(db, broker, wrong):
        """With the good options the event goes out."""
        good = dict.fromkeys(wrong) | broker.options()
        db.sql("SELECT outbox_alter_destination('d', options => %s)", json.dumps(good))
        await_delivery(db, "d", 1)
        assert_complete_and_in_order(db, messages(db, broker))

    def test_an_address_that_is_not_allowed(self, server, db, broker):
        server.set("retrysafe.allowed_addresses", "")
        try:
            eventually(lambda: db.value("SHOW retrysafe.allowed_addresses") == "")
            create(db, "d", broker.kind, broker.options())
            emit(db, "waits", "{}", "k")
            assert "allowed_addresses" in backs_off(db, "d")
        finally:
            server.set("retrysafe.allowed_addresses", None)
        await_delivery(db, "d", 1)
        assert len(messages(db, broker)) == 1

    def test_one_of_several_destinations_is_down(self, db, broker):
        """One log, progress for each destination: the broker's outage does not touch the web server."""
        with Receiver() as receiver:
            create(db, "web", "http", {"url": receiver.url})
            create(db, "d", broker.kind, broker.options())
            create(db, "again", broker.kind, broker.options())
            emit_many(db, 0, 200, keys=10)
            for name in "web", "d", "again":
                await_delivery(db, name, 200)
            broker.kill()
            try:
                emit_many(db, 200, 200, keys=10)
                await_delivery(db, "web", 400)
                for name in "d", "again":
                    eventually(lambda: status(db, name)["state"] == "backing off")
                    assert status(db, name)["delivered"] == 200
                assert status(db, "web")["failures"] == 0
            finally:
                broker.start()
            for name in "d", "again":
                await_delivery(db, name, 400)
                assert status(db, name)["dead"] == 0
            closing.balance(db, "web", receiver.ids)
            received = messages(db, broker)
            assert len(received) >= (400 if broker.keeps_ids else 800)
            assert_complete_and_in_order(db, received)
