"""Destinations of kind rabbitmq with a real broker."""
import pytest

from brokers.contract import Contract, await_delivery, backs_off, create, emit, messages, status
from brokers.rabbitmq import RabbitMQ
from conftest import eventually
from test_security_injection import emit_evil, settled

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("rabbitmq")]


@pytest.fixture(scope="module")
def broker():
    with RabbitMQ() as one:
        yield one


class TestRabbitMQ(Contract):
    pass


def test_a_missing_exchange_is_shown_and_made(db, broker):
    create(db, "d", "rabbitmq", broker.options() | {"exchange": "later"})
    emit(db, "waits", "{}", "k")
    assert backs_off(db, "d") == "NOT_FOUND - no exchange 'later' in vhost '/'"
    with broker.channel() as channel:
        channel.exchange_declare("later", "fanout")
        channel.queue_bind("everything", "later")
        await_delivery(db, "d", 1)
        channel.exchange_delete("later")
    assert len(messages(db, broker)) == 1


def test_a_missing_binding(db, broker):
    """Of one route for all it is the destination's, of the event's own route the event's."""
    with broker.channel() as channel:
        channel.exchange_declare("unbound", "topic")
        try:
            create(db, "one", "rabbitmq", broker.options() | {"exchange": "unbound", "routing_key": "fixed"})
            create(db, "own", "rabbitmq", broker.options() | {"exchange": "unbound"}, max_attempts=2)
            emit(db, "lost", "{}", "k")
            assert backs_off(db, "one") == "no queue took the message: NO_ROUTE"
            eventually(lambda: status(db, "own")["dead"] == 1)
            assert db.sql("SELECT event_key, attempts, reason FROM outbox_dead_letters WHERE destination = 'own'") == [
                ("lost", 2, "no queue took the message: NO_ROUTE")]
        finally:
            channel.exchange_delete("unbound")


def test_a_route_that_is_no_name(db, broker):
    create(db, "d", "rabbitmq", broker.options() | {"routing_key": "{header:region}.{type}"})
    emit(db, "without", "{}", "a")
    emit(db, "long", "{}", "b", headers={"region": "x" * 250})
    emit(db, "good", "{}", "c", headers={"region": "eu"})
    eventually(lambda: status(db, "d")["dead"] == 2)
    await_delivery(db, "d", 1)
    assert dict(db.sql("SELECT event_key, reason FROM outbox_dead_letters WHERE attempts = 1")) == {
        "without": 'routing key: the event has no header "region", which its route is made from',
        "long": "routing key: a name of 261 bytes is longer than the 255 bytes that AMQP allows"}


def test_no_text_frames_a_routing_key(db, broker):
    """It may be any text that is short enough: the server gets it bit for bit."""
    broker.drain()  # what other tests have left
    create(db, "d", "rabbitmq", broker.options() | {"routing_key": "{ordering_key}"}, max_attempts=1)
    count = emit_evil(db)
    settled(db, count)
    keys = dict(db.sql("SELECT event_id::text, ordering_key FROM outbox_events WHERE ordering_key IS NOT NULL"))
    arrived = [(properties.message_id, method.routing_key) for method, properties, _ in broker.drain()]
    assert sorted(arrived) == sorted(keys.items()) and status(db, "d")["dead"] == count - len(keys)
