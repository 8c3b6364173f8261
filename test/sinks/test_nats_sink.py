"""The nats sink against real servers, and against some that misbehave."""
import pytest

from brokers.nats import Client, Nats, Server, as_event, free_port, jetstream, stored
from sink import DELIVERED, FAILED_FINAL, FAILED_RETRY, UNREACHABLE, OpenError, Sink, event


@pytest.fixture(scope="module")
def broker():
    with Nats() as one:
        yield one


def open_sink(broker, **options):
    return Sink("nats", broker.options() | options)


def test_an_event_arrives(broker):
    with open_sink(broker) as sink:
        outcome, = sink.send(event(1, ordering_key="k", type="a"))
    assert (outcome.status, outcome.reason) == (DELIVERED, "")
