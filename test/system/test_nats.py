"""Destinations of kind nats: a real server with JetStream, read back over its text protocol."""
import pytest

from brokers.contract import (Contract, assert_complete_and_in_order, await_delivery, backs_off, create, emit, emit_many, messages,
                              status)
from brokers.nats import Nats
from conftest import eventually, run

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def broker():
    with Nats() as one:
        yield one


class TestNats(Contract):
    pass


def test_a_missing_stream_is_shown_and_nothing_dies(db, broker):
    create(db, "d", "nats", broker.options() | {"subject": "late.{type}"}, max_attempts=1)
    for n in range(3):
        emit(db, f"event-{n}")
    assert backs_off(db, "d") == 'no stream takes subject "late.order.paid", or JetStream is not enabled'
    with broker.client() as client:
        client.api("STREAM.CREATE.late", name="late", subjects=["late.>"])
    await_delivery(db, "d", 3)
    assert status(db, "d")["dead"] == 0


def test_an_illegal_subject_is_a_dead_letter_at_once(db, broker):
    create(db, "d", "nats", broker.options())
    emit(db, "bad", event_type="order paid", ordering_key="k")
    emit(db, "good", ordering_key="other")
    await_delivery(db, "d", 1)
    eventually(lambda: status(db, "d")["dead"] == 1)
    assert db.sql("SELECT event_key, reason, attempts FROM outbox_dead_letters") == [
        ("bad", '"events.order paid" has a blank or a control character', 1)]


def test_events_that_no_stream_takes_do_not_stop_the_others(db, broker):
    create(db, "d", "nats", broker.options() | {"subject": "{type}"}, max_attempts=2)
    for n in range(5):
        emit(db, f"stray-{n}", event_type="stray.event", ordering_key=f"stray-{n}")
        for i in range(20):
            emit(db, f"good-{n}-{i}", event_type="events.good", ordering_key=f"key-{i}")
    eventually(lambda: status(db, "d")["delivered"] == 100)
    assert len(messages(db, broker)) == 100


def test_an_event_that_no_stream_takes_at_the_end_of_what_was_read(db, broker):
    """It alone is left of what was to be seen when the worker looked, so no other event goes out beside it."""
    create(db, "d", "nats", broker.options() | {"subject": "{type}"})
    with db.connect(autocommit=False) as connection:
        for key, event_type in (("good-1", "events.good"), ("stray", "stray.event")):
            run(connection, "SELECT outbox_emit(NULL, %s, %s, '{}')", key, event_type)
    eventually(lambda: status(db, "d")["delivered"] == 1 and status(db, "d")["failures"] > 0)
    emit(db, "good-2", event_type="events.good")
    eventually(lambda: status(db, "d")["delivered"] == 2)


def test_workers_that_are_terminated_while_they_publish(db, broker):
    """Their connections have threads: none of them may crash, which would end all sessions of the server."""
    create(db, "d", "nats", broker.options())
    for n in range(6):
        emit_many(db, 500 * n, 500)
        eventually(lambda: status(db, "d")["delivered"] > 500 * n)
        db.sql("SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE backend_type = 'retrysafe worker'")
    await_delivery(db, "d", 3000)
    assert_complete_and_in_order(db, messages(db, broker))
