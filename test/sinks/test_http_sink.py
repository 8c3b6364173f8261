"""The http sink against a receiver that misbehaves."""
import base64
import hashlib
import hmac
import itertools
import os
import shutil
import socket
import subprocess
import threading
import time
from email.utils import formatdate
from urllib.parse import unquote

import pytest

from receiver import Answer, Close, Hang, Raw, Receiver, Reset
from resident import memory
from sink import DELIVERED, FAILED_FINAL, FAILED_RETRY, UNREACHABLE, OpenError, Sink, event


@pytest.fixture
def receiver():
    with Receiver() as one:
        yield one


def open_sink(receiver, **options):
    allowed = options.pop("allowed_addresses", "127.0.0.1, ::1")
    return Sink("http", {"url": receiver.url + "hook?x=1"} | options, allowed)


def status_of(receiver, behaviour, **options):
    """One event against a receiver of that behaviour."""
    receiver.behave(behaviour)
    with open_sink(receiver, **options) as sink:
        return sink.send(event(1))[0]


# -- what goes out --

def test_binary_mode(receiver):
    with open_sink(receiver) as sink:
        outcome, = sink.send(event(7, ordering_key="order 7", scope="eu", event_key='é"%\r\nX-Evil: 1',
                                   headers={"traceparent": "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01",
                                            "X-Tenant": "ä b"}))
    assert (outcome.status, outcome.reason) == (DELIVERED, "")
    request, = receiver.requests
    assert (request.method, request.path, request.body) == ("POST", "/hook?x=1", b'{"number": 7}')
    headers = {name: value for name, value in request.headers}
    assert headers["ce-specversion"] == "1.0"
    assert headers["ce-id"] == headers["webhook-id"] == "00000000-0000-8000-8000-000000000007"
    assert headers["ce-type"] == "order.created"
    assert headers["ce-source"] == "retrysafe/shop/"
    assert headers["ce-time"] == "2026-01-02T03:04:05.678901Z"
    assert headers["ce-partitionkey"] == "order%207"
    assert headers["ce-scope"] == "eu"
    assert unquote(headers["ce-eventkey"]) == 'é"%\r\nX-Evil: 1'
    assert unquote(headers["ce-xtenant"]) == "ä b"
    assert headers["traceparent"] == headers["ce-traceparent"] == "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"
    assert headers["Content-Type"] == "application/json"
    assert headers["User-Agent"].startswith("retrysafe/")
    assert abs(int(headers["webhook-timestamp"]) - time.time()) < 5
    assert not {"X-Evil", "Accept-Encoding", "Cookie", "Expect", "webhook-signature", "X-Tenant"} & set(headers)


def test_structured_mode(receiver):
    with open_sink(receiver, mode="structured", source="urn:shop") as sink:
        assert sink.send(event(7, payload='{"a": [1.50, "\\u0001€😀"]}', ordering_key="k"))[0].status == DELIVERED
    request, = receiver.requests
    assert request.header("content-type") == "application/cloudevents+json; charset=utf-8"
    assert request.header("ce-id") is None
    assert request.json() == {"specversion": "1.0", "id": "00000000-0000-8000-8000-000000000007", "source": "urn:shop",
                              "type": "order.created", "time": "2026-01-02T03:04:05.678901Z", "partitionkey": "k",
                              "eventkey": "order-7", "datacontenttype": "application/json",
                              "data": {"a": [1.5, "\u0001€😀"]}}


@pytest.mark.parametrize("mode", ["binary", "structured"])
def test_an_sql_null_has_no_data(receiver, mode):
    with open_sink(receiver, mode=mode) as sink:
        assert sink.send(event(1, payload=None), event(2, payload="null"))[0].status == DELIVERED
    without, with_null = sorted(receiver.requests, key=lambda request: request.id)
    if mode == "binary":
        assert (without.body, without.header("content-type")) == (b"", None)
        assert (with_null.body, with_null.header("content-type")) == (b"null", "application/json")
    else:
        assert "data" not in without.json() and with_null.json()["data"] is None


def verified(request, secret):
    """By the text of the Standard Webhooks specification."""
    content = b".".join([request.header("webhook-id").encode(), request.header("webhook-timestamp").encode(), request.body])
    expected = "v1," + base64.b64encode(hmac.new(secret, content, hashlib.sha256).digest()).decode()
    return expected in request.header("webhook-signature").split(" ")


@pytest.mark.parametrize("mode", ["binary", "structured"])
def test_signature(receiver, mode):
    key = os.urandom(32)
    secrets = "whsec_" + base64.b64encode(key).decode() + " old-secret-as-text"
    with open_sink(receiver, secret=secrets, mode=mode) as sink:
        sink.send(*(event(i) for i in range(20)))
    assert len(receiver.requests) == 20
    for request in receiver.requests:
        assert verified(request, key) and verified(request, b"old-secret-as-text")
        assert not verified(request, b"another")
        assert len(request.header("webhook-signature").split(" ")) == 2


def test_headers_of_the_destination(receiver):
    with open_sink(receiver, **{"headers.Authorization": "Bearer t0ken-t0ken", "headers.X-Empty": ""}) as sink:
        sink.send(event(1))
    request, = receiver.requests
    assert request.header("authorization") == "Bearer t0ken-t0ken"
    assert request.header("x-empty") == ""


@pytest.mark.parametrize("name", ["Content-Length", "transfer-encoding", "ce-id", "Webhook-Signature", "Expect"])
def test_headers_that_an_option_cannot_set(receiver, name):
    with pytest.raises(OpenError, match="cannot be set by an option"):
        open_sink(receiver, **{f"headers.{name}": "x"})


def test_a_large_payload(receiver):
    payload = '"' + "x" * 3_000_000 + '"'
    with open_sink(receiver) as sink:
        assert sink.send(event(1, payload=payload))[0].status == DELIVERED
    assert receiver.requests[0].body == payload.encode()
    assert receiver.requests[0].header("expect") is None


def test_connections_are_kept_and_bounded(receiver):
    with open_sink(receiver, max_in_flight=4) as sink:
        assert all(o.status == DELIVERED for o in sink.send(*(event(i) for i in range(200))))
    assert len({request.id for request in receiver.requests}) == 200
    assert len({request.connection for request in receiver.requests}) <= 4


def test_a_full_sink_takes_no_more(receiver):
    receiver.behave(Hang)
    with open_sink(receiver, max_in_flight=2) as sink:
        kept = [event(i) for i in range(3)]
        assert [sink.submit(e) for e in kept] == [True, True, False]


def test_requests_go_in_parallel(receiver):
    together = threading.Barrier(8)

    def behave(request):
        together.wait(10)  # breaks unless eight are under way at once
        return 204

    receiver.behave(behave)
    with open_sink(receiver, max_in_flight=8) as sink:
        assert all(o.status == DELIVERED for o in sink.send(*(event(i) for i in range(8))))


# -- how answers are judged --

@pytest.mark.parametrize("status", [200, 201, 202, 204, 299])
def test_delivered(receiver, status):
    assert status_of(receiver, status).status == DELIVERED


@pytest.mark.parametrize("status", [400, 401, 403, 404, 409, 410, 413, 422, 499])
def test_refused_for_good(receiver, status):
    outcome = status_of(receiver, Answer(status, body=b"no such order"))
    assert (outcome.status, outcome.reason) == (FAILED_FINAL, f"HTTP {status}: no such order")


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
def test_redirects_are_not_followed(receiver, status):
    outcome = status_of(receiver, Answer(status, {"Location": receiver.url + "elsewhere"}))
    assert (outcome.status, outcome.reason) == (FAILED_FINAL, f"HTTP {status}: redirects are not followed")
    assert [request.path for request in receiver.requests] == ["/hook?x=1"]


@pytest.mark.parametrize("status", [408, 425, 500, 501, 502, 504, 599])
def test_one_event_that_fails(receiver, status):
    outcome = status_of(receiver, Answer(status, body=b"deadlock"))
    assert (outcome.status, outcome.reason) == (FAILED_RETRY, f"HTTP {status}: deadlock")


def test_a_failure_among_successes_is_the_events_own(receiver):
    receiver.behave(lambda request: 500 if request.json()["number"] % 5 == 0 else 204)
    with open_sink(receiver) as sink:
        outcomes = sink.send(*(event(i) for i in range(50)))
    assert [o.status for o in outcomes] == [FAILED_RETRY if i % 5 == 0 else DELIVERED for i in range(50)]


@pytest.mark.parametrize("status", [500, 502, 504])
def test_when_everything_fails_it_is_the_destination(receiver, status):
    receiver.behave(status)
    with open_sink(receiver, max_in_flight=8) as sink:
        assert {o.status for o in sink.send(*(event(i) for i in range(20)))} == {UNREACHABLE}
        assert {o.status for o in sink.send(event(1))} == {UNREACHABLE}, "it stays so until one gets through"
        receiver.behave(204)
        assert {o.status for o in sink.send(event(1))} == {DELIVERED}
        receiver.behave(status)
        assert {o.status for o in sink.send(event(1))} == {FAILED_RETRY}


@pytest.mark.parametrize("status", [429, 503])
def test_overload_is_the_destinations(receiver, status):
    outcome = status_of(receiver, Answer(status, {"Retry-After": "17"}, b"slow down"))
    assert (outcome.status, outcome.retry_after_ms) == (UNREACHABLE, 17_000)
    assert outcome.reason == f"HTTP {status}: slow down"


def test_retry_after(receiver):
    def retry_after(value):
        return status_of(receiver, Answer(503, {"Retry-After": value})).retry_after_ms

    assert 25_000 <= retry_after(formatdate(time.time() + 30, usegmt=True)) <= 31_000
    assert retry_after(formatdate(time.time() - 30, usegmt=True)) == -1
    assert retry_after(formatdate(time.time() + 40 * 24 * 3600, usegmt=True)) == 24 * 3600 * 1000
    assert retry_after("43200") == 12 * 3600 * 1000
    for long in ("99999999999", "9" * 100):
        assert retry_after(long) == 24 * 3600 * 1000
    for nonsense in ("", "-5", "soon", "0", "-" + "9" * 100, "5 apples", "7\xff"):
        assert retry_after(nonsense) == -1
    assert status_of(receiver, Answer(500, {"Retry-After": "3"})).retry_after_ms == 3000


@pytest.mark.parametrize("behaviour", [
    Reset, Close, Raw(b""), Raw(b"\x00\xff\xfegarbage\r\n\r\n"), Raw(b"HTTP/1.1 200"), Raw(b"HTTP/1.1 200 OK\r\nX-Half: "),
    Raw(b"HTTP/9.9 banana\r\n\r\n"), Raw(b"hTTP/1.1 500 No\r\n\r\n"), Raw(b"HTTP/banana 500\r\n\r\nHTTP/1.1 200 OK\r\n\r\n"), Raw(b"HTTP/1.1 2000 OK\r\n\r\n"),
    Raw(b"SSH-2.0-OpenSSH_9.2\r\n")])
def test_no_answer(receiver, behaviour):
    outcome = status_of(receiver, behaviour)
    assert outcome.status == UNREACHABLE
    assert outcome.reason


def test_the_status_is_the_answer_even_if_the_body_breaks(receiver):
    assert status_of(receiver, Raw(b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\nhalf")).status == DELIVERED
    outcome = status_of(receiver, Raw(b"HTTP/1.1 404 No\r\nContent-Length: 100\r\n\r\nhalf"))
    assert (outcome.status, outcome.reason) == (FAILED_FINAL, "HTTP 404: half")


def test_an_interim_answer_is_not_the_answer(receiver):
    receiver.behave(Raw(b"HTTP/1.1 103 Early Hints\r\n\r\n"))
    with open_sink(receiver) as sink:
        assert sink.send(event(1))[0].status == UNREACHABLE


def test_an_answer_without_end_is_cut(receiver):
    assert status_of(receiver, Answer(200, body=b"x" * 1_000_000)).status == DELIVERED
    # What is left of it is not waited for.
    begun = Hang(b"HTTP/1.1 400 No\r\nContent-Length: 1000000\r\n\r\n" + b"x" * 11)
    outcome = status_of(receiver, begun, response_bytes=10)
    assert outcome.status == FAILED_FINAL
    assert status_of(receiver, Answer(200, body=b"x"), response_bytes=0).status == DELIVERED


def test_answers_are_never_decompressed(receiver):
    bomb = Answer(400, {"Content-Encoding": "gzip"}, b"\x1f\x8b\x08\x00 not gzip")
    assert status_of(receiver, bomb).status == FAILED_FINAL


@pytest.mark.parametrize("body, shown", [
    (b"a\x00b\r\nc\x1b[31m", "a b c [31m"), (b"\xff\xfe\xc3", "???"), ("ж😀".encode(), "ж😀"),
    (b"\xed\xa0\x80", "???"), (b"   ", None), (b"x" * 1000, "x" * 180)])
def test_what_is_shown_of_an_answer(receiver, body, shown):
    reason = status_of(receiver, Answer(422, body=body)).reason
    assert reason == ("HTTP 422" if shown is None else f"HTTP 422: {shown}")


def test_secrets_that_come_back_are_not_shown(receiver):
    receiver.behave(lambda request: Answer(401, body=(
        request.header("authorization") + " " + request.header("authorization").split()[1] + " s3cret-key!").encode()))
    with open_sink(receiver, secret="s3cret-key!", **{"headers.Authorization": "Bearer t0ken-t0ken"}) as sink:
        outcome, = sink.send(event(1))
    assert outcome.reason == "HTTP 401: *** *** ***"


# -- time --

def test_a_hanging_request_ends_in_time(receiver):
    receiver.behave(Hang)
    start = time.monotonic()
    with open_sink(receiver, timeout=300) as sink:
        outcome, = sink.send(event(1))
    assert 0.29 <= time.monotonic() - start < 3
    assert outcome.status == UNREACHABLE and "timed out" in outcome.reason.lower()


def test_one_hanging_request_holds_up_no_other(receiver):
    receiver.behave(lambda request: Hang if request.json()["number"] == 0 else 204)
    with open_sink(receiver, timeout=5000, max_in_flight=2) as sink:
        slow = event(0)
        assert sink.submit(slow)
        start = time.monotonic()
        assert all(o.status == DELIVERED for o in sink.send(*(event(i) for i in range(1, 50))))
        assert time.monotonic() - start < 4


def test_closing_waits_for_nothing(receiver):
    receiver.behave(Hang)
    sink = open_sink(receiver)
    kept = [event(i) for i in range(10)]
    assert all(sink.submit(e) for e in kept)
    sink.collect()
    start = time.monotonic()
    sink.close()
    assert time.monotonic() - start < 0.5


def test_a_connection_that_was_closed_meanwhile(receiver):
    with open_sink(receiver) as sink:
        assert sink.send(event(1))[0].status == DELIVERED
        receiver.stop()
        assert sink.send(event(2))[0].status == UNREACHABLE
        receiver.start()
        assert sink.send(event(2))[0].status == DELIVERED


# -- where connections may go --

@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "LOCALHOST", "127.1", "2130706433", "0x7f.1", "0177.0.0.1",
                                  "[::ffff:127.0.0.1]", "0.0.0.0"])
def test_loopback_is_refused_unless_listed(receiver, host):
    with Sink("http", {"url": f"http://{host}:{receiver.port}/"}, "") as sink:
        outcome, = sink.send(event(1))
    assert outcome.status == UNREACHABLE
    assert "is not allowed; see allowed_addresses, of the server or of the relay" in outcome.reason
    assert receiver.requests == []


@pytest.mark.parametrize("allowed, host", [("127.0.0.1", "127.0.0.1"), ("127.0.0.0/8", "localhost"),
                                           ("localhost", "localhost"), ("LocalHost.", "localhost"),
                                           ("127.0.0.1", "2130706433")])
def test_loopback_is_reached_when_listed(receiver, allowed, host):
    with Sink("http", {"url": f"http://{host}:{receiver.port}/"}, allowed) as sink:
        assert sink.send(event(1))[0].status == DELIVERED


def test_another_name_for_a_listed_host_is_not_listed(receiver):
    with Sink("http", {"url": f"http://127.0.0.1:{receiver.port}/"}, "localhost") as sink:
        assert sink.send(event(1))[0].status == UNREACHABLE


def test_link_local_and_metadata_addresses_are_refused_at_once():
    with Sink("http", {"url": "http://169.254.169.254/latest"}) as sink:
        outcome, = sink.send(event(1), within=2)
    assert outcome.reason == "address 169.254.169.254 is not allowed; see allowed_addresses, of the server or of the relay"


def test_the_environment_names_no_proxy(receiver, monkeypatch):
    for name in ("http_proxy", "https_proxy", "all_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:1/")
    with open_sink(receiver) as sink:
        assert sink.send(event(1))[0].status == DELIVERED


@pytest.mark.parametrize("options, message", [
    ({}, 'option "url" is missing'),
    ({"url": "ftp://example.org/"}, "must begin with http"),
    ({"url": "http://user:pw@example.org/"}, "not a usable URL"),
    ({"url": "http://[::1/"}, "not a usable URL"),
    ({"url": "http://example.org/", "secret": "whsec_???"}, "base64"),
    ({"url": "http://h/", "ca_file": "/x"}, "certificates need a URL that begins with https://"),
    ({"url": "https://h/", "cert_file": "/x"}, "need each other"),
    ({"url": "https://h/", "authorization": "a\r\nX: b"}, "holds a control character"),
    ({"url": "https://h/", "secret": "  "}, "the secret is blank"),
    ({"url": "https://h/", "authorization": "a", "headers.Authorization": "b"}, "are the same"),
])
def test_what_cannot_work_is_an_error_of_open(options, message):
    with pytest.raises(OpenError, match=message):
        Sink("http", options)


def test_a_slip_in_the_allowed_addresses_is_an_error_of_open():
    with pytest.raises(OpenError, match='retrysafe.allowed_addresses: "10.0.0.0/33"'):
        Sink("http", {"url": "http://example.org/"}, "10.0.0.0/33")


def test_a_name_that_does_not_resolve():
    with Sink("http", {"url": "http://no-such-host.invalid/"}) as sink:
        outcome, = sink.send(event(1))
    assert outcome.status == UNREACHABLE and "no-such-host.invalid" in outcome.reason


# -- TLS --

@pytest.fixture(scope="module")
def certificate(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tls")
    subprocess.run(["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes",
                    "-keyout", folder / "key", "-out", folder / "cert", "-days", "2", "-subj", "/CN=localhost",
                    "-addext", "subjectAltName=DNS:localhost"], check=True, capture_output=True)
    return str(folder / "cert"), str(folder / "key")


def test_tls(certificate):
    with Receiver(tls=certificate) as receiver:
        url = f"https://localhost:{receiver.port}/"
        with Sink("http", {"url": url, "ca_file": certificate[0]}) as sink:
            assert all(o.status == DELIVERED for o in sink.send(*(event(i) for i in range(10))))
        with Sink("http", {"url": url}) as sink:
            outcome, = sink.send(event(1))
            assert outcome.status == UNREACHABLE and "certificate" in outcome.reason
        with Sink("http", {"url": f"https://127.0.0.1:{receiver.port}/", "ca_file": certificate[0]}) as sink:
            outcome, = sink.send(event(1))
            assert outcome.status == UNREACHABLE and "127.0.0.1" in outcome.reason, "the name is checked as well"


def test_a_certificate_of_our_own(certificate, tmp_path):
    cert, key = certificate
    subprocess.run(["openssl", "pkey", "-in", key, "-aes256", "-passout", "pass:hunter2", "-out", tmp_path / "key"], check=True)
    with Receiver(tls=certificate, client_ca=cert) as receiver:
        options = {"url": f"https://localhost:{receiver.port}/", "ca_file": cert}
        with Sink("http", options | {"cert_file": cert, "key_file": key}) as sink:
            assert sink.send(event(1))[0].status == DELIVERED
        with Sink("http", options | {"cert_file": cert, "key_file": tmp_path / "key", "key_password": "hunter2"}) as sink:
            assert sink.send(event(1))[0].status == DELIVERED
        for wrong in {}, {"cert_file": cert, "key_file": tmp_path / "key", "key_password": "hunter3"}:
            with Sink("http", options | wrong) as sink:
                outcome, = sink.send(event(1))
                assert outcome.status == UNREACHABLE and outcome.reason and "hunter" not in outcome.reason


def test_authorization(receiver):
    with open_sink(receiver, authorization="Bearer s3cret-token") as sink:
        assert sink.send(event(1))[0].status == DELIVERED
        receiver.behave(lambda request: Answer(401, body=b"who is s3cret-token?"))
        outcome, = sink.send(event(2))
    assert [request.header("authorization") for request in receiver.requests] == ["Bearer s3cret-token"] * 2
    assert outcome.status == FAILED_FINAL and "who is ***?" in outcome.reason


@pytest.mark.skipif(not shutil.which("nghttpd"), reason="needs nghttpd, of the package nghttp2-server")
def test_http2_shares_a_connection(certificate, tmp_path):
    (tmp_path / "hook").write_text("ok")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    server = subprocess.Popen(["nghttpd", "-a", "127.0.0.1", "-d", tmp_path, str(port), certificate[1], certificate[0]],
                              stdout=subprocess.DEVNULL)
    try:
        options = {"url": f"https://localhost:{port}/hook", "ca_file": certificate[0], "max_in_flight": 32}
        with Sink("http", options) as sink:
            deadline = time.monotonic() + 10
            while sink.send(event(0))[0].status != DELIVERED:
                assert time.monotonic() < deadline, "nghttpd does not answer"
            one_connection = len(os.listdir("/proc/self/fd"))
            assert all(o.status == DELIVERED for o in sink.send(*(event(i) for i in range(300))))
            assert len(os.listdir("/proc/self/fd")) == one_connection
        # It speaks nothing else, so this shows that the option is heard.
        with Sink("http", options | {"http2": False}) as sink:
            assert sink.send(event(1))[0].status == UNREACHABLE
    finally:
        server.kill()
        server.wait()


# -- nothing grows --

def test_descriptors_and_memory_stay(receiver):
    numbers = itertools.count()
    with open_sink(receiver, max_in_flight=16) as sink:
        sink.send(*(event(next(numbers)) for _ in range(300)))
        receiver.clear()
        descriptors, before = len(os.listdir("/proc/self/fd")), memory()
        for _ in range(10):
            sink.send(*(event(next(numbers)) for _ in range(300)))
            receiver.clear()
        assert len(os.listdir("/proc/self/fd")) <= descriptors + 2
        assert memory() - before < 8 * 1024 * 1024
