"""The kafka sink against a real broker, and against the mock cluster of librdkafka where a broker has to misbehave."""
import json
import os
import socket
import subprocess
import time

import pytest

from brokers import librdkafka
from brokers.kafka import GUEST, PASSWORD, TOPIC, USER, Kafka, free_ports, read_messages
from brokers.librdkafka import INIT_PRODUCER_ID, METADATA, PRODUCE, TRANSPORT, MockCluster
from sink import DELIVERED, FAILED_FINAL, FAILED_RETRY, UNREACHABLE, OpenError, Sink, event


@pytest.fixture(scope="module")
def broker():
    with Kafka(tls=True) as one:
        yield one


@pytest.fixture
def mock():
    with MockCluster(3) as one:
        one.topic("events", 4)
        yield one


def open_sink(cluster, **options):
    return Sink("kafka", {"brokers": cluster.brokers, "topic": TOPIC, "connect_timeout": 1000} | options)


def statuses(outcomes):
    return [o.status for o in outcomes]


_topics = iter(range(10**6))


@pytest.fixture
def topic(broker):
    """A topic of its own, with one partition."""
    name = f"topic-{next(_topics)}"
    broker.create_topic(name)
    return name


# -- what goes out --

def test_binary_mode(broker, topic):
    with open_sink(broker, topic=topic) as sink:
        outcome, = sink.send(event(7, ordering_key="order 7", scope="eu", event_key='é"%\r\nX-Evil: 1',
                                   headers={"traceparent": "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01",
                                            "X-Tenant": "ä b", "empty": ""}))
    assert (outcome.status, outcome.reason) == (DELIVERED, "")
    message, = broker.messages(topic)
    assert (message.key, message.value) == ("order 7", '{"number": 7}')
    assert message.headers == {
        "event-id": "00000000-0000-8000-8000-000000000007", "content-type": "application/json",
        "ce_specversion": "1.0", "ce_id": "00000000-0000-8000-8000-000000000007", "ce_source": "retrysafe/shop/",
        "ce_type": "order.created", "ce_time": "2026-01-02T03:04:05.678901Z", "ce_partitionkey": "order 7",
        "ce_eventkey": 'é"%\r\nX-Evil: 1', "ce_scope": "eu", "ce_xtenant": "ä b", "ce_empty": "",
        "ce_traceparent": "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01",
        "traceparent": "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"}


def test_structured_mode(broker, topic):
    with open_sink(broker, topic=topic, mode="structured", source="urn:shop") as sink:
        assert sink.send(event(7, payload='{"a": [1.50, "\\u0001€😀"]}', ordering_key="k"))[0].status == DELIVERED
    message, = broker.messages(topic)
    assert message.key == "k"
    assert message.headers == {"event-id": "00000000-0000-8000-8000-000000000007",
                               "content-type": "application/cloudevents+json; charset=UTF-8"}
    assert json.loads(message.value) == {
        "specversion": "1.0", "id": "00000000-0000-8000-8000-000000000007", "source": "urn:shop",
        "type": "order.created", "time": "2026-01-02T03:04:05.678901Z", "partitionkey": "k", "eventkey": "order-7",
        "datacontenttype": "application/json", "data": {"a": [1.5, "\u0001€😀"]}}


def test_without_key_and_without_value(broker, topic):
    with open_sink(broker, topic=topic) as sink:
        assert sink.send(event(1, payload=None), event(2, payload="null", ordering_key=""))[0].status == DELIVERED
    without, with_null = sorted(broker.messages(topic), key=lambda m: m.headers["ce_id"])
    assert (without.key, without.value) == (None, None) and "content-type" not in without.headers
    assert (with_null.key, with_null.value) == ("", "null")


