"""The kafka sink against a real broker, and against the mock cluster of librdkafka where a broker has to misbehave."""
import concurrent.futures
import contextlib
import json
import os
import random
import re
import socket
import struct
import subprocess
import sys
import threading
import time

import pytest

import preload
from brokers import librdkafka
from brokers.kafka import GUEST, PASSWORD, TOPIC, USER, Kafka, free_ports, read_messages
from brokers.librdkafka import INIT_PRODUCER_ID, PRODUCE, TRANSPORT, MockCluster
from resident import memory
from sink import DELIVERED, FAILED_FINAL, FAILED_RETRY, UNREACHABLE, OpenError, Sink, event, interpreter


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


def murmur2(data):
    """By the text of the Java client's Utils.murmur2."""
    mask, m = 0xffffffff, 0x5bd1e995
    h = (0x9747b28c ^ len(data)) & mask
    for i in range(0, len(data) // 4 * 4, 4):
        k = int.from_bytes(data[i:i + 4], "little") * m & mask
        k = (k ^ k >> 24) * m & mask
        h = h * m & mask ^ k
    rest = data[len(data) // 4 * 4:]
    if rest:
        h = (h ^ int.from_bytes(rest, "little")) * m & mask
    h = (h ^ h >> 13) * m & mask
    return h ^ h >> 15


def test_partitions_are_those_of_java_clients(broker):
    broker.create_topic("by-key", 12)
    keys = ["", "a", "ab", "abc", "abcd", "order-17", "ключ", "x" * 255]
    with open_sink(broker, topic="by-key") as sink:
        assert set(statuses(sink.send(*(event(i, ordering_key=key) for i, key in enumerate(keys))))) == {DELIVERED}
    assert {m.key: m.partition for m in broker.messages("by-key")} == {
        key: (murmur2(key.encode()) & 0x7fffffff) % 12 for key in keys}


@pytest.mark.parametrize("partitioner", ["crc32", "fnv1a"])
def test_other_partitioners_keep_a_key_together(mock, partitioner):
    with open_sink(mock, partitioner=partitioner) as sink:
        assert set(statuses(sink.send(*(event(i, ordering_key=f"k{i % 10}") for i in range(100))))) == {DELIVERED}
    placed = {(m.key, m.partition) for m in read_messages(mock.brokers, TOPIC)}
    assert len(placed) == 10 and len({partition for _, partition in placed}) > 1


@pytest.mark.parametrize("codec", ["none", "gzip", "snappy", "lz4", "zstd"])
def test_compression(broker, topic, codec):
    payload = json.dumps("abc" * 1000)
    with open_sink(broker, topic=topic, compression=codec) as sink:
        assert set(statuses(sink.send(*(event(i, payload=payload) for i in range(50))))) == {DELIVERED}
    assert [m.value for m in broker.messages(topic)] == [payload] * 50
    size = sum(f.stat().st_size for f in (broker.directory / "data" / f"{topic}-0").glob("*.log"))
    assert (size < 100_000) == (codec != "none")


# -- where it goes --

def test_a_topic_made_from_the_event(broker):
    for name in "shop.created", "shop.paid":
        broker.create_topic(name)
    with open_sink(broker, topic="shop.{type}") as sink:
        outcomes = sink.send(event(1, type="created"), event(2, type="paid"), event(3, type="größer"),
                             event(4, type="x" * 250), event(5, type="paid"))
    assert statuses(outcomes) == [DELIVERED, DELIVERED, FAILED_FINAL, FAILED_FINAL, DELIVERED]
    assert outcomes[2].reason.startswith('"shop.größer" is not a name of a topic: 1 to 249 letters')
    assert [m.headers["ce_type"] for m in broker.messages("shop.paid")] == ["paid", "paid"]


def test_what_the_topic_is_made_from_is_missing(mock):
    with open_sink(mock, topic="{header:region}") as sink:
        outcomes = sink.send(event(1), event(2, headers={"Region": "events"}))
    assert statuses(outcomes) == [FAILED_FINAL, DELIVERED] and "region" in outcomes[0].reason


def test_a_missing_topic_is_the_destinations(broker):
    with open_sink(broker, topic="not-there") as sink:
        outcomes = sink.send(*(event(i) for i in range(5)))
        assert set(statuses(outcomes)) == {UNREACHABLE}
        assert outcomes[0].reason == 'topic "not-there": Broker: Unknown topic or partition'
        broker.create_topic("not-there")
        assert set(statuses(sink.send(*(event(i) for i in range(5))))) == {DELIVERED}
    assert len(broker.messages("not-there")) == 5


def test_a_missing_topic_among_others_is_the_events_own(broker, topic):
    with open_sink(broker, topic="{type}") as sink:
        sink.send(event(0, type=topic))
        outcomes = sink.send(event(1, type="nowhere"), event(2, type=topic))
        assert statuses(outcomes) == [FAILED_RETRY, DELIVERED]
        assert outcomes[0].reason == 'topic "nowhere": Broker: Unknown topic or partition'
        assert set(statuses(sink.send(*(event(i, type=f"nowhere-{i}") for i in range(4))))) == {UNREACHABLE}


# -- too large, invalid --

def test_larger_than_the_option_says(mock):
    with open_sink(mock, max_message_bytes=5000) as sink:
        outcomes = sink.send(event(1), event(2, payload=json.dumps("x" * 5000)), event(3))
        assert statuses(outcomes) == [DELIVERED, FAILED_FINAL, DELIVERED]
        assert outcomes[1].reason == "the message is larger than max_message_bytes = 5000"


def test_larger_than_the_topic_takes(broker):
    broker.create_topic("small", 1, max_message_bytes=3000)
    with open_sink(broker, topic="small", linger=50) as sink:
        outcomes = sink.send(*(event(i, payload=json.dumps("x" * (4000 if i == 7 else 10))) for i in range(20)))
        assert statuses(outcomes) == [FAILED_FINAL if i == 7 else DELIVERED for i in range(20)]
        assert outcomes[7].reason == "Broker: Message size too large"
    assert sorted(m.headers["ce_eventkey"] for m in broker.messages("small")) == sorted(
        f"order-{i}" for i in range(20) if i != 7)


def test_an_event_that_is_sent_alone_stays_alone(broker):
    """Or it would answer for what joins it."""
    broker.create_topic("alone", 1, max_message_bytes=3000)
    large = json.dumps("x" * 4000)
    events = [event(1, payload=large), event(2), event(3, payload=large)]
    found, left = {}, list(events)
    deadline = time.monotonic() + 20
    with open_sink(broker, topic="alone", linger=100) as sink:
        while len(found) < len(events):
            assert time.monotonic() < deadline
            while left and (found or len(left) > 1) and sink.submit(left[0]):
                left.pop(0)
            found |= {outcome.tag: outcome.status for outcome in sink.collect()[0]}
    assert found == {1: FAILED_FINAL, 2: DELIVERED, 3: FAILED_FINAL}


def test_small_messages_that_are_too_large_together(broker):
    broker.create_topic("narrow", 1, max_message_bytes=2000)
    with open_sink(broker, topic="narrow", linger=50) as sink:
        assert set(statuses(sink.send(*(event(i, payload=json.dumps("x" * 500)) for i in range(30))))) == {DELIVERED}
    assert len(broker.messages("narrow")) == 30


def test_a_compacted_topic_wants_keys(broker):
    broker.create_topic("compacted", 1, cleanup_policy="compact")
    with open_sink(broker, topic="compacted", linger=50) as sink:
        outcomes = sink.send(*(event(i, ordering_key=None if i == 2 else "k") for i in range(5)))
    assert statuses(outcomes) == [FAILED_FINAL if i == 2 else DELIVERED for i in range(5)]
    assert outcomes[2].reason


# -- who may --

@pytest.mark.parametrize("mechanism", ["plain", "scram-sha-256", "scram-sha-512"])
def test_login(broker, topic, mechanism):
    login = {"brokers": f"127.0.0.1:{broker.login_port}", "user": USER, "sasl_mechanism": mechanism}
    with open_sink(broker, topic=topic, **login, password=PASSWORD) as sink:
        outcome, = sink.send(event(1))
    if mechanism == "plain" or librdkafka.version() >= (2, 6, 1):
        assert outcome.status == DELIVERED
    else:
        assert outcome.status == UNREACHABLE and "cannot log in so to Kafka 4" in outcome.reason
    start = time.monotonic()
    with open_sink(broker, topic=topic, **login, password="hunter2", connect_timeout=30_000) as sink:
        outcome, = sink.send(event(1))
    assert time.monotonic() - start < 10, "there is nothing to wait for"
    assert outcome.status == UNREACHABLE and "uthentication" in outcome.reason and "hunter2" not in outcome.reason


def test_a_user_without_rights(broker, topic):
    with open_sink(broker, topic=topic, brokers=f"127.0.0.1:{broker.login_port}", user=GUEST, password=PASSWORD,
                   sasl_mechanism="plain") as sink:
        outcome, = sink.send(event(1))
    assert outcome.status == UNREACHABLE and "authorization failed" in outcome.reason


def test_tls(broker, topic):
    ca, brokers = broker.directory / "cert.pem", f"localhost:{broker.tls_port}"
    with open_sink(broker, topic=topic, brokers=brokers, tls=True, ca_file=ca) as sink:
        outcomes = sink.send(*(event(i) for i in range(10)))
        assert {(o.status, o.reason) for o in outcomes} == {(DELIVERED, "")}
    with open_sink(broker, topic=topic, brokers=brokers, tls=True, ca_file=ca, cert_file=ca,
                   key_file=broker.directory / "key.pem") as sink:
        assert sink.send(event(1))[0].status == DELIVERED
    for wrong, reason in (({"brokers": brokers}, "not accepted: self-signed certificate"),  # no authority of the system's
                          ({"brokers": f"127.0.0.1:{broker.tls_port}", "ca_file": ca}, "not accepted: IP address mismatch"),
                          # It speaks no TLS, and the library sees first that it hangs up, or that the handshake fails.
                          ({"brokers": broker.brokers, "ca_file": ca}, "SSL handshake failed|Disconnected")):
        with open_sink(broker, topic=topic, tls=True, **wrong) as sink:
            outcome, = sink.send(event(1))
        assert outcome.status == UNREACHABLE and re.search(reason, outcome.reason), (wrong, outcome.reason)


# -- brokers that misbehave --

def test_nobody_listens():
    port, = free_ports(1)
    with Sink("kafka", {"brokers": f"127.0.0.1:{port}", "topic": TOPIC, "connect_timeout": 300}) as sink:
        for _ in range(2):
            start = time.monotonic()
            outcomes = sink.send(event(1), event(2))
            assert set(statuses(outcomes)) == {UNREACHABLE} and "Connection refused" in outcomes[0].reason
            assert " (after" not in outcomes[0].reason
            assert 0.29 <= time.monotonic() - start < 5


def test_a_cluster_that_comes_back(mock):
    with open_sink(mock, connect_timeout=300) as sink:
        assert sink.send(event(1))[0].status == DELIVERED
        mock.down()
        assert sink.send(event(2))[0].status == UNREACHABLE
        mock.up()
        assert sink.send(event(2), event(3))[0].status == DELIVERED


def test_a_short_absence_is_not_noticed(mock):
    with open_sink(mock, connect_timeout=20_000) as sink:
        assert sink.send(event(1))[0].status == DELIVERED
        mock.down()
        events = [event(i) for i in range(2, 10)]
        assert all(sink.submit(e) for e in events)
        assert sink.collect()[0] == []
        mock.up()
        collected = []
        deadline = time.monotonic() + 20
        while len(collected) < len(events):
            assert time.monotonic() < deadline
            collected += sink.collect()[0]
            time.sleep(0.01)
        assert set(statuses(collected)) == {DELIVERED}


def test_an_absence_that_is_over_is_over(mock):
    """Events keep coming, so there is never a moment without one under way."""
    mock.delay(100)
    with open_sink(mock, connect_timeout=3000) as sink:
        assert sink.send(event(0))[0].status == DELIVERED
        start, number, sent, outcomes = time.monotonic(), 1, [], []
        mock.down()
        is_up = False
        while len(outcomes) < len(sent) or number == 1 or time.monotonic() - start < 5:
            now = time.monotonic() - start
            assert now < 20
            if now > 0.3 and not is_up:
                mock.up()
                is_up = True
            if now < 5 and len(sent) - len(outcomes) < 5:
                sent.append(event(number))
                assert sink.submit(sent[-1])
                number += 1
            outcomes += sink.collect()[0]
            time.sleep(0.005)
    assert set(statuses(outcomes)) == {DELIVERED}


@pytest.mark.parametrize("error", [
    "NOT_ENOUGH_REPLICAS", "NOT_ENOUGH_REPLICAS_AFTER_APPEND", "NOT_LEADER_FOR_PARTITION", "LEADER_NOT_AVAILABLE",
    "REQUEST_TIMED_OUT", "KAFKA_STORAGE_ERROR", "TRANSPORT"])
def test_what_the_library_tries_again_by_itself(mock, error):
    with open_sink(mock) as sink:
        mock.answer(PRODUCE, *[ERRORS[error]] * 3)
        assert set(statuses(sink.send(*(event(i, ordering_key=f"k{i}") for i in range(40))))) == {DELIVERED}
    received = [m.headers["event-id"] for m in read_messages(mock.brokers, TOPIC)]
    assert len(set(received)) == 40


ERRORS = {"NOT_ENOUGH_REPLICAS": 19, "NOT_ENOUGH_REPLICAS_AFTER_APPEND": 20, "NOT_LEADER_FOR_PARTITION": 6,
          "LEADER_NOT_AVAILABLE": 5, "REQUEST_TIMED_OUT": 7, "KAFKA_STORAGE_ERROR": 56, "NETWORK_EXCEPTION": 13,
          "TRANSPORT": TRANSPORT, "MSG_SIZE_TOO_LARGE": 10, "INVALID_RECORD": 87, "TOPIC_AUTHORIZATION_FAILED": 29,
          "CLUSTER_AUTHORIZATION_FAILED": 31, "UNKNOWN_SERVER_ERROR": -1, "POLICY_VIOLATION": 44,
          "OUT_OF_ORDER_SEQUENCE_NUMBER": 45}


def test_a_change_of_leader(mock):
    with open_sink(mock) as sink:
        for number in range(6):
            mock.leader(TOPIC, 0, 1 + number % 3)
            events = [event(10 * number + i, ordering_key="k") for i in range(3)]
            for one in events:
                assert sink.send(one)[0].status == DELIVERED
    received = [m.headers["event-id"] for m in read_messages(mock.brokers, TOPIC)]
    assert received == sorted(received) and len(received) == 18


def publish(sink, keys, go_on, within):
    """As a publisher does it: of each key one event at a time, the same again after a failure of the destination.

    go_on(delivered, unreachable) tells whether another event is to come. Returns the events delivered of each key."""
    at, under_way, unreachable, outcome = [0] * keys, {}, 0, None
    deadline = time.monotonic() + within
    while True:
        assert time.monotonic() < deadline, (at, len(under_way), unreachable, outcome and outcome.reason)
        more = go_on(sum(at), unreachable)
        if not more and not under_way:
            return at
        for key in range(keys):
            if key in under_way or not more:
                continue
            under_way[key] = event(10**6 * key + at[key], ordering_key=f"k{key}")
            if not sink.submit(under_way[key]):
                del under_way[key]
                break
        for outcome in sink.collect()[0]:
            key = outcome.tag // 10**6
            del under_way[key]
            assert outcome.status in (DELIVERED, UNREACHABLE), outcome.reason
            at[key] += outcome.status == DELIVERED
            unreachable += outcome.status == UNREACHABLE
        time.sleep(0.001)


def assert_complete_and_in_key_order(messages, counts):
    """What was reported as delivered is there, and first copies are in order. Others may be there as well: the report of
    an event that arrived can be that the destination was unreachable."""
    first = {}
    for message in messages:
        first.setdefault(message.key, {})[int(message.headers["event-id"][-12:]) % 10**6] = None
    for key, count in enumerate(counts):
        arrived = list(first.get(f"k{key}", ()))
        assert not set(range(count)) - set(arrived), f"of key {key}"
        assert arrived == sorted(arrived), f"the order of key {key}"


def test_key_order_over_failures(mock):
    dice, next_failure, failures = random.Random(7), 20, 0
    errors = [ERRORS[name] for name in ("NOT_ENOUGH_REPLICAS", "NOT_LEADER_FOR_PARTITION", "REQUEST_TIMED_OUT",
                                        "NETWORK_EXCEPTION", "OUT_OF_ORDER_SEQUENCE_NUMBER", "TRANSPORT",
                                        "NOT_ENOUGH_REPLICAS_AFTER_APPEND", "CLUSTER_AUTHORIZATION_FAILED")]

    def fail(delivered, unreachable):
        nonlocal next_failure, failures
        if delivered >= next_failure:
            mock.answer(PRODUCE, *dice.choices(errors, k=2))
            next_failure += 25
        failures = unreachable
        return delivered < 500

    with open_sink(mock, timeout=3000, connect_timeout=200) as sink:
        counts = publish(sink, 20, fail, within=60)
    assert failures > 0, "they were none"
    assert_complete_and_in_key_order(read_messages(mock.brokers, TOPIC), counts)


@pytest.mark.parametrize("error", ["NOT_ENOUGH_REPLICAS", "NOT_LEADER_FOR_PARTITION", "REQUEST_TIMED_OUT"])
def test_what_the_library_only_concludes_is_sent_again(mock, error):
    """Of a refused request the library believes that it arrived when the one behind it did: the mock takes any
    sequence number, and a real broker does while it has none of the producer's."""
    with open_sink(mock, batch_bytes=1) as sink:
        mock.answer(PRODUCE, ERRORS[error])
        assert set(statuses(sink.send(*(event(i, ordering_key="k") for i in range(10))))) == {DELIVERED}
    assert len({m.headers["event-id"] for m in read_messages(mock.brokers, TOPIC)}) == 10


# -- a real broker that refuses --

class Listener:
    """Serves, in a thread, until it is left."""

    def __init__(self, port=0, host="127.0.0.1"):
        self._server = socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
        self.port = self._server.getsockname()[1]
        threading.Thread(target=self._serve, daemon=True).start()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self._server.shutdown(socket.SHUT_RDWR)
        self._server.close()


class Gate(Listener):
    """Passes on what goes between clients and a broker. before_produce(number) is called before each produce request,
    answered() tells how many of them have an answer."""

    def __init__(self, port, target, before_produce, host="127.0.0.1"):
        self._target, self._before_produce = target, before_produce
        self._requests, self._answers = [], set()
        super().__init__(port, host)

    def answered(self):
        return sum(number in self._answers for number in self._requests)

    def _serve(self):
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._server.accept()
                broker = socket.create_connection(("127.0.0.1", self._target))
                for source, sink, watch in (client, broker, self._request), (broker, client, self._answer):
                    threading.Thread(target=self._pass_on, args=(source, sink, watch), daemon=True).start()

    @staticmethod
    def _pass_on(source, sink, watch):
        with contextlib.suppress(OSError, struct.error), source.makefile("rb") as stream:
            while True:
                head = stream.read(4)
                body = stream.read(*struct.unpack(">i", head))
                watch(body)
                sink.sendall(head + body)
        sink.close()

    def _request(self, body):
        kind, _, number = struct.unpack(">hhi", body[:8])
        if kind == PRODUCE:
            self._requests.append(number)
            self._before_produce(len(self._requests))

    def _answer(self, body):
        self._answers.add(*struct.unpack(">i", body[:4]))


@pytest.mark.skipif(not os.path.exists("/proc/net/if_inet6"), reason="there is no IPv6 here")
def test_an_address_of_ipv6(mock):
    target = int(mock.brokers.split(",")[0].rsplit(":", 1)[1])
    with Gate(0, target, lambda number: None, "::1") as gate, open_sink(mock, brokers=f"[::1]:{gate.port}") as sink:
        assert sink.send(event(1))[0].status == DELIVERED


@pytest.fixture(scope="module")
def lone_broker():
    """A broker whose partitions should have copies on another, which is gone for good."""
    with Kafka(replica=True) as one:
        one.create_topic("copied", 1, replicas=2)
        one.kill_replica("copied")
        yield one


@pytest.mark.slow
def test_a_broker_that_refuses_a_request_and_takes_the_next(lone_broker):
    """Which a broker does that knows nothing of the producer yet."""
    def let_the_next_pass(number):
        if number != 2:
            return
        while gate.answered() == 0:
            time.sleep(0.001)
        lone_broker.configure_topic("copied", min_insync_replicas=1)

    for first in range(0, 30, 10):
        lone_broker.configure_topic("copied", min_insync_replicas=2)
        with Gate(lone_broker.gate_port, lone_broker.behind_gate_port, let_the_next_pass) as gate, \
                open_sink(lone_broker, brokers=f"127.0.0.1:{lone_broker.gate_port}", topic="copied",
                          batch_bytes=1) as sink:
            assert set(statuses(sink.send(*(event(first + i) for i in range(10))))) == {DELIVERED}
    assert {m.headers["event-id"][-12:] for m in lone_broker.messages("copied")} == {f"{i:012}" for i in range(30)}


@pytest.mark.slow
def test_nothing_is_lost_and_key_order_kept_by_a_broker_that_refuses_dies_and_stands_still(lone_broker):
    lone_broker.configure_topic("copied", min_insync_replicas=1)
    dice = random.Random(11)

    def refuse():
        lone_broker.configure_topic("copied", min_insync_replicas=2)
        time.sleep(dice.uniform(0, 2))  # around the timeout: some events are given up, some pass after all
        lone_broker.configure_topic("copied", min_insync_replicas=1)

    def stand_still():
        lone_broker.pause()
        time.sleep(dice.uniform(0.5, 3))
        lone_broker.go_on()

    def die():
        lone_broker.kill()
        lone_broker.start()

    failures, disturbed = 0, False

    def go_on(delivered, unreachable):
        nonlocal failures
        failures = unreachable
        return not disturbed or delivered < 2000

    def publish_all():
        with open_sink(lone_broker, topic="copied", timeout=1000, connect_timeout=500, batch_bytes=1) as sink:
            return publish(sink, 12, go_on, within=100)

    with concurrent.futures.ThreadPoolExecutor() as publisher:
        published = publisher.submit(publish_all)
        try:
            for disturbance in [*[refuse] * 4, die, *[stand_still] * 3, *[refuse] * 4, die, stand_still, refuse]:
                disturbance()
        finally:
            disturbed = True
        counts = published.result()
    assert failures > 0, "they were none"
    assert_complete_and_in_key_order([m for m in lone_broker.messages("copied") if m.key], counts)


def test_too_few_replicas_for_too_long(mock):
    with open_sink(mock, timeout=2000) as sink:
        mock.answer(PRODUCE, TRANSPORT)
        assert sink.send(event(0))[0].status == DELIVERED, "what was before is forgotten"
        mock.answer(PRODUCE, *[ERRORS["NOT_ENOUGH_REPLICAS"]] * 400)
        start = time.monotonic()
        outcomes = sink.send(*(event(i) for i in range(1, 5)))
        assert set(statuses(outcomes)) == {UNREACHABLE} and 1.9 < time.monotonic() - start < 20
        assert outcomes[0].reason == "no acknowledgement within the timeout"
        mock.answer_as_usual(PRODUCE)
        # The library begins anew after events whose end it does not know; on a busy machine that takes as long as the timeout.
        assert DELIVERED in (sink.send(event(1))[0].status for _ in range(10))


@pytest.mark.parametrize("error, status", [
    ("TOPIC_AUTHORIZATION_FAILED", UNREACHABLE), ("CLUSTER_AUTHORIZATION_FAILED", UNREACHABLE),
    ("NETWORK_EXCEPTION", UNREACHABLE), ("POLICY_VIOLATION", FAILED_RETRY), ("OUT_OF_ORDER_SEQUENCE_NUMBER", UNREACHABLE)])
def test_a_refusal(mock, error, status):
    with open_sink(mock) as sink:
        sink.send(event(0))
        mock.answer(PRODUCE, ERRORS[error])
        outcome, = sink.send(event(1))
        assert outcome.status == status and outcome.reason
        assert sink.send(event(1))[0].status == DELIVERED, "it goes on"


@pytest.mark.parametrize("error", ["MSG_SIZE_TOO_LARGE", "INVALID_RECORD"])
def test_an_event_answers_for_itself_only(mock, error):
    with open_sink(mock) as sink:
        sink.send(event(0))
        mock.answer(PRODUCE, ERRORS[error])
        assert set(statuses(sink.send(*(event(i) for i in range(1, 20))))) == {DELIVERED}, "each passed when it was alone"
        mock.answer(PRODUCE, ERRORS[error], ERRORS[error])
        assert statuses(sink.send(event(1))) == [FAILED_FINAL]


def test_the_same_failure_of_everything_is_the_destinations(mock):
    with open_sink(mock) as sink:
        mock.answer(PRODUCE, *[ERRORS["POLICY_VIOLATION"]] * 100)
        assert set(statuses(sink.send(*(event(i, ordering_key=f"k{i}") for i in range(20))))) == {UNREACHABLE}


def test_a_fatal_error_makes_a_new_producer(mock):
    mock.answer(INIT_PRODUCER_ID, ERRORS["CLUSTER_AUTHORIZATION_FAILED"])
    with open_sink(mock) as sink:
        outcomes = sink.send(event(1), event(2))
        assert set(statuses(outcomes)) == {UNREACHABLE} and "authorization" in outcomes[0].reason
        assert set(statuses(sink.send(event(1), event(2)))) == {DELIVERED}


def test_a_slow_broker(mock):
    mock.delay(300)
    with open_sink(mock) as sink:
        assert set(statuses(sink.send(*(event(i) for i in range(50))))) == {DELIVERED}


def test_a_broker_that_stands_still(broker, topic):
    with open_sink(broker, topic=topic, timeout=1500) as sink:
        assert sink.send(event(1))[0].status == DELIVERED
        broker.pause()
        try:
            start = time.monotonic()
            outcomes = sink.send(event(2), event(3))
            assert set(statuses(outcomes)) == {UNREACHABLE}
            assert 1 < time.monotonic() - start < 10
        finally:
            broker.go_on()
        assert sink.send(event(2))[0].status == DELIVERED


# -- closing --

def closes_at_once(sink):
    start = time.monotonic()
    sink.close()
    return time.monotonic() - start < 0.5


def test_closing_with_events_under_way(mock):
    mock.delay(5000)
    sink = open_sink(mock)
    kept = [event(i) for i in range(100)]
    assert all(sink.submit(e) for e in kept)
    sink.collect()
    assert closes_at_once(sink)


@pytest.mark.parametrize("tls", [False, True])
def test_closing_while_a_broker_does_not_answer(tls):
    with socket.create_server(("127.0.0.1", 0)) as silent:
        sink = Sink("kafka", {"brokers": f"127.0.0.1:{silent.getsockname()[1]}", "topic": TOPIC, "tls": tls})
        kept = event(1)
        assert sink.submit(kept)
        silent.accept()
        assert closes_at_once(sink)


def test_a_broker_that_never_answers_is_unreachable():
    with socket.create_server(("127.0.0.1", 0)) as silent:
        with Sink("kafka", {"brokers": f"127.0.0.1:{silent.getsockname()[1]}", "topic": TOPIC, "timeout": 1000}) as sink:
            assert sink.send(event(1))[0].status == UNREACHABLE


class Hashing(Listener):
    """A broker that wants a password to be hashed as often as the library lets it: a million times, which takes seconds."""

    APIS = [(18, 0, 0), (17, 0, 1), (36, 0, 0), (3, 0, 4), (0, 0, 7), (22, 0, 1)]

    def __init__(self):
        self.asked = threading.Event()
        super().__init__()

    def _serve(self):
        with contextlib.suppress(OSError):
            while True:
                threading.Thread(target=self._talk, args=self._server.accept()[:1], daemon=True).start()

    def _talk(self, connection):
        with contextlib.suppress(OSError, struct.error), connection, connection.makefile("rb") as stream:
            while True:
                request = stream.read(struct.unpack("!I", stream.read(4))[0])
                kind, version, number = struct.unpack("!hhi", request[:8])
                if kind == 18:  # versions; above those that are known here it begins anew
                    apis = b"".join(struct.pack("!hhh", *api) for api in self.APIS)
                    answer = struct.pack("!hi", 35 if version else 0, len(self.APIS)) + apis
                elif kind == 17:
                    answer = struct.pack("!hih", 0, 1, 13) + b"SCRAM-SHA-512"
                else:
                    nonce = re.search(b"r=([^,]+)", request)[1]
                    challenge = b"r=%bx,s=c2FsdA==,i=1000000" % nonce
                    answer = struct.pack("!hhi", 0, -1, len(challenge)) + challenge
                    self.asked.set()
                connection.sendall(struct.pack("!Ii", len(answer) + 4, number) + answer)


def test_a_password_that_takes_long_to_hash():
    """Nobody waits for it: not who gives the broker up, not who closes, and not the end of the process."""
    with Hashing() as broker:
        options = {"brokers": f"127.0.0.1:{broker.port}", "topic": TOPIC, "timeout": 1000, "user": "u", "password": "p",
                   "sasl_mechanism": "scram-sha-512"}
        with Sink("kafka", options) as sink:
            outcome, = sink.send(event(1))
            assert broker.asked.is_set() and outcome.status == UNREACHABLE
            assert sink.slowest < 0.5
        broker.asked.clear()
        sink = Sink("kafka", options)
        kept = event(2)
        assert sink.submit(kept) and broker.asked.wait(10)
        assert closes_at_once(sink)
        program = f"""
import ctypes, sys
sys.path[:0] = {sys.path!r}
from sink import Sink, event
sink = Sink("kafka", {options!r})
sink.send(event(0))
ctypes.CDLL(None).exit(0)
"""
        subprocess.run([sys.executable, "-c", program], env=interpreter(), check=True, timeout=30)


EXITS = """
import ctypes, sys
sys.path[:0] = {path!r}
from sink import Sink, event
sink = Sink("kafka", {options!r})
sink.send(event(0))
kept = [event(i, payload='"' + "x" * 10000 + '"') for i in range(1, 200)]
assert all(sink.submit(e) for e in kept)
ctypes.CDLL(None).exit(0)
"""


def test_a_process_that_ends_without_closing(broker, topic):
    """As after a FATAL error of the server: handlers that run at exit meet the threads of the library."""
    options = {"brokers": f"localhost:{broker.tls_port}", "topic": topic, "tls": True,
               "ca_file": str(broker.directory / "cert.pem")}
    script = EXITS.format(path=[p for p in sys.path if p.endswith(("/sinks", "/system"))], options=options)
    for _ in range(5):
        assert subprocess.run([sys.executable, "-c", script], env=interpreter(), timeout=30).returncode == 0


@pytest.mark.parametrize("tls", [[False], [True], [False, True]], ids=["plain", "TLS", "plain, then TLS"])
def test_threads_end_before_anything_is_taken_down(tmp_path, tls):
    """Whenever it is that OpenSSL is set up, whose handler for the end of the process is the most dangerous one."""
    library = preload.build("alone_at_its_end", tmp_path)
    program = f"""
import ctypes, os, sys
sys.path[:0] = {sys.path!r}
from sink import Sink, event
kept = event(1)
usual = ctypes.c_int.in_dll(ctypes.CDLL({str(library)!r}), "usual_threads")
usual.value = len(os.listdir("/proc/self/task"))
for tls in {tls!r}:
    sink = Sink("kafka", {{"brokers": "127.0.0.1:1", "topic": "t", "tls": tls}})
    assert sink.submit(kept)
    sink.module.flush(sink.handle)
    assert len(os.listdir("/proc/self/task")) > usual.value
ctypes.CDLL(None).exit(0)
"""
    subprocess.run([sys.executable, "-c", program], env=interpreter(library), check=True, timeout=30)


def test_a_broker_that_keeps_the_library_busy(mock, tmp_path):
    """Whose threads tell of nothing then."""
    library = preload.build("busy_brokers", tmp_path)
    program = f"""
import ctypes, sys
sys.path[:0] = {sys.path!r}
from sink import DELIVERED, UNREACHABLE, Sink, event
sink = Sink("kafka", {{"brokers": {mock.brokers!r}, "topic": {TOPIC!r}, "timeout": 4000}})
assert sink.send(event(0))[0].status == DELIVERED
ctypes.c_int.in_dll(ctypes.CDLL({str(library)!r}), "busy").value = 1
outcome, = sink.send(event(1), within=30)
assert (outcome.status, outcome.reason) == (UNREACHABLE, "nothing is heard of what was sent"), (outcome.status, outcome.reason)
ctypes.CDLL(None).exit(0)
"""
    subprocess.run([sys.executable, "-c", program], env=interpreter(library), check=True, timeout=60)


def test_an_idle_sink_leaves_an_absent_cluster_alone(mock):
    """Nothing waits for it, so nothing tries to reach it."""
    before = threads()
    with open_sink(mock) as sink:
        assert sink.send(event(1))[0].status == DELIVERED
        assert threads() - before
        mock.down()
        deadline = time.monotonic() + 10
        while threads() - before:
            assert time.monotonic() < deadline
            assert sink.collect()[0] == []
            time.sleep(0.01)
        mock.up()
        assert sink.send(event(2))[0].status == DELIVERED


# -- where connections may go --

def test_loopback_is_refused_unless_listed(mock):
    with Sink("kafka", {"brokers": mock.brokers, "topic": TOPIC}, "") as sink:
        outcome, = sink.send(event(1), within=5)
    assert outcome.status == UNREACHABLE
    assert outcome.reason == "address 127.0.0.1 is not allowed; see allowed_addresses, of the server or of the relay"


def test_the_brokers_that_the_cluster_names_are_checked_too(mock):
    """The first broker is reached by a name that is listed; the cluster then names addresses."""
    first = mock.brokers.split(",")[0].rsplit(":", 1)[1]
    with Sink("kafka", {"brokers": f"localhost:{first}", "topic": TOPIC}, "localhost") as sink:
        outcome, = sink.send(event(1), within=10)  # and not after the timeout
    assert outcome.status == UNREACHABLE and "address 127.0.0.1 is not allowed" in outcome.reason
    assert read_messages(mock.brokers, TOPIC) == []


def test_a_name_that_does_not_resolve():
    with Sink("kafka", {"brokers": "no-such-host.invalid:9092", "topic": TOPIC}) as sink:
        outcome, = sink.send(event(1))
    assert outcome.status == UNREACHABLE and "no-such-host.invalid" in outcome.reason


# -- opening --

@pytest.mark.parametrize("options, message", [
    ({"topic": "t"}, 'option "brokers" is missing'),
    ({"brokers": "a:9092"}, 'option "topic" is missing'),
    ({"brokers": "a:9092,,b", "topic": "t"}, 'option "brokers" must be a list of HOST:PORT'),
    ({"brokers": "plaintext://a:9092", "topic": "t"}, 'option "brokers" must be'),
    ({"brokers": "a:port", "topic": "t"}, 'option "brokers" must be'),
    ({"brokers": "a:70000", "topic": "t"}, 'option "brokers" must be'),
    ({"brokers": "::1", "topic": "t"}, 'option "brokers" must be'),
    ({"brokers": "a:9092", "topic": "t", "ca_file": "/etc/ssl/x"}, 'certificates need option "tls"'),
    ({"brokers": "a:9092", "topic": "t", "tls": True, "ca_file": "/no/such/file"}, "ssl.ca.location"),
    ({"brokers": "a:9092", "topic": "t", "tls": True, "key_file": "/x"}, "go together"),
    ({"brokers": "a:9092", "topic": "t", "user": "u"}, 'option "sasl_mechanism" is missing'),
    ({"brokers": "a:9092", "topic": "t", "user": "u", "sasl_mechanism": "plain"}, 'option "password" is missing'),
    ({"brokers": "a:9092", "topic": "t", "password": "hunter2", "sasl_mechanism": "plain"}, 'option "user" is missing'),
])
def test_what_cannot_work_is_an_error_of_open(options, message):
    with pytest.raises(OpenError, match=message):
        Sink("kafka", options)


# -- nothing is left behind --

def threads():
    return set(os.listdir("/proc/self/task"))


def test_threads_of_the_library_take_no_signals(mock):
    before = threads()
    with open_sink(mock) as sink:
        assert sink.send(event(1))[0].status == DELIVERED
        ours = threads() - before
        assert len(ours) >= 3
        for thread in ours:
            with open(f"/proc/self/task/{thread}/status") as status:
                blocked = int(next(line.split()[1] for line in status if line.startswith("SigBlk")), 16)
            for number in (1, 2, 3, 10, 12, 14, 15, 17, 23):  # HUP INT QUIT USR1 USR2 ALRM TERM CHLD URG
                assert blocked >> (number - 1) & 1, f"signal {number}"
    deadline = time.monotonic() + 10
    while not threads() <= before:
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_descriptors_threads_and_memory_stay(mock):
    def round_of(first):
        mock.down()
        assert set(statuses(sink.send(*(event(i) for i in range(first, first + 50))))) == {UNREACHABLE}
        mock.up()
        assert set(statuses(sink.send(*(event(i) for i in range(first, first + 300))))) == {DELIVERED}

    with open_sink(mock, connect_timeout=50) as sink:
        for i in range(3):
            round_of(1000 * i)
        descriptors, running, before = len(os.listdir("/proc/self/fd")), len(threads()), memory()
        for i in range(3, 7):
            round_of(1000 * i)
        assert len(os.listdir("/proc/self/fd")) <= descriptors + 4
        assert len(threads()) <= running + 1
        assert memory() - before < 24 * 1024 * 1024  # the mock cluster keeps the messages
