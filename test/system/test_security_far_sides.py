"""A far side that means harm fills no memory, stops no worker and crashes none, whatever kind it is of."""
import json
import os
import ssl
import struct
import subprocess
import time

import pytest

from conftest import eventually
from hostile import MEGABYTE, Hostile, healthy_neighbour, worker_pid
from relay_process import Relay
from resident import memory
from strikes import alive
from tls_records import HANDSHAKE, NEW_SESSION_TICKET, Tls

# -- http --

OK = b"HTTP/1.1 200 OK\r\n"


def http(line):
    line.read_until(rb"\r\n\r\n")


def header_without_end(line):
    http(line)
    line.send(OK + b"x: ")
    line.flood(b"a")


def headers_without_end(line):
    http(line)
    line.send(OK)
    line.flood(b"x-long-name-of-a-header: some value of it\r\n")


def interim_answers_without_end(line):
    http(line)
    line.flood(b"HTTP/1.1 103 Early Hints\r\nlink: </style.css>; rel=preload\r\n\r\n")


def body_without_end(line):
    http(line)
    line.send(b"HTTP/1.1 500 No\r\n\r\n")
    line.flood(b"a")


def chunks_without_end(line):
    http(line)
    line.send(b"HTTP/1.1 500 No\r\ntransfer-encoding: chunked\r\n\r\n")
    line.flood(b"1\r\na\r\n")


def chunk_extension_without_end(line):
    http(line)
    line.send(b"HTTP/1.1 500 No\r\ntransfer-encoding: chunked\r\n\r\n1;")
    line.flood(b"x=y;")


def trailers_without_end(line):
    http(line)
    line.send(b"HTTP/1.1 500 No\r\ntransfer-encoding: chunked\r\n\r\n1\r\na\r\n0\r\n")
    line.flood(b"x-trailer: some value of it\r\n")


# -- postgres --

def message(kind, body=b""):
    return kind + struct.pack("!I", len(body) + 4) + body


def announced(kind, size=0x3FFFFFFF):
    return kind + struct.pack("!I", size)


READY = message(b"Z", b"I")


def startup(line):
    request = line.read()
    if request[4:8] == b"\x04\xd2\x16\x2f":  # TLS is asked for
        line.send(b"N")
        request = line.read()


def login(line):
    startup(line)
    line.send(message(b"R", struct.pack("!I", 3)))  # a password in the clear
    line.read_until(rb"p....[^\0]+\0")
    parameters = b"".join(message(b"S", name + b"\0" + value + b"\0") for name, value in [
        (b"server_version", b"15.1"), (b"client_encoding", b"UTF8"), (b"default_transaction_read_only", b"off"),
        (b"in_hot_standby", b"off"), (b"standard_conforming_strings", b"on")])
    line.send(message(b"R", struct.pack("!I", 0)) + parameters + READY)


def long_error_at_login(line):
    startup(line)
    line.send(announced(b"E") + b"SFATAL\0M")
    line.flood(b"x")


def notices_at_login(line):
    startup(line)
    line.flood(message(b"N", b"SNOTICE\0C00000\0Mhello\0\0"))


def hashing_without_end(line):
    """The password is to be hashed two billion times, which takes more than ten minutes."""
    startup(line)
    line.send(message(b"R", struct.pack("!I", 10) + b"SCRAM-SHA-256\0\0"))
    nonce = line.read_until(rb"r=([^,]+)")[1]
    line.send(message(b"R", struct.pack("!I", 11) + b"r=%bx,s=c2FsdA==,i=2000000000" % nonce))
    line.read()


def parameters_without_end(line):
    login(line)
    n = 0
    while True:
        line.send(b"".join(message(b"S", b"name%d\0" % (n := n + 1) + b"v" * 200 + b"\0") for _ in range(1000)))


def long_row(line):
    login(line)
    line.read()
    line.send(announced(b"D"))
    line.flood(b"x", pause=0.001)  # as a network would: libpq reads for as long as more is there


def rows_without_end(line):
    login(line)
    line.read()
    line.send(message(b"T", struct.pack("!H", 1) + b"x\0" + struct.pack("!IHIhih", 0, 0, 25, -1, -1, 0)))
    line.flood(message(b"D", struct.pack("!HI", 1, 100) + b"x" * 100))


def notices_after_login(line):
    login(line)
    line.read()
    line.flood(message(b"N", b"SNOTICE\0C00000\0Mhello\0\0"))


def notifications_without_end(line):
    login(line)
    line.read()
    line.flood(message(b"A", struct.pack("!I", 1) + b"channel\0payload of it\0"))


def columns(count):
    return message(b"T", struct.pack("!H", count) + b"".join(b"x\0" + struct.pack("!IHIhih", 0, 0, 25, -1, -1, 0)
                                                             for _ in range(count)))


def rows(*values):
    return b"".join(message(b"D", struct.pack("!H", len(row)) + b"".join(
        struct.pack("!i", -1) if text is None else struct.pack("!I", len(text)) + text for text in row)) for row in values)


def inspected(line, answer):
    login(line)
    line.read()
    line.send(message(b"C", b"SET\0") * 3 + columns(1) + message(b"C", b"SELECT 0\0") + READY)
    line.read()
    line.send(message(b"1") + message(b"2") + answer + message(b"C", b"SELECT 1\0") + READY)
    while True:
        line.read()


def no_row(line):
    inspected(line, columns(5))


def too_few_columns(line):
    inspected(line, columns(1) + rows((b"public.t",)))


def two_rows(line):
    inspected(line, columns(5) + rows((None,) * 5, (None,) * 5))


def nulls(line):
    inspected(line, columns(5) + rows((None,) * 5))


def no_columns(line):
    inspected(line, columns(0) + rows(()))


def names_that_are_statements(line):
    inspected(line, columns(5) + rows((b"t; DROP TABLE t", b"event_id,a) VALUES (1); --", b"t", None, None)))


def copy_in(line):
    login(line)
    line.read()
    line.send(message(b"G", b"\0\0\0"))
    line.read_until(b"never")


def copy_out(line):
    login(line)
    line.read()
    line.send(message(b"H", b"\0\0\0"))
    line.flood(message(b"d", b"x" * 100))


def copy_both(line):
    login(line)
    line.read()
    line.send(message(b"C", b"SET\0") * 3)
    line.flood(message(b"W", b"\0\0\0"))


def empty_queries(line):
    login(line)
    line.read()
    line.flood(message(b"I"))


def delivering(line, answer):
    """To a transaction with events, once everything was there that is asked for first."""
    login(line)
    line.read()
    line.send(message(b"C", b"SET\0") * 3 + columns(1) + message(b"C", b"SELECT 0\0") + READY)
    line.read()
    line.send(message(b"1") + message(b"2") + columns(5) + rows((b"public.t", b"event_id", b"t", None, None))
              + message(b"C", b"SELECT 1\0") + READY)
    line.read()
    line.send(message(b"1") + READY)
    line.read()
    line.send(answer)
    line.read_until(b"never")


def copy_in_of_events(line):
    delivering(line, message(b"1") + message(b"2") + message(b"G", b"\0\0\0"))


def copy_out_of_events(line):
    delivering(line, message(b"1") + message(b"2") + message(b"H", b"\0\0\0"))


def copy_both_of_events(line):
    delivering(line, message(b"1") + message(b"2") + message(b"W", b"\0\0\0"))


# -- redis --

def redis_greeting(line):
    line.read()


def long_line(line):
    redis_greeting(line)
    line.send(b"+")
    line.flood(b"a")


def long_string(line):
    redis_greeting(line)
    line.send(b"$2000000000\r\n")
    line.flood(b"a")


def long_list(line):
    redis_greeting(line)
    line.send(b"*2000000000\r\n")
    line.flood(b":1\r\n")


def nested_lists(line):
    redis_greeting(line)
    line.flood(b"*1\r\n")


def answers_nobody_asked_for(line):
    redis_greeting(line)
    line.flood(b"+OK\r\n")


# -- nats --

INFO = b'INFO {"server_id":"x","version":"2.10.0","proto":1,"headers":true,"max_payload":1048576}\r\n'


def connected(line):
    """The subject on which the client hears."""
    line.send(INFO)
    line.read_until(rb"CONNECT \{.*?PING\r\n")
    line.send(b"PONG\r\n")
    return line.read_until(rb"SUB (\S+)\*\s+(\d+)\r\n").groups()


def info_without_end(line):
    line.send(b"INFO {")
    line.flood(b'"a":1,')


def nats_long_message(line):
    inbox, number = connected(line)
    line.send(b"MSG %s1 %s 2000000000\r\n" % (inbox, number))
    line.flood(b"a")


def nats_messages(line):
    inbox, number = connected(line)
    line.flood(b"MSG %s1 %s 100\r\n" % (inbox, number) + b"a" * 100 + b"\r\n")


def pings_without_end(line):
    connected(line)
    line.flood(b"PING\r\n")


def nats_errors(line):
    connected(line)
    line.flood(b"-ERR 'Permissions Violation for Publish to \"x\"'\r\n")


def nats_long_line(line):
    connected(line)
    line.send(b"MSG ")
    line.flood(b"a")


def nats_infos(line):
    connected(line)
    n = 0
    while True:
        n += 1
        urls = ",".join(f'"10.{n % 256}.{i}.1:{n % 60000 + 1}"' for i in range(200))
        line.send(f'INFO {{"server_id":"x","version":"2.10.0","max_payload":1048576,"connect_urls":[{urls}]}}\r\n'.encode())


# -- rabbitmq --

def frame(kind, channel, body):
    return struct.pack("!BHI", kind, channel, len(body)) + body + b"\xce"


START = frame(1, 0, struct.pack("!HHBBI", 10, 10, 0, 9, 0) + struct.pack("!I", 5) + b"PLAIN" + struct.pack("!I", 5) + b"en_US")


def amqp(line):
    line.read()
    line.send(START)
    line.read()


def tuned(line):
    amqp(line)
    line.send(frame(1, 0, struct.pack("!HHHIH", 10, 30, 1, 0, 0)))  # frames of any size, no heartbeat
    line.read()
    line.send(frame(1, 0, struct.pack("!HHB", 10, 41, 0)))
    line.read()


def long_frame(line):
    line.read()
    line.send(struct.pack("!BHI", 1, 0, 0x7FFFFFFF))
    line.flood(b"a")


def long_frame_after_tuning(line):
    tuned(line)
    line.send(struct.pack("!BHI", 1, 1, 0x7FFFFFFF))
    line.flood(b"a")


def heartbeats_without_end(line):
    amqp(line)
    line.flood(frame(8, 0, b""))


def large_start(line):
    line.read()
    table = b"\x01kS" + struct.pack("!I", 100) + b"x" * 100
    line.send(struct.pack("!BHI", 1, 0, 0x7FFFFFFF) + struct.pack("!HHBBI", 10, 10, 0, 9, 0x7FFFFF00))
    line.flood(table)


def channel_frames_without_end(line):
    tuned(line)
    line.send(frame(1, 1, struct.pack("!HHI", 20, 11, 0)))
    line.flood(frame(3, 1, b"x" * 1000))


def greetings_without_end(line):
    line.read()
    line.flood(START)  # and reads none of the answers


def flow_without_end(line):
    tuned(line)
    line.send(frame(1, 1, struct.pack("!HHI", 20, 11, 0)))
    line.read()
    line.send(frame(1, 1, struct.pack("!HH", 85, 11)))
    line.flood(frame(1, 1, struct.pack("!HHB", 20, 20, 1)))


# -- kafka --

def kafka_long_answer(line):
    line.read()
    line.send(struct.pack("!I", 99_000_000))
    line.flood(b"\0")


def kafka_longer_answer(line):
    line.read()
    line.send(struct.pack("!I", 0x7FFFFFFF))
    line.flood(b"\0")


FLOODS = {
    "http": [header_without_end, headers_without_end, interim_answers_without_end, body_without_end, chunks_without_end,
             chunk_extension_without_end, trailers_without_end],
    "postgres": [long_error_at_login, notices_at_login, parameters_without_end, long_row, rows_without_end, notices_after_login,
                 notifications_without_end],
    "redis": [long_line, long_string, long_list, nested_lists, answers_nobody_asked_for],
    "nats": [info_without_end, nats_long_message, nats_messages, pings_without_end, nats_errors, nats_long_line, nats_infos],
    "rabbitmq": [long_frame, long_frame_after_tuning, heartbeats_without_end, large_start, channel_frames_without_end,
                 greetings_without_end, flow_without_end],
    "kafka": [kafka_long_answer, kafka_longer_answer],
}


def options(kind, port):
    return {
        "http": {"url": f"http://127.0.0.1:{port}/"},
        "postgres": {"host": "127.0.0.1", "port": port, "dbname": "d", "user": "u", "password": "p"},
        "redis": {"host": "127.0.0.1", "port": port, "stream": "s"},
        "nats": {"servers": f"127.0.0.1:{port}", "subject": "s"},
        "rabbitmq": {"host": "127.0.0.1", "port": port, "user": "u", "password": "p", "exchange": "e"},
        "kafka": {"brokers": f"127.0.0.1:{port}", "topic": "t"},
    }[kind]


@pytest.mark.slow
@pytest.mark.parametrize("kind, talk", [(kind, talk) for kind, talks in FLOODS.items() for talk in talks],
                         ids=lambda value: getattr(value, "__name__", value))
def test_an_answer_without_end(db, kind, talk):
    """For four seconds of it, as fast as it goes: the worker keeps its memory, and its other destinations go on."""
    with healthy_neighbour(db) as neighbour_works:
        pid = worker_pid(db)
        hostile = Hostile(talk)
        try:
            before, most = memory(pid), 0
            db.sql("SELECT outbox_create_destination('d', %s, %s, backoff => '100 ms', backoff_max => '200 ms',"
                   " event_types => '{t}')", kind, json.dumps(options(kind, hostile.port)))
            db.sql("SELECT outbox_emit(NULL, 'e' || i, 't', '{}') FROM generate_series(1, 3) i")
            eventually(lambda: hostile.connections)
            end = time.monotonic() + 4
            while time.monotonic() < end:
                most = max(most, memory(pid))
                time.sleep(0.02)
            neighbour_works()
            assert worker_pid(db) == pid
            assert most - before < 48 * MEGABYTE, f"{hostile.sent / MEGABYTE} MB were sent"
            assert hostile.connections < 300, "it rests between attempts"
        finally:
            hostile.close()


# -- http over HTTP/2: frames that are no part of an answer, or an empty one --

def frame_of_http2(kind, flags, stream, body=b""):
    return struct.pack("!I", len(body))[1:] + bytes([kind, flags]) + struct.pack("!I", stream) + body


ANSWER_500 = frame_of_http2(1, 4, 1, b"\x8e")
HTTP2_FLOODS = {
    "empty data": (ANSWER_500, frame_of_http2(0, 0, 1)),
    "data": (ANSWER_500, frame_of_http2(0, 0, 1, b"x" * 16000)),
    "interim answers": (b"", frame_of_http2(1, 4, 1, b"\0\x07:status\x03103\0\x04link\x40" + b"x" * 64)),
    "a head that goes on": (frame_of_http2(1, 0, 1, b"\x88"), frame_of_http2(9, 0, 1, b"\0\x04link\x40" + b"x" * 64)),
    "settings": (b"", frame_of_http2(4, 0, 0, struct.pack("!HI", 3, 100))),
    "pings": (b"", frame_of_http2(6, 0, 0, b"x" * 8)),
    "windows": (b"", frame_of_http2(8, 0, 1, struct.pack("!I", 1))),
    "priorities": (b"", frame_of_http2(2, 0, 1, b"\0\0\0\0\x10")),
    "unknown frames": (b"", frame_of_http2(99, 0, 0, b"x" * 16000)),
}


@pytest.fixture
def certificate(secrets):
    """What a server at localhost needs."""
    subprocess.run(["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2",
                    "-keyout", secrets / "key", "-out", secrets / "cert", "-subj", "/CN=localhost",
                    "-addext", "subjectAltName=DNS:localhost"], check=True, capture_output=True)
    os.chmod(secrets / "cert", 0o644)
    return secrets / "cert", secrets / "key"


@pytest.mark.slow
@pytest.mark.parametrize("flood", HTTP2_FLOODS)
def test_http2_frames_without_end(db, certificate, flood):
    """libcurl reads them for as long as they come, in one call, and its own time limit is not looked at."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(*certificate)
    context.set_alpn_protocols(["h2"])
    first, again = HTTP2_FLOODS[flood]
    block = again * (MEGABYTE // len(again))
    most = 0

    def talk(line):
        nonlocal most
        with context.wrap_socket(line.connection, server_side=True) as line.connection:
            line.send(frame_of_http2(4, 0, 0))
            line.read_until(rb"PRI \* HTTP/2.*\x01.\0\0\0\x01")  # the head of the first request
            line.send(frame_of_http2(4, 1, 0) + first)
            for sent in range(2000):  # then silence, so that a worker without a defence is free again in the end
                most = max(most, sent)
                line.send(block)
            line.read_until(b"never")
    hostile = Hostile(talk)
    try:
        with healthy_neighbour(db) as neighbour_works:
            pid = worker_pid(db)
            before = memory(pid)
            db.sql("SELECT outbox_create_destination('d', 'http', %s, backoff => '100 ms', backoff_max => '200 ms',"
                   " event_types => '{t}')", json.dumps({"url": f"https://localhost:{hostile.port}/", "ca_file": "cert"}))
            db.sql("SELECT outbox_emit(NULL, 'e' || i, 't', '{}') FROM generate_series(1, 3) i")
            eventually(lambda: most > 0)
            neighbour_works()
            eventually(lambda: db.value("SELECT failures FROM outbox_status WHERE name = 'd'") > 1)
            assert most < 100, "megabytes on one connection"
            assert memory(pid) - before < 48 * MEGABYTE
            neighbour_works()
            assert worker_pid(db) == pid
    finally:
        hostile.close()


# -- TLS: messages of the handshake once it is over, which OpenSSL reads through without a pause --

TICKETS = {
    "http/1.1": ("http", {"http2": False}),
    "http/2": ("http", {"max_in_flight": 1024}),
    "kafka": ("kafka", {"tls": True, "timeout": "1s"}),
    "nats": ("nats", {"tls": True}),
    "postgres": ("postgres", {"sslmode": "verify-full"}),
    "rabbitmq": ("rabbitmq", {"tls": True}),
    "redis": ("redis", {"tls": True}),
}


@pytest.mark.slow
@pytest.mark.parametrize("which", TICKETS)
def test_tickets_without_end(db, certificate, tmp_path, which):
    kind, more = TICKETS[which]

    def talk(line):
        if kind == "nats":
            line.send(INFO.replace(b"{", b'{"tls_required":true,'))
        elif kind == "postgres":
            line.read()
            line.send(b"S")
        line.connection = tls = Tls(line.connection, *certificate, tmp_path / f"keys-{hostile.connections}")
        if kind == "postgres":
            login(line)
            line.read()
        many = NEW_SESSION_TICKET * (16000 // len(NEW_SESSION_TICKET))
        for record in tls.records(HANDSHAKE, many):
            tls.raw.sendall(record)
            hostile.sent += len(record)
    hostile = Hostile(talk)
    try:
        with healthy_neighbour(db) as neighbour_works:
            pid = worker_pid(db)
            where = {name: "localhost".join(value.split("127.0.0.1")).replace("http:", "https:") if isinstance(value, str) else value
                     for name, value in options(kind, hostile.port).items()}
            db.sql("SELECT outbox_create_destination('d', %s, %s, backoff => '100 ms', backoff_max => '200 ms',"
                   " event_types => '{t}')", kind, json.dumps(where | more | {"ca_file": "cert", "connect_timeout": "1s"}))
            db.sql("SELECT outbox_emit(NULL, 'e' || i, 't', '{}') FROM generate_series(1, 3) i")
            eventually(lambda: hostile.sent > MEGABYTE)
            neighbour_works()
            eventually(lambda: db.value("SELECT failures FROM outbox_status WHERE name = 'd'") > 1)
            neighbour_works()
            assert worker_pid(db) == pid
    finally:
        hostile.close()


def test_a_password_that_takes_hours_to_hash(server, db):
    """Nobody can interrupt the library, so it is left alone, a few times at most: the others go on, and the worker ends when
    it is told to."""
    with healthy_neighbour(db) as neighbour_works:
        pid = worker_pid(db)
        hostile = Hostile(hashing_without_end)
        try:
            db.sql("SELECT outbox_create_destination('d', 'postgres', %s, backoff => '100 ms', backoff_max => '200 ms',"
                   " event_types => '{t}')", json.dumps(options("postgres", hostile.port) | {"connect_timeout": "100ms"}))
            db.sql("SELECT outbox_emit(NULL, 'e', 't', '{}')")
            eventually(lambda: db.value("SELECT last_error LIKE 'earlier attempts%' FROM outbox_status WHERE name = 'd'"))
            neighbour_works()
            assert worker_pid(db) == pid and hostile.connections < 10
            db.sql("SELECT pg_terminate_backend(%s)", pid)
            eventually(lambda: not alive(pid), timeout=10, message="the worker does not end")
        finally:
            hostile.close()


def test_a_relay_whose_passwords_take_hours_to_hash(db):
    """It leaves four attempts alone and begins no fifth, and ends while they still run."""
    hostile = Hostile(hashing_without_end)
    try:
        hosts = ",".join(["127.0.0.1"] * 5)
        where = f"host={hosts} port={hostile.port} dbname=d user=u password=p connect_timeout=1"
        with Relay(db, "--drain", "d", config=f"connection = {where}\n") as relay:
            assert relay.wait() == 3, relay.log()
            line, = relay.lines("no connection to the database")
            assert line["reason"] == "earlier attempts to connect have not come to an end"
            assert hostile.connections == 4
    finally:
        hostile.close()


def test_a_relay_whose_database_begins_a_copy(db):
    """The library would say so for as long as it is asked."""
    hostile = Hostile(copy_in)
    try:
        with Relay(db, "--drain", "d", config=f"connection = host=127.0.0.1 port={hostile.port} dbname=d user=u password=p\n") as relay:
            assert relay.wait() == 3, relay.log()
            assert relay.lines("no connection to the database")[0]["reason"] == "the server answered with PGRES_COPY_IN"
    finally:
        hostile.close()


def test_a_long_error_is_no_flood(server, db):
    """What a function over there raises can be as long as it likes: it is the fault of one event."""
    db.sql("CREATE TABLE public.retrysafe_inbox (event_id uuid PRIMARY KEY);"
           "CREATE FUNCTION public.take(event jsonb) RETURNS void LANGUAGE plpgsql AS $$ BEGIN"
           " IF event->>'key' = 'long' THEN RAISE '%', repeat('x', 3000000); END IF; END $$")
    db.sql("SELECT outbox_create_destination('d', 'postgres', %s, max_attempts => 1)", json.dumps(
        {"host": "127.0.0.1", "port": server.port, "dbname": db.name, "user": "postgres", "function": "public.take"}))
    for key in ("first", "long", "last"):
        db.sql("SELECT outbox_emit(NULL, %s, 't', '{}')", key)
    eventually(lambda: db.sql("SELECT delivered, dead, failures FROM outbox_status") == [(2, 1, 0)])
    assert "xxxx" in db.value("SELECT reason FROM outbox_dead_letters")


@pytest.mark.parametrize("talk", [no_row, too_few_columns, two_rows, nulls, no_columns, names_that_are_statements, copy_in, copy_out,
                                  copy_both, empty_queries, copy_in_of_events, copy_out_of_events, copy_both_of_events],
                         ids=lambda talk: talk.__name__)
def test_an_answer_of_another_shape(server, db, talk):
    """To what a destination of kind postgres asks first, or to its events. It fails like any other server that is of no use."""
    with healthy_neighbour(db) as neighbour_works:
        pid = worker_pid(db)
        hostile = Hostile(talk)
        try:
            before = len(server.log())
            db.sql("SELECT outbox_create_destination('d', 'postgres', %s, backoff => '100 ms', event_types => '{t}')",
                   json.dumps(options("postgres", hostile.port) | {"connect_timeout": "1s", "statement_timeout": "1s"}))
            db.sql("SELECT outbox_emit(NULL, 'e', 't', '{}')")
            eventually(lambda: db.value("SELECT last_error FROM outbox_status WHERE name = 'd'"))
            assert "exception" not in server.log()[before:] and "basic_string" not in server.log()[before:]
            neighbour_works()
            assert worker_pid(db) == pid
        finally:
            hostile.close()
