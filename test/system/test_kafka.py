"""Kind kafka end to end: a real worker, a real broker."""
import pytest

from brokers.contract import Contract, await_delivery, backs_off, create, emit, status
from brokers.kafka import TOPIC, Kafka
from test_security_injection import emit_evil, settled


@pytest.fixture(scope="module")
def broker():
    with Kafka() as one:
        yield one


class TestKafka(Contract):
    pass


# -- what is special --

def test_a_missing_topic_is_shown_and_waited_for(db, broker):
    create(db, "d", "kafka", broker.options() | {"topic": "made-later"})
    emit(db, "first", "{}", "k")
    emit(db, "second", "{}", "k")
    assert backs_off(db, "d") == 'topic "made-later": Broker: Unknown topic or partition'
    broker.create_topic("made-later")
    await_delivery(db, "d", 2)
    assert [m.headers["ce_eventkey"] for m in broker.messages("made-later")] == ["first", "second"]


def test_a_topic_made_from_the_event(db, broker):
    broker.create_topic("shop.paid")
    create(db, "d", "kafka", broker.options() | {"topic": "shop.{type}"})
    for number, event_type in enumerate(("paid", "größer", "paid", "no / such")):
        emit(db, f"event-{number}", "{}", f"k{number}", event_type)
    await_delivery(db, "d", 2)
    assert db.sql("SELECT event_key, split_part(reason, ':', 1), attempts FROM outbox_dead_letters ORDER BY event_key") == [
        ("event-1", '"shop.größer" is not a name of a topic', 1), ("event-3", '"shop.no / such" is not a name of a topic', 1)]
    ids = {event_id for event_id, in db.sql("SELECT event_id::text FROM outbox_events WHERE event_type = 'paid'")}
    assert {m.headers["event-id"] for m in broker.messages("shop.paid")} == ids


def test_no_text_frames_a_topic(db, broker):
    """None of them is part of a name: nothing gets into the topic that its beginning names."""
    before = len(broker.read())
    create(db, "d", "kafka", broker.options() | {"topic": TOPIC + "{ordering_key}"}, max_attempts=1)
    settled(db, count := emit_evil(db))
    assert status(db, "d")["dead"] == count and len(broker.read()) == before

