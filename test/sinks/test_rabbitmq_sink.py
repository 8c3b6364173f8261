"""The rabbitmq sink against a real broker, and against far sides that are none."""
import concurrent.futures
import contextlib
import json
import os
import re
import select
import socket
import ssl
import struct
import subprocess
import sys
import threading
import time

import pytest
from pika import spec

from brokers.rabbitmq import EXCHANGE, MAX_MESSAGE_BYTES, QUEUE, RabbitMQ
from scripted_amqp import ScriptedBroker
from sink import DELIVERED, FAILED_FINAL, FAILED_RETRY, UNREACHABLE, OpenError, Sink, event, interpreter


@pytest.fixture(scope="module")
def broker():
    with RabbitMQ() as one:
        yield one


@pytest.fixture(autouse=True)
def empty_queue(broker):
    broker.drain()


def open_sink(broker, allowed_addresses="127.0.0.1, ::1", **options):
    return Sink("rabbitmq", broker.options() | options, allowed_addresses)


def ids(found):
    return [properties.message_id for _, properties, _ in found]


def id_of(number):
    return f"00000000-0000-8000-8000-{number:012}"


# -- what goes out --

def test_binary_mode(broker):
    with open_sink(broker) as sink:
        outcome, = sink.send(event(7, ordering_key="order 7", scope="eu", type="größe.geändert",
                                   headers={"traceparent": "00-4bf9-00f0-01", "X-Tenant": "ä b"}))
    assert (outcome.status, outcome.reason) == (DELIVERED, "")
    (method, properties, body), = broker.drain()
    assert body == b'{"number": 7}'
    assert (method.exchange, method.routing_key) == (EXCHANGE, "größe.geändert")
    assert (properties.message_id, properties.delivery_mode) == (id_of(7), 2)
    assert (properties.content_type, properties.type, properties.app_id) == ("application/json", "größe.geändert", "retrysafe")
    assert properties.headers == {
        "cloudEvents:specversion": "1.0", "cloudEvents:id": id_of(7), "cloudEvents:source": "retrysafe/shop/",
        "cloudEvents:type": "größe.geändert", "cloudEvents:time": "2026-01-02T03:04:05.678901Z",
        "cloudEvents:partitionkey": "order 7", "cloudEvents:eventkey": "order-7", "cloudEvents:scope": "eu",
        "cloudEvents:xtenant": "ä b", "cloudEvents:traceparent": "00-4bf9-00f0-01", "traceparent": "00-4bf9-00f0-01"}


def test_many(broker):
    with open_sink(broker) as sink:
        started = time.monotonic()
        assert {o.status for o in sink.send(*(event(i) for i in range(3000)))} == {DELIVERED}
        print(3000 / (time.monotonic() - started), "events/s")
    assert ids(broker.drain()) == [id_of(i) for i in range(3000)]


def test_structured_mode(broker):
    with open_sink(broker, mode="structured", source="urn:shop") as sink:
        assert sink.send(event(7, payload='{"a": 1.50}', ordering_key="k", headers={"traceparent": "00-1"}))[0].status == DELIVERED
    (_, properties, body), = broker.drain()
    assert (properties.content_type, properties.headers) == ("application/cloudevents+json; charset=utf-8", {"traceparent": "00-1"})
    assert json.loads(body) == {"specversion": "1.0", "id": id_of(7), "source": "urn:shop", "type": "order.created",
                                "time": "2026-01-02T03:04:05.678901Z", "partitionkey": "k", "eventkey": "order-7",
                                "traceparent": "00-1", "datacontenttype": "application/json", "data": {"a": 1.5}}


def test_an_sql_null_has_no_body(broker):
    with open_sink(broker) as sink:
        assert {o.status for o in sink.send(event(1, payload=None), event(2, payload="null"))} == {DELIVERED}
    without, with_null = broker.drain()
    assert (without[1].content_type, without[2]) == (None, b"")
    assert (with_null[1].content_type, with_null[2]) == ("application/json", b"null")


def test_bodies_of_many_sizes(broker):
    """Around the limits of a frame, and many frames."""
    sizes = [0, 1, 131_000, 131_063, 131_064, 131_065, 262_128, 262_129, MAX_MESSAGE_BYTES - 2]
    with open_sink(broker) as sink:
        assert {o.status for o in sink.send(*(event(i, payload='"' + "x" * size + '"') for i, size in enumerate(sizes)))} == {DELIVERED}
    assert [len(body) - 2 for _, _, body in broker.drain()] == sizes


@pytest.fixture
def places(broker):
    with broker.channel() as channel:
        for exchange in "eu", "us":
            channel.exchange_declare(exchange, "direct")
        for queue in "eu-paid", "us-paid":
            channel.queue_declare(queue, exclusive=False)
            channel.queue_bind(queue, queue[:2], "paid")
        yield channel
        for queue in "eu-paid", "us-paid":
            channel.queue_delete(queue)
        for exchange in "eu", "us":
            channel.exchange_delete(exchange)


def test_routes_by_event(broker, places):
    with open_sink(broker, exchange="{header:X-Region}", routing_key="{type}") as sink:
        outcomes = sink.send(*(event(i, type="paid", headers={"x-region": "eu" if i % 2 else "us"}) for i in range(10)))
        assert {o.status for o in outcomes} == {DELIVERED}
    assert ids(broker.drain("eu-paid")) == [id_of(i) for i in range(10) if i % 2]
    assert ids(broker.drain("us-paid")) == [id_of(i) for i in range(10) if not i % 2]


def test_the_default_exchange(broker):
    options = {name: value for name, value in broker.options().items() if name != "exchange"}
    with Sink("rabbitmq", options | {"routing_key": QUEUE}) as sink:
        assert sink.send(event(1))[0].status == DELIVERED
    assert ids(broker.drain()) == [id_of(1)]


def test_what_a_route_cannot_be(broker):
    with open_sink(broker, routing_key="{ordering_key}", exchange="{header:x}") as sink:
        outcomes = sink.send(event(1, headers={"x": EXCHANGE}), event(2, ordering_key="k" * 256, headers={"x": EXCHANGE}),
                             event(3, ordering_key="k"), event(4, ordering_key="k" * 255, headers={"x": EXCHANGE}))
    assert [o.status for o in outcomes] == [FAILED_FINAL] * 3 + [DELIVERED]
    assert [o.reason for o in outcomes[:3]] == [
        "routing key: the event has no ordering key, which its route is made from",
        "routing key: a name of 256 bytes is longer than the 255 bytes that AMQP allows", 'exchange: the event has no header "x", which its route is made from']
    assert ids(broker.drain()) == [id_of(4)]


def test_headers_that_amqp_cannot_carry(broker):
    with open_sink(broker) as sink:
        outcomes = sink.send(event(1, headers={"h" * 244: "x"}), event(2, headers={"x": "y" * 140_000}),
                             event(3, headers={"h" * 243: "x" * 100_000}))
    assert [o.status for o in outcomes] == [FAILED_FINAL, FAILED_FINAL, DELIVERED]
    assert "name of 244 bytes; AMQP allows 243" in outcomes[0].reason and "larger than a frame" in outcomes[1].reason
    assert ids(broker.drain()) == [id_of(3)]


# -- how answers are judged --

def test_no_queue_for_some_events(broker, places):
    """The route is the event's: it fails, others pass."""
    with open_sink(broker, exchange="eu") as sink:
        outcomes = sink.send(*(event(i, type="paid" if i % 3 else "lost") for i in range(12)))
    assert [o.status for o in outcomes] == [DELIVERED if i % 3 else FAILED_RETRY for i in range(12)]
    assert outcomes[0].reason == "no queue took the message: NO_ROUTE"
    assert ids(broker.drain("eu-paid")) == [id_of(i) for i in range(12) if i % 3]


def test_no_queue_for_any_event(broker, places):
    """One route for all: the binding is missing, and no event can help that."""
    with open_sink(broker, exchange="eu", routing_key="lost") as sink:
        assert {(o.status, o.reason) for o in sink.send(*(event(i) for i in range(5)))} == {
            (UNREACHABLE, "no queue took the message: NO_ROUTE")}
    with open_sink(broker, exchange="eu", routing_key="lost", mandatory=False) as sink:
        assert sink.send(event(1))[0].status == DELIVERED


def test_an_exchange_that_is_missing(broker):
    with open_sink(broker, exchange="nowhere") as sink:
        outcomes = sink.send(*(event(i) for i in range(5)))
        assert {o.status for o in outcomes} == {UNREACHABLE}
        assert outcomes[0].reason == "NOT_FOUND - no exchange 'nowhere' in vhost '/'"
        with broker.channel() as channel:
            channel.exchange_declare("nowhere", "fanout")
            channel.queue_bind(QUEUE, "nowhere")
            try:
                assert {o.status for o in sink.send(*(event(i) for i in range(5)))} == {DELIVERED}, "on a new channel"
            finally:
                channel.exchange_delete("nowhere")
    assert ids(broker.drain()) == [id_of(i) for i in range(5)]


def test_an_exchange_that_is_missing_for_some_events(broker):
    with open_sink(broker, exchange="{header:x}") as sink:
        outcomes = sink.send(*(event(i, headers={"x": "nowhere" if i in (3, 7) else EXCHANGE}) for i in range(10)))
    assert [o.status for o in outcomes] == [FAILED_RETRY if i in (3, 7) else DELIVERED for i in range(10)]
    assert outcomes[3].reason == outcomes[7].reason == "NOT_FOUND - no exchange 'nowhere' in vhost '/'"
    assert set(ids(broker.drain())) == {id_of(i) for i in range(10)} - {id_of(3), id_of(7)}


def test_messages_that_are_too_large(broker):
    """The broker closes the channel and tells not over which one."""
    large = {0, 20, 21, 49}
    with open_sink(broker) as sink:
        outcomes = sink.send(*(event(i, payload='"' + "x" * (MAX_MESSAGE_BYTES if i in large else 10) + '"') for i in range(50)))
        assert [o.status for o in outcomes] == [FAILED_FINAL if i in large else DELIVERED for i in range(50)]
        assert outcomes[0].reason.startswith("PRECONDITION_FAILED - message size 1000002")
        assert sink.send(event(1000))[0].status == DELIVERED
    arrived = ids(broker.drain())
    assert set(arrived) == {id_of(i) for i in range(50) if i not in large} | {id_of(1000)}
    first = list(dict.fromkeys(arrived))
    assert first == sorted(first)


def test_a_queue_that_refuses(broker):
    with broker.channel() as channel:
        channel.queue_declare("full", arguments={"x-max-length": 3, "x-overflow": "reject-publish"})
        channel.queue_declare("open")
        try:
            options = {name: value for name, value in broker.options().items() if name != "exchange"}
            with Sink("rabbitmq", options | {"max_in_flight": 1}) as sink:
                outcomes = sink.send(*(event(i, type="full") for i in range(4)), event(9, type="open"))
                assert [o.status for o in outcomes] == [DELIVERED] * 3 + [FAILED_RETRY, DELIVERED]
                assert outcomes[3].reason == "the broker refused the message (basic.nack)"
            with Sink("rabbitmq", options) as sink:
                outcomes = sink.send(*(event(i, type="full") for i in range(10)))
                assert {o.status for o in outcomes} == {UNREACHABLE}, "when nothing gets through, it is no event's fault"
        finally:
            channel.queue_delete("full")
            channel.queue_delete("open")


# -- the connection --

@pytest.mark.parametrize("options, reason", [
    ({"password": "wrong-hunter2"}, "ACCESS_REFUSED - Login was refused"),
    ({"password": "hunter2" * 500}, "ACCESS_REFUSED - Login was refused"),
    ({"user": "nobody"}, "ACCESS_REFUSED - Login was refused"),
    ({"vhost": "nowhere"}, "NOT_ALLOWED - vhost nowhere not found"),
    ({"host": "nowhere.invalid"}, 'could not resolve host "nowhere.invalid"'),
    ({"port": 1}, "could not connect: Connection refused"),
    # Refused at once, before anybody waits for an answer.
    ({"host": "255.255.255.255", "allowed_addresses": "255.255.255.255"}, "could not connect: Network is unreachable"),
])
def test_what_makes_it_unreachable(broker, options, reason):
    with open_sink(broker, **options) as sink:
        outcome, again = sink.send(event(1))[0], sink.send(event(1))[0]
    assert (outcome.status, again.status) == (UNREACHABLE, UNREACHABLE)
    assert reason in outcome.reason and "hunter2" not in outcome.reason + "".join(sink.log_lines)


def test_a_password_that_is_too_long(broker):
    with open_sink(broker, password="hunter2" * 1000) as sink:
        outcome, = sink.send(event(1))
    assert outcome.status == UNREACHABLE and not sink.log_lines
    assert re.search("takes no password as long as this one|Login was refused", outcome.reason)  # before 4.1, and after


SLOW_RESOLVER = """
#include <netdb.h>
#include <unistd.h>
int getaddrinfo(const char *name, const char *service, const struct addrinfo *hints, struct addrinfo **result) {
  usleep(500000);
  return EAI_AGAIN;
}
"""


def with_a_slow_resolver():
    """In a process of its own."""
    options = {"host": "slow.test", "user": "u", "password": "p", "connect_timeout": 50}
    with Sink("rabbitmq", options) as sink:
        for _ in range(2):
            outcome, = sink.send(event(1))
            assert (outcome.status, outcome.reason) == (UNREACHABLE, "resolving the host took longer than connect_timeout")
        assert idle(sink, 1) < 5, "the late answer is taken, and then there is silence"
        started = time.monotonic()
        sink.send(event(1))
    assert time.monotonic() - started < 0.4, "closing does not wait for it"


def test_a_resolver_that_is_slow(tmp_path):
    (tmp_path / "slow.c").write_text(SLOW_RESOLVER)
    subprocess.run(["cc", "-shared", "-fPIC", "-o", tmp_path / "slow.so", tmp_path / "slow.c"], check=True)
    subprocess.run([sys.executable, "-c", "import test_rabbitmq_sink; test_rabbitmq_sink.with_a_slow_resolver()"], check=True,
                   env=interpreter(tmp_path / "slow.so", PYTHONPATH=":".join(sys.path)))


def test_an_address_that_is_not_allowed(broker):
    with open_sink(broker, "", host="localhost") as sink:
        outcome = sink.send(event(1))[0]
    assert outcome.status == UNREACHABLE and "allowed_addresses" in outcome.reason


def test_a_user_without_rights(broker):
    broker.control("add_user", "reader", "hunter2")
    with open_sink(broker, user="reader", password="hunter2") as sink:
        outcome, = sink.send(event(1))
        assert (outcome.status, outcome.reason) == (UNREACHABLE, "NOT_ALLOWED - access to vhost '/' refused for user 'reader'")
        broker.control("set_permissions", "reader", "", "", "")
        outcome, = sink.send(event(1))
        assert (outcome.status, outcome.reason.replace("write access", "access")) == (  # as versions 4 and 3 say it
            UNREACHABLE, "ACCESS_REFUSED - access to exchange 'events' in vhost '/' refused for user 'reader'")
        broker.control("set_permissions", "reader", "", "events", "")
        broker.control("close_all_connections", "rights are kept for a while")
        idle(sink, 0.3)
        assert sink.send(event(1))[0].status == DELIVERED


def test_the_first_of_several_hosts_that_answers(broker):
    with open_sink(broker, host="127.0.0.2, 127.0.0.1", allowed_addresses="127.0.0.0/8") as sink:
        assert sink.send(event(1))[0].status == DELIVERED


@pytest.mark.parametrize("options, problem", [
    ({"host": "a,,b"}, "empty host"), ({"host": "/tmp"}, "host name or an address"), ({"ca_file": "/tmp/x"}, 'needs option "tls"'),
    ({"tls": True, "ca_file": "/dev/null"}, 'file of option "ca_file" cannot be used'),
    ({"tls": True, "cert_file": "/tmp/x"}, "need each other"),
])
def test_what_can_never_work(broker, options, problem):
    with pytest.raises(OpenError, match=problem):
        open_sink(broker, **options)


@contextlib.contextmanager
def far_side(talk):
    """Something that is no broker: talk(connection) for each connection."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        connections = []

        def accept():
            with contextlib.suppress(OSError):
                while True:
                    connection, _ = server.accept()
                    connections.append(connection)
                    threading.Thread(target=talk, args=(connection,), daemon=True).start()

        threading.Thread(target=accept, daemon=True).start()
        yield {"port": server.getsockname()[1]}
        server.shutdown(socket.SHUT_RDWR)
        for connection in connections:
            connection.close()


@pytest.mark.parametrize("answer, reason", [
    (b"AMQP\x00\x00\x09\x02", "not AMQP 0-9-1"), (b"HTTP/1.1 400 Bad Request\r\n\r\n", "not AMQP 0-9-1"),
    (b"\x01\x00\x00\xff\xff\xff\xff", "too large"), (b"\x01\x00\x00\x00\x00\x00\x01x!", "without an end"),
    (b"\x01\x00\x00\x00\x00\x00\x04\xff\xff\xff\xff\xce", "not expected from it"), (b"\x01\x00\x00\x00\x00\x00\x01x\xce", "without a number"),
    (b"\x01\x00\x00\x00\x00\x00\x04\x00\x0a\x00\x0a\xce", "cannot be read"),
    (b"\x02\x00\x01\x00\x00\x00\x00\xce", "belongs to nothing"),
    (b"\x01\x00\x01\x00\x00\x00\x06\x00\x3c\x00\x50\x00\x00\xce", "cannot be read"),
    (b"", "closed the connection while signing in"),
])
def test_a_far_side_that_is_no_broker(broker, answer, reason):
    def talk(connection):
        connection.recv(8)
        connection.sendall(answer)
        connection.close()

    with far_side(talk) as options, open_sink(broker, **options) as sink:
        outcome = sink.send(event(1))[0]
    assert (outcome.status, reason in outcome.reason) == (UNREACHABLE, True), outcome.reason


def test_a_far_side_that_is_silent(broker):
    silence = threading.Event()
    with far_side(lambda connection: silence.wait(20)) as options:
        started = time.monotonic()
        with open_sink(broker, connect_timeout=300, **options) as sink:
            outcome = sink.send(event(1))[0]
        assert (outcome.status, outcome.reason) == (UNREACHABLE, "connecting took longer than connect_timeout")
        assert time.monotonic() - started < 5
        silence.set()


def test_close_does_not_wait(broker):
    with open_sink(broker) as sink:
        sink.send(event(1))
        events = [event(i, payload='"' + "x" * 100_000 + '"') for i in range(100)]
        assert any([sink.submit(one) for one in events])
        sink.module.flush(sink.handle)
        started = time.monotonic()
    assert time.monotonic() - started < 1


class Proxy:
    """Between sink and broker: counts, and can hold back either direction."""

    def __init__(self, broker):
        self.broker, self.to_client, self.to_broker, self.connections = broker, threading.Event(), threading.Event(), 0
        self.to_client.set()
        self.to_broker.set()

    def __call__(self, client):
        self.connections += 1
        server = socket.create_connection(("127.0.0.1", self.broker.port))
        for source, sink, gate in (client, server, self.to_broker), (server, client, self.to_client):
            threading.Thread(target=self.copy, args=(source, sink, gate), daemon=True).start()

    @staticmethod
    def copy(source, sink, gate):
        with contextlib.suppress(OSError):
            while data := source.recv(65536):
                gate.wait()
                sink.sendall(data)
        for one in source, sink:
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)


def idle(sink, seconds):
    """As a publisher that has no events. How often it was woken."""
    poll = select.poll()
    poll.register(sink.module.wait_fd(sink.handle), select.POLLIN)
    end, turns = time.monotonic() + seconds, 0
    while (left := end - time.monotonic()) > 0:
        outcomes, timeout = sink.collect()
        assert not outcomes
        poll.poll(1000 * left if timeout < 0 else min(1000 * left, timeout))
        turns += 1
    return turns


def test_heartbeats_keep_an_idle_connection(broker):
    proxy = Proxy(broker)
    with far_side(proxy) as port, open_sink(broker, heartbeat=1000, **port) as sink:
        assert sink.send(event(1))[0].status == DELIVERED
        idle(sink, 4)  # the broker gives up a client that is silent for two to three seconds
        assert sink.send(event(2))[0].status == DELIVERED
        assert proxy.connections == 1


def test_a_broker_without_heartbeats_is_given_up(broker):
    proxy = Proxy(broker)
    with far_side(proxy) as port, open_sink(broker, heartbeat=1000, connect_timeout=300, **port) as sink:
        assert sink.send(event(1))[0].status == DELIVERED
        proxy.to_client.clear()
        assert sink.send(event(2))[0].status == UNREACHABLE
        assert proxy.connections == 2, "it had lain idle, so another one was tried"
        proxy.to_client.set()
        assert sink.send(event(3))[0].status == DELIVERED


def test_a_confirmation_that_does_not_come(broker):
    proxy = Proxy(broker)
    with far_side(proxy) as port, open_sink(broker, timeout=300, **port) as sink:
        assert sink.send(event(1))[0].status == DELIVERED
        proxy.to_client.clear()
        assert {(o.status, o.reason) for o in sink.send(event(2), event(3))} == {
            (UNREACHABLE, "no confirmation came within the timeout")}
        proxy.to_client.set()
        assert {o.status for o in sink.send(event(2), event(3))} == {DELIVERED}


def test_a_connection_that_died_while_idle(broker):
    """Made anew without a word."""
    connections = []

    def talk(client):
        connections.append(client)
        Proxy(broker)(client)

    with far_side(talk) as port, open_sink(broker, **port) as sink:
        assert sink.send(event(1))[0].status == DELIVERED
        connections[0].shutdown(socket.SHUT_RDWR)
        assert sink.send(event(2))[0].status == DELIVERED
        assert len(connections) == 2


def test_a_connection_that_the_broker_closes(broker):
    proxy = Proxy(broker)
    with far_side(proxy) as port, open_sink(broker, **port) as sink:
        assert sink.send(event(1))[0].status == DELIVERED
        proxy.to_client.clear()
        events = [event(i) for i in range(2, 5)]
        assert all([sink.submit(one) for one in events])
        sink.module.flush(sink.handle)
        broker.control("close_all_connections", "test")
        proxy.to_client.set()
        outcomes = []
        deadline = time.monotonic() + 10
        while len(outcomes) < 3 and time.monotonic() < deadline:
            outcomes += sink.collect()[0]
        assert all(o.status == DELIVERED or "CONNECTION_FORCED - test" in o.reason for o in outcomes)
        assert sink.send(event(9))[0].status == DELIVERED


def test_a_broker_that_is_short_of_memory(broker):
    with open_sink(broker) as sink:
        assert sink.send(event(1))[0].status == DELIVERED
        broker.control("set_vm_memory_high_watermark", "0")
        try:
            outcomes = sink.send(*(event(i) for i in range(2, 5)))
            assert {o.status for o in outcomes} == {UNREACHABLE}
            assert outcomes[0].reason == "the broker takes no messages for now: low on memory"
            started = time.monotonic()
            assert sink.send(event(5))[0].status == UNREACHABLE
            assert time.monotonic() - started < 1, "known, and no message is added to those that wait over there"
        finally:
            broker.control("set_vm_memory_high_watermark", "0.4")
        deadline = time.monotonic() + 20
        while sink.send(event(6))[0].status != DELIVERED:
            assert time.monotonic() < deadline
            time.sleep(0.05)
    arrived = ids(broker.drain())
    assert {id_of(1), id_of(6)} <= set(arrived) and id_of(5) not in arrived


def test_killed_and_started_again(broker):
    with open_sink(broker) as sink:
        assert {o.status for o in sink.send(*(event(i) for i in range(100)))} == {DELIVERED}
        broker.kill()
        outcome, = sink.send(event(100))
        assert outcome.status == UNREACHABLE and outcome.reason
        broker.start()
        assert {o.status for o in sink.send(*(event(i) for i in range(100, 200)))} == {DELIVERED}
    assert set(ids(broker.drain())) == {id_of(i) for i in range(200)}


# -- TLS --

def test_tls(broker):
    options = {"host": "localhost", "port": broker.tls_port, "tls": True, "ca_file": broker.certificate}
    with open_sink(broker, **options) as sink:
        events = [event(i, payload='"' + "x" * 10_000 + '"') for i in range(500)]
        assert {o.status for o in sink.send(*events)} == {DELIVERED}
    assert ids(broker.drain()) == [id_of(i) for i in range(500)]


@pytest.mark.parametrize("change, reason", [
    ({"ca_file": None}, "self-signed certificate"), ({"host": "127.0.0.1"}, "IP address mismatch"), ({"plain": True}, "TLS: "),
])
def test_a_far_side_that_tls_does_not_accept(broker, change, reason):
    options = {"host": "localhost", "port": broker.tls_port, "tls": True, "ca_file": broker.certificate} | change
    if options.pop("plain", False):
        options["port"] = broker.port
    with open_sink(broker, **{name: value for name, value in options.items() if value}) as sink:
        outcome, = sink.send(event(1))
    assert (outcome.status, reason in outcome.reason) == (UNREACHABLE, True), outcome.reason


def test_a_certificate_of_our_own(broker):
    key = broker.directory / "key"
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(broker.certificate, key)
    context.load_verify_locations(broker.certificate)
    context.verify_mode = ssl.CERT_REQUIRED
    with socket.create_server(("127.0.0.1", 0)) as server, concurrent.futures.ThreadPoolExecutor() as pool:
        def shown():
            connection, _ = server.accept()
            with context.wrap_socket(connection, server_side=True) as encrypted:
                return encrypted.getpeercert()["subject"], encrypted.recv(4)

        far_side = pool.submit(shown)
        with open_sink(broker, host="localhost", port=server.getsockname()[1], tls=True, ca_file=broker.certificate,
                       cert_file=broker.certificate, key_file=key) as sink:
            assert sink.send(event(1))[0].status == UNREACHABLE  # it hangs up
        assert far_side.result() == (((("commonName", "localhost"),),), b"AMQP")


@pytest.mark.parametrize("how, reason", [("politely", "the broker closed the connection"),
                                         ("at once", "the connection broke: Connection reset by peer")])
def test_a_far_side_that_ends_tls(broker, how, reason):
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(broker.certificate, broker.directory / "key")

    def talk(connection):
        with contextlib.suppress(OSError), context.wrap_socket(connection, server_side=True) as tls:
            tls.recv(8)
            if how == "politely":
                tls.unwrap()
            tls.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # so that the end is a reset

    with far_side(talk) as port, open_sink(broker, host="localhost", tls=True, ca_file=broker.certificate, **port) as sink:
        outcome, = sink.send(event(1))
    assert outcome.status == UNREACHABLE and reason in outcome.reason


def test_plain_talk_to_a_port_for_tls(broker):
    with open_sink(broker, port=broker.tls_port) as sink:
        outcome, = sink.send(event(1))
    assert outcome.status == UNREACHABLE and outcome.reason


# -- what a real broker does not do on demand --

def scripted(broker, **options):
    return Sink("rabbitmq", broker.options() | options)


def test_confirmations_in_any_order(broker):
    def on_message(talk, message):
        if message.number == 10:
            for answer in (spec.Basic.Ack(5), spec.Basic.Ack(3, multiple=True), spec.Basic.Ack(5), spec.Basic.Nack(4),
                           spec.Basic.Ack(99), spec.Basic.Ack(9), spec.Basic.Nack(7, multiple=True),
                           spec.Basic.Ack(0, multiple=True)):
                talk.send(answer)

    with ScriptedBroker(on_message) as script, scripted(script) as sink:
        outcomes = sink.send(*(event(i) for i in range(1, 11)))
    refused = {4, 6, 7}
    assert [o.status for o in outcomes] == [FAILED_RETRY if i in refused else DELIVERED for i in range(1, 11)]


def test_frames_are_as_small_as_the_broker_wants_them(broker):
    bodies = []

    def on_message(talk, message):
        bodies.append(message.body)
        talk.send(spec.Basic.Ack(message.number))

    payloads = ['"' + "x" * size + '"' for size in (10, 4085, 4086, 4087, 50_000)]
    with ScriptedBroker(on_message, frame_max=4096, heartbeat=60) as script, scripted(script, heartbeat=7000) as sink:
        assert {o.status for o in sink.send(*(event(i, payload=p) for i, p in enumerate(payloads)))} == {DELIVERED}
        talk, = script.talks
        assert (talk.largest_frame, talk.tuned.frame_max, talk.tuned.heartbeat) == (4096, 4096, 7)
        assert talk.login.client_properties["connection_name"] == "retrysafe shop/test"
        too_long, = sink.send(event(9, headers={"x": "y" * 5000}))
        assert (too_long.status, "4096 bytes" in too_long.reason) == (FAILED_FINAL, True)
    assert bodies == [p.encode() for p in payloads]


@pytest.mark.skipif(not os.path.exists("/proc/net/if_inet6"), reason="there is no IPv6 here")
def test_an_address_of_ipv6(broker):
    with ScriptedBroker(lambda talk, message: talk.send(spec.Basic.Ack(message.number)), host="::1") as script, \
            scripted(script) as sink:
        assert sink.send(event(1))[0].status == DELIVERED


def test_a_broker_that_closes_over_every_message(broker):
    def on_message(talk, message):
        talk.close_channel(406, "PRECONDITION_FAILED - no")

    with ScriptedBroker(on_message) as script, scripted(script) as sink:
        outcomes = sink.send(*(event(i) for i in range(10)))
        assert {(o.status, o.reason) for o in outcomes} == {(FAILED_FINAL, "PRECONDITION_FAILED - no")}
        assert len(script.talks) == 1


@pytest.mark.parametrize("code", [320, 501, 505, 541])
def test_a_broker_that_closes_the_connection_over_every_message(broker, code):
    def on_message(talk, message):
        talk.send(spec.Connection.Close(code, "BECAUSE \x07 of hunter", 60, 40), 0)

    with ScriptedBroker(on_message) as script, scripted(script) as sink:
        for _ in range(2):
            outcomes = sink.send(*(event(i) for i in range(10)))
            assert {(o.status, o.reason) for o in outcomes} == {(UNREACHABLE, "BECAUSE of hunter")}
        assert len(script.talks) <= 4


def test_a_broker_that_closes_the_connection_over_one_message(broker):
    """Not only the channel: the others are sent again, and that one is found."""
    def on_message(talk, message):
        if message.properties.message_id == id_of(3):
            talk.send(spec.Connection.Close(311, "CONTENT_TOO_LARGE", 60, 40), 0)
        else:
            talk.send(spec.Basic.Ack(message.number))

    with ScriptedBroker(on_message) as script, scripted(script) as sink:
        outcomes = sink.send(*(event(i) for i in range(10)))
    assert [(o.status, o.reason) for o in outcomes] == [
        (FAILED_FINAL, "CONTENT_TOO_LARGE") if i == 3 else (DELIVERED, "") for i in range(10)]


@pytest.mark.parametrize("what, close, channel", [
    ("connection", spec.Connection.Close, 0), ("channel", spec.Channel.Close, 1)])
def test_a_broker_that_closes_without_a_word(broker, what, close, channel):
    def on_message(talk, message):
        talk.send(close(311, "\x07 ", 60, 40), channel)

    with ScriptedBroker(on_message) as script, scripted(script) as sink:
        outcome, = sink.send(event(1))
    assert (outcome.status, outcome.reason) == (FAILED_FINAL, f"the broker closed the {what}")


def test_a_broker_that_opens_no_channel(broker):
    with ScriptedBroker(None, opens_channels=False) as script, scripted(script) as sink:
        outcome, = sink.send(event(1))
    assert (outcome.status, outcome.reason) == (UNREACHABLE, "CHANNEL_ERROR - no more of them")


def test_the_broker_asks_for_a_break(broker):
    taken = []

    def on_message(talk, message):
        taken.append(message.number)
        if message.number == 2:
            talk.send(spec.Channel.Flow(active=False))
            threading.Timer(0.3, talk.send, [spec.Channel.Flow(active=True)]).start()
        else:
            talk.send(spec.Basic.Ack(message.number))

    with ScriptedBroker(on_message) as script, scripted(script) as sink:
        assert [o.status for o in sink.send(event(1), event(2))] == [DELIVERED, UNREACHABLE]
        outcome, = sink.send(event(2))
        assert (outcome.status, outcome.reason) == (UNREACHABLE, "the broker takes no messages for now: channel.flow")
        idle(sink, 0.5)
        assert [o.status for o in sink.send(event(2), event(3))] == [DELIVERED, DELIVERED]
        assert len(script.talks) == 1 and taken == [1, 2, 3, 4]


def test_a_returned_message_with_anything_for_headers(broker):
    """Tables within tables, as deep as a frame has room for."""
    nested = b"V" * 10
    while len(nested) < 130_000 - 500:
        nested = b"A" + struct.pack(">I", len(nested)) + nested
    table = b"\x01k" + nested

    def on_message(talk, message):
        talk.send(spec.Basic.Return(312, "NO_ROUTE", "e", "k"))
        properties = struct.pack(">HHQH", 60, 0, 0, 1 << 13 | 1 << 7) + struct.pack(">I", len(table)) + table
        properties += bytes([len(message.properties.message_id)]) + message.properties.message_id.encode()
        talk.raw(struct.pack(">BHI", 2, 1, len(properties)) + properties + b"\xce")
        talk.send(spec.Basic.Ack(message.number))

    with ScriptedBroker(on_message) as script, scripted(script) as sink:
        outcome, = sink.send(event(1))
    assert (outcome.status, outcome.reason) == (FAILED_RETRY, "no queue took the message: NO_ROUTE")


def test_a_broker_that_wants_another_login(broker):
    with ScriptedBroker(None, mechanisms="EXTERNAL XPLAIN") as script, scripted(script) as sink:
        outcome, = sink.send(event(1))
    assert (outcome.status, outcome.reason) == (UNREACHABLE, "the broker does not take user and password (SASL PLAIN)")


def test_a_connection_that_breaks_with_messages_in_flight(broker):
    """What was confirmed is delivered, the rest is unreachable, and nothing is reported twice."""
    def on_message(talk, message):
        if message.number == 6:
            talk.send(spec.Basic.Ack(4, multiple=True))
            talk.close()

    with ScriptedBroker(on_message) as script, scripted(script) as sink:
        outcomes = sink.send(*(event(i) for i in range(1, 11)))
        assert [o.status for o in outcomes] == [DELIVERED] * 4 + [UNREACHABLE] * 6
        assert idle(sink, 0.2) < 5 and len(script.talks) == 1


def test_what_is_in_flight_is_bounded(broker):
    with ScriptedBroker(lambda talk, message: None) as script, scripted(script, max_in_flight=4) as sink:
        kept = [event(i) for i in range(6)]
        assert [sink.submit(one) for one in kept] == [True] * 4 + [False] * 2


@pytest.mark.slow
def test_messages_given_back_that_were_never_sent(broker):
    """They cost no more, however many messages are in flight."""
    def frame(kind, body):
        return struct.pack("!BHI", kind, 1, len(body)) + body + b"\xce"
    stranger = (frame(1, struct.pack("!HHH", 60, 50, 312) + b"\0\0\0")
                + frame(2, struct.pack("!HHQH", 60, 0, 0, 0x80) + b"\x24ffffffff-ffff-8fff-8fff-ffffffffffff"))
    count = 10_000

    def on_message(talk, message):
        if message.number == count:
            talk.raw(stranger * 50_000)
            talk.send(spec.Basic.Ack(count, multiple=True))

    with ScriptedBroker(on_message) as script, scripted(script, max_in_flight=count, timeout=600_000) as sink:
        outcomes = sink.send(*(event(i) for i in range(count)), within=600)
        assert {o.status for o in outcomes} == {DELIVERED}
        assert sink.longest < 1
