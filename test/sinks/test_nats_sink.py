"""The nats sink against real servers, and against some that misbehave."""
import contextlib
import json
import os
import re
import socket
import ssl
import subprocess
import sys
import threading
import time
from urllib.parse import unquote

import pytest

import preload
from brokers.nats import MAX_PAYLOAD, Nats, Server, free_port, jetstream, stored
from brokers.nats_keys import Operator
from sink import DELIVERED, FAILED_FINAL, FAILED_RETRY, UNREACHABLE, OpenError, Sink, event, interpreter

# A pair of the documentation of NATS.
NKEY = "UDXU4RCSJNZOIQHZNWXHXORDPRTGNJAHAHFRGZNEEJCPQTT2M7NLCNF4"
SEED = "SUACSSL3UAHUDXKFSNVUZRF5UHPMWZ6BFDTJ7M6USDXIEDNPPQYYYCU3VY"


@pytest.fixture(scope="module")
def broker():
    with Nats() as one:
        yield one


@pytest.fixture
def stream(broker):
    """An empty stream of this test alone, for subjects that begin with its name."""
    made = []

    def make(name, **settings):
        with broker.client() as client:
            client.api(f"STREAM.CREATE.{name}", name=name, subjects=[f"{name}.>"], **settings)
        made.append(name)
        return lambda: messages(broker, name)
    yield make
    with broker.client() as client:
        for name in made:
            client.api(f"STREAM.DELETE.{name}")


def messages(broker, name):
    with broker.client() as client:
        return stored(client, name)


def open_sink(broker, **options):
    allowed = options.pop("allowed_addresses", "127.0.0.1, ::1")
    return Sink("nats", broker.options() | options, allowed)


@contextlib.contextmanager
def server(settings="", stream="EVENTS", **arguments):
    """A server of this test alone, with JetStream unless `stream` is None."""
    one = Server(settings, **arguments)
    if stream:
        one._settings += "\n" + jetstream(one.folder)
    try:
        one.start()
        if stream:
            with one.client() as client:
                client.api(f"STREAM.CREATE.{stream}", name=stream, subjects=[f"{stream}.>"])
        yield one
    finally:
        one.close()


def sink_to(one, **options):
    return Sink("nats", {"servers": f"127.0.0.1:{one.port}", "subject": "EVENTS.{type}"} | options)


def verdict(outcome):
    return outcome.status, outcome.reason


# -- what goes out --

def test_binary_mode(broker, stream):
    read = stream("binary")
    with open_sink(broker, subject="binary.{header:area}.{type}", stream="binary") as sink:
        outcome, = sink.send(event(7, ordering_key="order 7", scope="eu", event_key='é"%\r\nX-Evil: 1',
                                   headers={"traceparent": "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01",
                                            "X-Tenant": "ä b", "Nats-Msg-Id": "mine", "Nats-Rollup": "all",
                                            "area": "Süd", "empty": ""}))
    assert verdict(outcome) == (DELIVERED, "")
    message, = read()
    assert (message.subject, message.data) == ("binary.Süd.order.created", b'{"number": 7}')
    headers = message.headers
    assert headers["Nats-Msg-Id"] == headers["ce-id"] == "00000000-0000-8000-8000-000000000007"
    assert headers["ce-specversion"] == "1.0"
    assert headers["ce-type"] == "order.created"
    assert headers["ce-source"] == "retrysafe/shop/"
    assert headers["ce-time"] == "2026-01-02T03:04:05.678901Z"
    assert headers["ce-partitionkey"] == "order%207"
    assert headers["ce-scope"] == "eu"
    assert unquote(headers["ce-eventkey"]) == 'é"%\r\nX-Evil: 1'
    assert unquote(headers["ce-xtenant"]) == "ä b"
    assert headers["ce-empty"] == ""
    assert headers["ce-natsmsgid"] == "mine" and headers["ce-natsrollup"] == "all"
    assert headers["traceparent"] == headers["ce-traceparent"] == "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"
    assert headers["Content-Type"] == "application/json"
    assert headers["Nats-Expected-Stream"] == "binary"
    assert not {"X-Evil", "Nats-Rollup", "X-Tenant"} & headers.keys()


def test_structured_mode(broker, stream):
    read = stream("structured")
    with open_sink(broker, subject="structured.x", mode="structured", source="urn:shop") as sink:
        assert verdict(sink.send(event(1, ordering_key="k"))[0]) == (DELIVERED, "")
    message, = read()
    assert message.headers["Content-Type"] == "application/cloudevents+json; charset=utf-8"
    assert message.headers["Nats-Msg-Id"] == "00000000-0000-8000-8000-000000000001"
    body = json.loads(message.data)
    assert (body["id"], body["source"], body["partitionkey"]) == ("00000000-0000-8000-8000-000000000001", "urn:shop", "k")
    assert body["data"] == {"number": 1}


def test_no_payload(broker, stream):
    read = stream("none")
    with open_sink(broker, subject="none.x") as sink:
        assert sink.send(event(1, payload=None))[0].status == DELIVERED
    message, = read()
    assert message.data == b"" and "Content-Type" not in message.headers


def test_a_second_copy_is_delivered_and_not_stored(broker, stream):
    read = stream("copies")
    with open_sink(broker, subject="copies.x") as sink:
        assert [sink.send(event(1))[0].status for _ in range(3)] == [DELIVERED] * 3
    with open_sink(broker, subject="copies.y") as sink:
        assert sink.send(event(1))[0].status == DELIVERED
    assert len(read()) == 1


def test_many_at_once_in_their_order(broker, stream):
    read = stream("many")
    with open_sink(broker, subject="many.x", max_in_flight=300) as sink:
        outcomes = sink.send(*(event(n) for n in range(3000)))
    assert {o.status for o in outcomes} == {DELIVERED}
    assert [json.loads(m.data)["number"] for m in read()] == list(range(3000))


def test_two_destinations_in_one_stream(broker, stream):
    """The stream knows a message by its id alone, whatever the subject; a prefix makes it two."""
    read = stream("shared")
    for subject, options, expected in [("shared.a", {}, 1), ("shared.b", {}, 1), ("shared.c", {"id_prefix": "c:"}, 2),
                                       ("shared.c", {"id_prefix": "c:"}, 2)]:
        with open_sink(broker, subject=subject, **options) as sink:
            assert sink.send(event(1))[0].status == DELIVERED
        assert len(read()) == expected, subject
    first, second = read()
    assert (first.subject, second.subject) == ("shared.a", "shared.c")
    assert second.headers["Nats-Msg-Id"] == "c:" + first.headers["Nats-Msg-Id"]
    assert first.headers["ce-id"] == second.headers["ce-id"] == first.headers["Nats-Msg-Id"]


# -- what is refused --

@pytest.mark.parametrize("kind, reason", [
    ("a b", "blank"), ("a..b", "empty part"), (".a", "empty part"), ("a.*", "wildcard"), ("a.>", "wildcard"),
    ("a\r\nPUB b 0", "blank or a control character"), ("x" * 1100, "longer than the 1024 bytes"),
    ("$JS.API.STREAM.DELETE.EVENTS", "reserved"), ("_INBOX.x.1", "reserved")])
def test_illegal_subjects(broker, kind, reason):
    with open_sink(broker, subject="{type}") as sink:
        bad, good = sink.send(event(1, type=kind), event(2, type="events.good"))
        assert bad.status == FAILED_FINAL and reason in bad.reason
        assert good.status == DELIVERED


def test_no_ordering_key_for_the_subject(broker):
    with open_sink(broker, subject="events.{ordering_key}") as sink:
        bad, good = sink.send(event(1), event(2, ordering_key="k"))
        assert bad.status == FAILED_FINAL and "no ordering key" in bad.reason
        assert good.status == DELIVERED


def test_larger_than_the_server_takes(broker, stream):
    read = stream("large")
    with open_sink(broker, subject="large.x") as sink:
        outcomes = sink.send(event(1), event(2, payload="x" * MAX_PAYLOAD), event(3, payload="x" * (MAX_PAYLOAD - 2000)))
    assert [o.status for o in outcomes] == [DELIVERED, FAILED_FINAL, DELIVERED]
    assert str(MAX_PAYLOAD) in outcomes[1].reason
    assert len(read()) == 2


def test_larger_than_the_stream_takes(broker, stream):
    stream("narrow", max_msg_size=1000)
    with open_sink(broker, subject="narrow.x") as sink:
        outcomes = sink.send(event(1), event(2, payload="x" * 1001), event(3))
        assert [o.status for o in outcomes] == [DELIVERED, FAILED_FINAL, DELIVERED]
        assert outcomes[1].reason == "message size exceeds maximum allowed"
        outcome, = sink.send(event(4, headers={f"h{n}": "x" * 10_000 for n in range(8)}))
        assert outcome.status == FAILED_FINAL


def test_headers_that_are_too_large(broker, stream):
    stream("headers")
    with open_sink(broker, subject="headers.x") as sink:
        outcome, = sink.send(event(1, headers={f"h{n}": "x" * 10_000 for n in range(8)}))
        assert outcome.status == FAILED_FINAL and "header" in outcome.reason
        assert sink.send(event(2))[0].status == DELIVERED


def test_a_full_stream_stops_everybody(broker, stream):
    stream("full", max_msgs=3, discard="new")
    with open_sink(broker, subject="full.x", max_in_flight=1) as sink:
        assert [sink.send(event(n))[0].status for n in range(3)] == [DELIVERED] * 3
        for n in 3, 4:
            assert verdict(sink.send(event(n))[0]) == (UNREACHABLE, "maximum messages exceeded")
        with broker.client() as client:
            client.api("STREAM.PURGE.full")
        assert sink.send(event(3))[0].status == DELIVERED


def test_a_full_subject_stops_only_its_own(broker, stream):
    stream("subjects", max_msgs_per_subject=1, discard="new", discard_new_per_subject=True)
    with open_sink(broker, subject="subjects.{ordering_key}") as sink:
        assert sink.send(event(1, ordering_key="a"))[0].status == DELIVERED
        assert verdict(sink.send(event(2, ordering_key="a"))[0]) == (FAILED_RETRY, "maximum messages per subject exceeded")


def test_no_stream(broker, stream):
    """Nothing is held against the events, whether one is sent or many."""
    with open_sink(broker, subject="nowhere.{type}", max_in_flight=10) as sink:
        for outcome in sink.send(*(event(n, type="a") for n in range(20))):
            assert outcome.status == UNREACHABLE
            assert outcome.reason == 'no stream takes subject "nowhere.a", or JetStream is not enabled'
        stream("nowhere")
        assert sink.send(event(1))[0].status == DELIVERED


def test_no_stream_for_some(broker):
    """Where others get through, an event without a stream has failed by itself."""
    with open_sink(broker, subject="{type}") as sink:
        bad, *good = sink.send(event(0, type="nowhere.b"), *(event(n, type="events.x") for n in range(1, 20)))
        assert bad.status == FAILED_RETRY and "nowhere.b" in bad.reason
        assert {o.status for o in good} == {DELIVERED}


def test_another_stream_than_the_one_that_is_named(broker):
    with open_sink(broker, subject="events.x", stream="OTHER") as sink:
        outcome, = sink.send(event(1))
    assert outcome.status == UNREACHABLE and 'option "stream"' in outcome.reason


def test_jetstream_is_off():
    with server(stream=None) as plain, sink_to(plain) as sink:
        outcome, = sink.send(event(1))
    assert outcome.status == UNREACHABLE and "JetStream is not enabled" in outcome.reason


def test_somebody_else_listens(broker):
    """A subscriber is no stream: it takes the message, and nothing is stored."""
    with broker.client() as other, open_sink(broker, subject="{type}", timeout=300) as sink:
        other.subscribe("ears.>")
        outcome, = sink.send(event(1, type="ears.a"))
        assert outcome.status == UNREACHABLE and "no acknowledgement" in outcome.reason
        # Others get through: the event waits for something of its own.
        bad, good = sink.send(event(1, type="ears.a"), event(2, type="events.x"))
        assert (bad.status, good.status) == (FAILED_RETRY, DELIVERED)


@pytest.mark.parametrize("answer", [b"+OK", b"", b'{"stream":"EVENTS"}', b'{"stream":"EVENTS","seq":0}'])
def test_somebody_else_answers(broker, answer):
    with broker.client() as other, open_sink(broker, subject="{type}") as sink:
        other.subscribe("mouths.>")
        thread = threading.Thread(target=other.answer, args=(answer,))
        thread.start()
        outcome, = sink.send(event(1, type="mouths.a"))
        thread.join()
    assert verdict(outcome) == (UNREACHABLE, "somebody else than JetStream answers on the subject")


# -- who may connect --

def test_publishing_is_not_permitted():
    rules = """authorization { users = [
      {user: courier, password: s3cret, permissions: {publish: [EVENTS.good], subscribe: ["_INBOX.>"]}}
      {user: owner, password: owner}] }"""
    with (server(rules, login={"user": "owner", "pass": "owner"}) as one,
          sink_to(one, user="courier", password="s3cret", timeout=5000) as sink):
        outcome, = sink.send(event(1, type="bad"))
        assert outcome.status == UNREACHABLE and 'Permissions Violation for Publish to "EVENTS.bad"' in outcome.reason
        bad, good = sink.send(event(2, type="bad"), event(3, type="good"))
        assert (bad.status, good.status) == (FAILED_RETRY, DELIVERED)


def test_listening_for_acknowledgements_is_not_permitted():
    rules = """authorization { users = [
      {user: courier, password: s3cret, permissions: {publish: ["EVENTS.>"], subscribe: ["acks.>"]}}
      {user: owner, password: owner}] }"""
    with server(rules, login={"user": "owner", "pass": "owner"}) as one:
        with sink_to(one, user="courier", password="s3cret", timeout=5000) as sink:
            outcome, = sink.send(event(1))
            assert outcome.status == UNREACHABLE and "inbox_prefix" in outcome.reason
        with sink_to(one, user="courier", password="s3cret", inbox_prefix="acks.courier") as sink:
            assert verdict(sink.send(event(1))[0]) == (DELIVERED, "")


# No option may get out of its string in the greeting.
QUOTES = 'a"b\\c","user":"owner'


@pytest.mark.parametrize("rules, login, good, bad", [
    (f"authorization {{ user: {json.dumps(QUOTES)}, password: {json.dumps(QUOTES)} }}", {"user": QUOTES, "pass": QUOTES},
     {"user": QUOTES, "password": QUOTES}, {"user": QUOTES, "password": "hunter2"}),
    (f"authorization {{ token: {json.dumps(QUOTES)} }}", {"auth_token": QUOTES}, {"token": QUOTES},
     {"token": 'hunter2","user":"owner'}),
    ("authorization { token: s3cret }", {"auth_token": "s3cret"}, {"token": "s3cret"}, {"token": "hunter2"}),
    (f"authorization {{ users = [{{nkey: {NKEY}}}, {{user: owner, password: owner}}] }}",
     {"user": "owner", "pass": "owner"}, {"nkey": NKEY, "nkey_seed": SEED}, {"user": "owner", "password": "hunter2"})])
def test_ways_to_log_in(rules, login, good, bad):
    with server(rules, login=login) as one:
        with sink_to(one, **good) as sink:
            assert verdict(sink.send(event(1))[0]) == (DELIVERED, "")
        for wrong in bad, {}:
            with sink_to(one, **wrong) as sink:
                outcome, = sink.send(event(2))
                assert outcome.status == UNREACHABLE and "Authorization Violation" in outcome.reason
                assert "hunter2" not in outcome.reason


def test_credentials_of_an_account(tmp_path):
    """Without JetStream in that account: what counts is how far the sink gets."""
    ours, theirs = Operator(tmp_path), Operator(tmp_path)
    with server(ours.settings, stream=None) as one:
        for good in ours.credentials(), " ".join(ours.credentials().split()):
            with sink_to(one, credentials=good) as sink:
                assert "JetStream is not enabled" in sink.send(event(1))[0].reason
        for bad in theirs.credentials(), None:
            with sink_to(one, **({"credentials": bad} if bad else {})) as sink:
                outcome, = sink.send(event(1))
                assert outcome.status == UNREACHABLE and "Authorization Violation" in outcome.reason


# -- TLS --

@pytest.fixture(scope="module")
def certificates(tmp_path_factory):
    folder = tmp_path_factory.mktemp("certificates")

    def openssl(*arguments):
        subprocess.run(["openssl", *map(str, arguments)], check=True, capture_output=True)
    for ca in "ca", "other":
        openssl("req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", 2, "-subj", f"/CN={ca}",
                "-addext", "keyUsage=critical,keyCertSign", "-keyout", folder / f"{ca}.key", "-out", folder / f"{ca}.pem")
    for name, alternative in ("server", "DNS:localhost"), ("client", "DNS:courier"):
        extensions = folder / f"{name}.cnf"
        extensions.write_text(f"subjectAltName={alternative}\nauthorityKeyIdentifier=keyid\n")
        openssl("req", "-newkey", "rsa:2048", "-nodes", "-subj", f"/CN={name}", "-keyout", folder / f"{name}.key", "-out",
                folder / f"{name}.csr")
        openssl("x509", "-req", "-in", folder / f"{name}.csr", "-CA", folder / "ca.pem", "-CAkey", folder / "ca.key",
                "-CAcreateserial", "-days", 2, "-extfile", extensions, "-out", folder / f"{name}.pem")
    return folder


@pytest.fixture(scope="module")
def tls_server(certificates):
    context = ssl.create_default_context(cafile=certificates / "ca.pem")
    with server(f"tls {{ cert_file: {certificates}/server.pem, key_file: {certificates}/server.key }}", tls=context) as one:
        yield one


def tls_sink(one, certificates, **options):
    options = {"servers": f"tls://localhost:{one.port}", "ca_file": certificates / "ca.pem"} | options
    return Sink("nats", {"subject": "EVENTS.{type}"} | {k: v for k, v in options.items() if v is not None})


def test_tls(tls_server, certificates):
    with tls_sink(tls_server, certificates) as sink:
        outcomes = sink.send(*(event(n, payload="x" * 50_000) for n in range(300)))
    assert {verdict(o) for o in outcomes} == {(DELIVERED, "")}


@pytest.mark.parametrize("options", [
    {"ca_file": None}, {"ca_file": "other.pem"}, {"servers": "tls://127.0.0.1"}, {"servers": "127.0.0.1"},
    {"ca_file": None, "servers": "localhost"}])
def test_certificates_and_names_are_verified(tls_server, certificates, options):
    """Also where only the server asks for TLS."""
    if options.get("ca_file"):
        options = options | {"ca_file": certificates / options["ca_file"]}
    if "servers" in options:
        options = options | {"servers": f"{options['servers']}:{tls_server.port}"}
    with tls_sink(tls_server, certificates, **options) as sink:
        outcome, = sink.send(event(1))
    assert outcome.status == UNREACHABLE
    assert re.search("certificate|IP address mismatch", outcome.reason), outcome.reason


def test_tls_is_used_where_the_server_demands_it(tls_server, certificates):
    with tls_sink(tls_server, certificates, servers=f"localhost:{tls_server.port}") as sink:
        assert verdict(sink.send(event(1))[0]) == (DELIVERED, "")


def test_no_tls_where_it_is_demanded(broker):
    for options in {"tls": True}, {"servers": "tls://" + broker.options()["servers"]}:
        with open_sink(broker, **options) as sink:
            outcome, = sink.send(event(1))
            assert outcome.status == UNREACHABLE and "ecure" in outcome.reason


def test_a_certificate_of_ours(certificates):
    context = ssl.create_default_context(cafile=certificates / "ca.pem")
    context.load_cert_chain(certificates / "client.pem", certificates / "client.key")
    rules = (f"tls {{ cert_file: {certificates}/server.pem, key_file: {certificates}/server.key,"
             f" ca_file: {certificates}/ca.pem, verify: true }}")
    with server(rules, tls=context) as one:
        with tls_sink(one, certificates, cert_file=certificates / "client.pem", key_file=certificates / "client.key") as sink:
            assert verdict(sink.send(event(1))[0]) == (DELIVERED, "")
        with tls_sink(one, certificates) as sink:
            assert sink.send(event(1))[0].status == UNREACHABLE


# -- where connections go --

def test_an_address_that_is_not_allowed(broker):
    with open_sink(broker, allowed_addresses="") as sink:
        outcome, = sink.send(event(1))
    assert verdict(outcome) == (UNREACHABLE, "address 127.0.0.1 is not allowed; see allowed_addresses, of the server or of the relay")


def test_the_first_server_that_answers(broker):
    servers = f"no-such-host.invalid, 127.0.0.1:{free_port()}, {broker.options()['servers']}"
    with open_sink(broker, servers=servers) as sink:
        assert verdict(sink.send(event(1))[0]) == (DELIVERED, "")


@pytest.mark.skipif(not os.path.exists("/proc/net/if_inet6"), reason="there is no IPv6 here")
def test_an_address_of_ipv6():
    with server(host="::1") as one, sink_to(one, servers=f"[::1]:{one.port}") as sink:
        assert verdict(sink.send(event(1))[0]) == (DELIVERED, "")


def test_no_server_answers():
    ports = free_port(), free_port()
    with Sink("nats", {"servers": ", ".join(f"127.0.0.1:{port}" for port in ports), "subject": "x"}) as sink:
        outcome, = sink.send(event(1))
    assert outcome.status == UNREACHABLE
    assert all(f"127.0.0.1:{port}: " in outcome.reason for port in ports)


class Fake:
    """Listens, says `greeting` to whoever comes, and then what `answers` has."""

    def __init__(self, greeting=b"", answers=()):
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self.connections = []
        self._greeting, self._answers = greeting, answers
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self):
        with contextlib.suppress(OSError):
            while True:
                connection, _ = self._listener.accept()
                self.connections.append(connection)
                connection.sendall(self._greeting)
                for answer in self._answers:
                    connection.recv(65536)
                    connection.sendall(answer)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self._listener.close()
        for connection in self.connections:
            connection.close()


def info(**more):
    return b"INFO " + json.dumps({"server_id": "x", "version": "2.9.10", "proto": 1, "headers": True,
                                  "max_payload": 1024} | more).encode() + b"\r\n"


def sessions():
    """Threads that have to do with one connection."""
    names = []
    for task in os.listdir("/proc/self/task"):
        with contextlib.suppress(OSError), open(f"/proc/self/task/{task}/comm") as name:
            names.append(name.read().strip())
    return [name for name in names if name == "retrysafe nats"]


def eventually(condition, within=5):
    deadline = time.monotonic() + within
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_gossip_is_not_followed():
    """A server could name others that the address filter has never seen."""
    with Fake() as victim:
        gossip = info(connect_urls=[f"127.0.0.1:{victim.port}"])
        with Fake(gossip, [b"-ERR 'Authorization Violation'\r\n"]) as fake, sink_to(fake) as sink:
            for n in 1, 2:
                outcome, = sink.send(event(n))
                assert outcome.status == UNREACHABLE
        assert len(fake.connections) == 2 and victim.connections == []


@pytest.mark.parametrize("greeting", [
    b"", b"INF", info(), info(tls_required=True), b"HTTP/1.1 400 Bad Request\r\n\r\n", b"\0" * 100_000, b"INFO {\r\n"],
    ids=["silence", "half a greeting", "no answer", "no handshake", "another protocol", "zeros", "broken greeting"])
def test_what_is_no_server(broker, greeting):
    with open_sink(broker) as sink:
        sink.send(event(1))  # the library has started its threads
    eventually(lambda: not sessions())
    with Fake(greeting) as fake, sink_to(fake, connect_timeout=300) as sink:
        for n in 1, 2:
            started = time.monotonic()
            outcome, = sink.send(event(n))
            assert outcome.status == UNREACHABLE and str(fake.port) in outcome.reason
            assert time.monotonic() - started < 3
        # Nothing is left that waits for the server, or spins.
        eventually(lambda: not sessions())


def test_errors_about_subjects_that_nothing_was_sent_to():
    """They cost no more, however many messages are in flight."""
    count, listener = 10_000, socket.create_server(("127.0.0.1", 0))

    def serve():
        connection, _ = listener.accept()
        replies = []
        with connection, connection.makefile("rb") as lines:
            connection.sendall(info())
            while len(replies) < count:
                words = next(lines).split()
                if words[:1] == [b"PING"]:
                    connection.sendall(b"PONG\r\n")
                elif words[:1] == [b"SUB"]:
                    number = words[-1]
                elif words[:1] == [b"HPUB"]:
                    replies.append(words[2])
            connection.sendall(b"".join(b"-ERR 'Permissions Violation for Publish to \"%d\"'\r\n" % i for i in range(15_000)))
            stored = b'{"stream":"EVENTS","seq":1}'
            connection.sendall(b"".join(b"MSG %s %s %d\r\n%s\r\n" % (reply, number, len(stored), stored) for reply in replies))
            for _ in lines:
                pass  # until it is closed
    threading.Thread(target=serve, daemon=True).start()
    options = {"servers": f"127.0.0.1:{listener.getsockname()[1]}", "subject": "EVENTS.{type}", "max_in_flight": count}
    with listener, Sink("nats", options | {"timeout": 60_000}) as sink:
        outcomes = sink.send(*(event(i) for i in range(count)), within=60)
        assert {o.status for o in outcomes} == {DELIVERED}
        assert sink.longest < 1


def test_closing_does_not_wait():
    """In every state of a connection."""
    for greeting in b"", info(), info(tls_required=True):
        with Fake(greeting) as fake, sink_to(fake, connect_timeout=60_000) as sink:
            one = event(1)
            sink.submit(one)
            sink.module.flush(sink.handle)
            eventually(lambda: sink.collect() and fake.connections)
            assert duration_of(sink.close) < 0.1
    eventually(lambda: not sessions())
    with server() as one, sink_to(one) as sink:
        assert sink.send(event(0))[0].status == DELIVERED
        one.stop()
        events = [event(n, payload="x" * 200_000) for n in range(100)]
        assert all(sink.submit(e) for e in events)
        sink.module.flush(sink.handle)
        assert duration_of(sink.close) < 0.1
    eventually(lambda: not sessions())


def duration_of(action):
    started = time.monotonic()
    action()
    return time.monotonic() - started


def program(port, certificates, end):
    """Of a process that has delivered an event over TLS."""
    return f"""
import ctypes, pathlib, sys
sys.path[:0] = {sys.path!r}
import test_nats_sink
from sink import event
sink = test_nats_sink.tls_sink(test_nats_sink.Port({port}), pathlib.Path({str(certificates)!r}))
assert sink.send(event(0))[0].status == 0
{end}"""


def test_the_end_of_a_process(tls_server, certificates):
    """It may come while connections are at work: nothing may crash, which in a server would end all sessions."""
    end = """
events = [event(n, payload="x" * 50_000) for n in range(200)]
assert all(sink.submit(e) for e in events)
sink.module.flush(sink.handle)
"""
    for _ in range(5):
        subprocess.run([sys.executable, "-c", program(tls_server.port, certificates, end)], env=interpreter(), check=True,
                       timeout=30)


@pytest.mark.skipif("RETRYSAFE_COVERAGE" in os.environ, reason="built to count lines, which is done where others do nothing more")
def test_the_end_of_a_process_beside_the_end_of_a_thread(tls_server, certificates, tmp_path):
    """Of one that no session knows any more, while it is still in the TLS library. The rest is as at any end."""
    library = preload.build("held_at_its_end", tmp_path)
    end = f"""
sink.close()
ctypes.CDLL({str(library)!r}).wait_until_held()
libc = ctypes.CDLL(None)
libc.puts(b"in a buffer")
libc.exit(3)
"""
    done = subprocess.run([sys.executable, "-c", program(tls_server.port, certificates, end)], timeout=30,
                          env=interpreter(library, PYTHONUNBUFFERED=""), stdout=subprocess.PIPE)
    assert (done.returncode, done.stdout) == (3, b"in a buffer\n")


class Port:
    def __init__(self, port):
        self.port = port


# -- when the server goes away --

def test_a_server_that_stops_answering():
    with server() as one:
        with sink_to(one, timeout=500, connect_timeout=500) as sink:
            assert sink.send(event(0))[0].status == DELIVERED
            one.stop()
            outcomes = sink.send(*(event(n) for n in range(1, 50)))
            assert {o.status for o in outcomes} == {UNREACHABLE}
            assert "no acknowledgement" in outcomes[0].reason
            outcome, = sink.send(event(1))  # nor does it take a new connection
            assert outcome.status == UNREACHABLE
        one.go_on()
        with sink_to(one) as sink:
            assert {o.status for o in sink.send(*(event(n) for n in range(1, 50)))} == {DELIVERED}
        with one.client() as client:
            assert [json.loads(m.data)["number"] for m in stored(client)] == list(range(50)), "copies were dropped"


def test_a_server_that_is_killed():
    """What was under way is reported once, and goes nowhere later."""
    with server() as one, sink_to(one) as sink:
        assert sink.send(event(0))[0].status == DELIVERED
        one.stop()
        events = [event(n, payload=json.dumps("x" * 100_000)) for n in range(1, 200)]
        assert all(sink.submit(e) for e in events)
        sink.module.flush(sink.handle)
        one.kill()
        outcomes = []
        eventually(lambda: outcomes.extend(sink.collect()[0]) or len(outcomes) >= len(events))
        assert sorted(o.tag for o in outcomes) == [e.tag for e in events]
        assert {o.status for o in outcomes} == {UNREACHABLE} and "connection lost" in outcomes[0].reason
        outcome, = sink.send(event(200))
        assert outcome.status == UNREACHABLE and str(one.port) in outcome.reason
        one.start()
        assert verdict(sink.send(event(201))[0]) == (DELIVERED, "")
        with one.client() as client:
            assert {m.headers["ce-eventkey"] for m in stored(client)} == {"order-0", "order-201"}


def test_an_idle_connection_that_ended_is_made_anew():
    with server() as one, sink_to(one) as sink:
        assert sink.send(event(0))[0].status == DELIVERED
        one.kill()
        one.start()
        assert verdict(sink.send(event(1))[0]) == (DELIVERED, "")


def test_a_stalled_server_over_tls(certificates):
    """The library waits without a bound for room in a TLS connection: the sink does not."""
    context = ssl.create_default_context(cafile=certificates / "ca.pem")
    rules = f"tls {{ cert_file: {certificates}/server.pem, key_file: {certificates}/server.key }}"
    with server(rules, tls=context) as one, tls_sink(one, certificates, timeout=1000) as sink:
        assert sink.send(event(0))[0].status == DELIVERED
        one.stop()
        started = time.monotonic()
        outcomes = sink.send(*(event(n, payload="x" * 200_000) for n in range(1, 100)))
        assert {o.status for o in outcomes} == {UNREACHABLE}
        assert time.monotonic() - started < 5
        eventually(lambda: not sessions())  # its thread is not left in the write
        one.go_on()
        with tls_sink(one, certificates) as sink:
            assert {o.status for o in sink.send(*(event(n, payload="x" * 200_000) for n in range(1, 100)))} == {DELIVERED}


# -- options --

@pytest.mark.parametrize("options, reason", [
    ({"servers": "http://a"}, "nats:// or tls://"),
    ({"servers": "nats://courier:hunter2@a"}, "options of their own"),
    ({"servers": "a:0"}, "port"),
    ({"user": "u"}, "need each other"),
    ({"user": "u", "password": "hunter2", "token": "hunter2"}, "only one"),
    ({"nkey": NKEY}, "need each other"),
    ({"nkey": "X" * 56, "nkey_seed": SEED}, "public key"),
    ({"nkey": NKEY, "nkey_seed": "hunter2" + "X" * 51}, "seed"),
    ({"credentials": "hunter2"}, "JWT"),
    ({"cert_file": "/x"}, "need each other")])
def test_options_that_cannot_work(options, reason):
    with pytest.raises(OpenError) as error:
        Sink("nats", {"servers": "127.0.0.1", "subject": "x"} | options)
    assert reason in str(error.value) and "hunter2" not in str(error.value)


def test_files_that_are_not_there(broker):
    for options in {"ca_file": "/nowhere"}, {"cert_file": "/nowhere", "key_file": "/nowhere"}:
        with open_sink(broker, **options) as sink:
            assert sink.send(event(1))[0].status == UNREACHABLE
