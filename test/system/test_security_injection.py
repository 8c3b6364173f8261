"""Who writes events chooses texts, and not how a request or a message is framed: what a far side gets is taken apart strictly
here, byte by byte."""
import json
import re
import time
import zlib

import psycopg2
import pytest

from conftest import eventually, run
from hostile import MEGABYTE, Hostile, healthy_neighbour, worker_pid
from resident import memory

EVIL = ["a\r\nx-injected: 1", "a\r\n\r\nPOST /injected HTTP/1.1\r\nhost: x\r\n\r\n", "a\nb", "a\rb", "\r\n", " ", "\t", "a b", "é", "\u0085x",
        "a\u2028x-injected: 1", "%0d%0ax-injected: 1", "\x01\x7f", "a\x0bb\x0cc", "\"quoted\", \\", "\r\n x-injected: folded", ":", "=?x?=",
        "a\r\nPUB injected 0\r\n\r\n", "a\r\n*1\r\n$8\r\nFLUSHALL\r\n", "> *", "\U0001F4A5", "a" * 250]


class Capture(Hostile):
    """Keeps each byte that came, and answers as `talk` does."""

    def __init__(self, talk):
        self.received = b""
        super().__init__(lambda line: talk(self, line))

    def read(self, line):
        data = line.read()
        self.received += data
        return data


def emit_evil(db, **fixed):
    """Each text in each place that takes it. How many events there are."""
    session = db.connect()
    count = 0
    for place in ("event_key", "ordering_key", "scope", "type", "header", "payload"):
        for i, text in enumerate(EVIL):
            event = {"event_key": f"{place}-{i}", "ordering_key": None, "scope": "", "type": "t", "header": None, "payload": {}}
            event[place] = text if place != "event_key" else f"{i}{text}"[:250]
            event |= fixed
            try:
                run(session, "SELECT outbox_emit(NULL, %s, %s, %s, %s, %s, scope => %s)", event["event_key"], event["type"],
                    json.dumps(event["payload"]), event["ordering_key"],
                    json.dumps({"x-Note": event["header"]}) if event["header"] is not None else None, event["scope"])
                count += 1
            except psycopg2.Error as error:
                # Control characters do not get into a type or a header at all.
                assert (place, error.pgcode) in (("type", "RS104"), ("header", "RS105")), (place, text, error)
                assert re.search(r"[\x00-\x1f\x7f]", text), (place, text)
    return count


def settled(db, count, name="d"):
    eventually(lambda: db.value("SELECT delivered + dead FROM outbox_status WHERE name = %s", name) == count, timeout=40)


# -- http --

def http_server(capture, line):
    """One request after the other, each ended by its Content-Length and by nothing else."""
    text = b""
    while True:
        while b"\r\n\r\n" not in text:
            text += capture.read(line)
        head, _, text = text.partition(b"\r\n\r\n")
        length = int(re.search(rb"\r\nContent-Length: (\d+)", head).group(1))
        while len(text) < length:
            text += capture.read(line)
        capture.heads.append(head)
        text = text[length:]
        line.send(b"HTTP/1.1 204 No\r\n\r\n")


@pytest.mark.parametrize("mode", ["binary", "structured"])
def test_http(db, mode):
    capture = Capture(http_server)
    capture.heads = []
    try:
        db.sql("SELECT outbox_create_destination('d', 'http', %s)", json.dumps(
            {"url": f"http://127.0.0.1:{capture.port}/", "mode": mode, "secret": "s" * 20, "headers": {"X-Fixed": "yes"}}))
        count = emit_evil(db)
        # Names of headers that mean something to HTTP, given as headers of an event.
        for i, name in enumerate(("Content-Length", "Transfer-Encoding", "Host", "Connection", "Content-Type", "Authorization", "webhook-id",
                                  "webhook-signature", "ce-id", "X-Fixed", "Expect", "id", "source", "specversion", "datacontenttype")):
            db.sql("SELECT outbox_emit(NULL, %s, 't', '{}', headers => %s)", f"name-{i}", json.dumps({name: "injected"}))
            count += 1
        settled(db, count)
        assert db.value("SELECT dead FROM outbox_status") == 0 and len(capture.heads) == count
        for head in capture.heads:
            request, *lines = head.split(b"\r\n")
            assert request == b"POST / HTTP/1.1"
            names = []
            for line in lines:
                assert re.fullmatch(rb"[A-Za-z0-9-]+: ?[\x20-\x7e]*", line), line
                names.append(line.partition(b":")[0].lower())
            assert len(names) == len(set(names)), head
            fixed = {b"host", b"user-agent", b"accept", b"content-type", b"content-length", b"x-fixed", b"webhook-id",
                     b"webhook-timestamp", b"webhook-signature"}
            others = set(names) - fixed
            assert fixed - {b"accept"} <= set(names)
            assert all(name.startswith(b"ce-") for name in others) and (mode == "binary" or not others), others
            for name, value in (line.split(b":", 1) for line in lines):
                if name.lower() in fixed:
                    assert b"injected" not in value, head
    finally:
        capture.close()


@pytest.mark.parametrize("headers", [{"x\r\ny": "1"}, {"x: y\r\nz": "1"}, {"x": "1\r\ny: 2"}, {"x": "1\ny: 2"}, {"x y": "1"}, {"": "1"},
                                     {"x:": "1"}, {"é": "1"}, {"x": "\x00"}, {"x": "\x7f"}, {"x": ["1"]}, {"x": {"y": 1}}, {"x": None}])
def test_headers_of_a_destination_are_lines_of_their_own(db, headers):
    with pytest.raises(psycopg2.Error) as error:
        db.sql("SELECT outbox_create_destination('d', 'http', %s)", json.dumps({"url": "http://127.0.0.1:1/", "headers": headers}))
    assert error.value.pgcode in ("RS203", "22P05")


@pytest.mark.parametrize("name", ["Content-Length", "Transfer-Encoding", "connection", "TE", "Trailer", "Upgrade", "Expect", "content-type",
                                  "ce-id", "CE-Type", "Webhook-Signature"])
def test_headers_of_a_destination_do_not_frame_requests(db, name):
    db.sql("SELECT outbox_create_destination('d', 'http', %s)", json.dumps({"url": "http://127.0.0.1:1/", "headers": {name: "chunked"}}))
    db.sql("SELECT outbox_emit(NULL, 'e', 't', '{}')")
    eventually(lambda: f'header "{name}" cannot be set' in (db.value("SELECT last_error FROM outbox_status") or ""))


def test_no_option_of_any_kind_takes_a_control_character(db):
    """Whatever a sink makes of an option: a header, a line of a protocol, a name."""
    examples = {"url": "https://example.com", "integer": 1, "boolean": True, "duration": "1s"}
    options = db.sql("SELECT kind, option, type, required FROM outbox_kind_options WHERE type IS NOT NULL")
    required = {kind: {o: examples.get(t, "x") for k, o, t, needed in options if k == kind and needed} for kind, *_ in options}
    texts = [o for o in options if o[2] in ("string", "url", "secret", "file", "template", "headers", "enum")]
    assert {kind for kind, *_ in texts} >= {"http", "kafka", "nats", "rabbitmq", "redis", "postgres", "function"}
    for kind, option, type_name, _ in texts:
        for text in ("https://example.com/\r\nx: y", "a\nb", "a\rb", "\x01", "a\x7f", "\t"):
            value = {"x": text} if type_name == "headers" else text
            with pytest.raises(psycopg2.Error) as error:
                db.sql("SELECT outbox_create_destination('d', %s, %s)", kind, json.dumps(required[kind] | {option: value}))
            assert error.value.pgcode == "RS203" and "\n" not in error.value.diag.message_primary, (kind, option, text)


# -- nats --

def nats_server(capture, line):
    line.send(b'INFO {"server_id":"x","version":"2.10.0","proto":1,"headers":true,"max_payload":1048576}\r\n')
    text, sid, number = b"", None, 0
    while True:
        while b"\r\n" not in text:
            text += capture.read(line)
        command, _, text = text.partition(b"\r\n")
        word, *words = command.split(b" ")
        if word == b"PING":
            line.send(b"PONG\r\n")
        elif word == b"SUB":
            sid = words[-1]
        elif word in (b"PUB", b"HPUB"):
            size = int(words[-1]) + 2
            while len(text) < size:
                text += capture.read(line)
            message, text = text[:size], text[size:]
            capture.messages.append((words[0], message))
            assert message.endswith(b"\r\n")
            number += 1
            answer = b'{"stream":"S","seq":%d}' % number
            line.send(b"MSG %s %s %d\r\n%s\r\n" % (words[1], sid, len(answer), answer))
        elif word not in (b"CONNECT", b"PONG", b"UNSUB"):
            capture.strange.append(command)


@pytest.mark.parametrize("mode, subject", [("binary", "events.{type}"), ("structured", "events"), ("binary", "s.{ordering_key}"), ("binary", "s.{header:x-note}")])
def test_nats(db, mode, subject):
    capture = Capture(nats_server)
    capture.messages, capture.strange = [], []
    try:
        db.sql("SELECT outbox_create_destination('d', 'nats', %s, max_attempts => 1)", json.dumps(
            {"servers": f"127.0.0.1:{capture.port}", "subject": subject, "mode": mode, "user": 'u", "pass": "x', "password": 'p"} PUB x 0'}))
        settled(db, emit_evil(db))
        assert capture.strange == [] and capture.messages
        for name, message in capture.messages:
            assert re.fullmatch(rb"[^\s*>\x7f]+", name) and not name.startswith((b"$", b"_INBOX"))
            head, _, _ = message.partition(b"\r\n\r\n")
            version, *lines = head.split(b"\r\n")
            assert version == b"NATS/1.0"
            for line in lines:
                assert re.fullmatch(rb"[A-Za-z0-9-]+: ?[\x20-\x7e]*", line), line
            names = [line.partition(b":")[0].lower() for line in lines]
            assert len(names) == len(set(names)) and b"x-injected" not in names
    finally:
        capture.close()


# -- redis --

def redis_server(capture, line):
    text = b""

    def take(size):
        nonlocal text
        while len(text) < size:
            text += capture.read(line)
        taken, text = text[:size], text[size:]
        return taken

    def number(mark):
        nonlocal text
        while b"\r\n" not in text:
            text += capture.read(line)
        digits, _, text = text.partition(b"\r\n")
        if digits[:1] != mark:
            capture.strange.append(digits)
            raise OSError("not a command")
        return int(digits[1:])

    while True:
        words = []
        for _ in range(number(b"*")):
            words.append(take(number(b"$")))
            if take(2) != b"\r\n":
                capture.strange.append(words)
                raise OSError("not a command")
        capture.commands.append(words)
        line.send(b"$3\r\n1-1\r\n" if words[0] == b"XADD" else b"+OK\r\n")


@pytest.mark.parametrize("stream", ["s", "{ordering_key}", "s-{header:x-note}-{type}"])
def test_redis(db, stream):
    capture = Capture(redis_server)
    capture.commands, capture.strange = [], []
    try:
        db.sql("SELECT outbox_create_destination('d', 'redis', %s, max_attempts => 1)", json.dumps(
            {"host": "127.0.0.1", "port": capture.port, "stream": stream, "user": "u *1", "password": "p $8 FLUSHALL", "database": 3}))
        settled(db, emit_evil(db))
        assert capture.strange == []
        assert {words[0] for words in capture.commands} == {b"AUTH", b"SELECT", b"XADD"}
        for words in capture.commands:
            if words[0] == b"XADD":
                assert words[2] == b"*" and len(words) % 2 == 1
                assert [words[i] for i in (3, 5, 7)] == [b"specversion", b"id", b"source"]
    finally:
        capture.close()


# -- postgres and function: the event is data, never a statement --

@pytest.mark.parametrize("kind", ["postgres", "function"])
def test_postgres_and_function(server, db, kind):
    db.sql("CREATE TABLE public.retrysafe_inbox (event_id uuid PRIMARY KEY, event_type text, event_key text, scope text, ordering_key text,"
           " payload jsonb, headers jsonb); CREATE TABLE public.got (event jsonb);"
           "CREATE FUNCTION public.take(event jsonb) RETURNS void LANGUAGE sql AS $$ INSERT INTO public.got VALUES (event) $$")
    db.sql("SELECT outbox_create_destination('d', %s, %s, max_attempts => 1)", kind, json.dumps(
        {"function": "public.take"} | ({"host": "127.0.0.1", "port": server.port, "dbname": db.name, "user": "postgres"}
                                       if kind == "postgres" else {})))
    count = emit_evil(db)
    for i, text in enumerate(("'); DROP TABLE public.got; --", "$1", "\\'; --", "$$; DROP TABLE public.got; $$", "{\"a\":1}", "\\x41", "\\N")):
        db.sql("SELECT outbox_emit(NULL, %s, %s, to_jsonb(%s::text), %s, jsonb_build_object('a', %s), scope => %s)", f"sql-{i}", text, text, text, text,
               text)
        count += 1
    settled(db, count)
    assert db.value("SELECT dead FROM outbox_status") == 0
    assert db.sql("""SELECT count(*), count(*) FILTER (WHERE (g.event->>'key', g.event->>'type', g.event->>'scope', g.event->'payload') =
                       (e.event_key, e.event_type, e.scope, e.payload) AND g.event->>'ordering_key' IS NOT DISTINCT FROM e.ordering_key)
                       FROM public.got g JOIN outbox_events e ON e.event_id::text = g.event->>'id'""") == [(count, count)]


@pytest.mark.parametrize("option, value", [
    ("inbox_table", "public.retrysafe_inbox; DROP TABLE public.got"), ("inbox_table", "(SELECT 1)"), ("inbox_table", "pg_catalog.pg_class"),
    ("function", "public.take(jsonb); DROP TABLE public.got"), ("function", "pg_catalog.pg_terminate_backend"),
    ("function", "public.take(jsonb) AS x, pg_sleep(100)"), ("inbox_function", "true OR public.take")])
def test_names_of_the_far_side_are_names(server, db, option, value):
    db.sql("CREATE TABLE public.got (event jsonb);"
           "CREATE FUNCTION public.take(event jsonb) RETURNS void LANGUAGE sql AS $$ INSERT INTO public.got VALUES (event) $$")
    options = {"host": "127.0.0.1", "port": server.port, "dbname": db.name, "user": "postgres", "function": "public.take", option: value}
    db.sql("SELECT outbox_create_destination('d', 'postgres', %s)", json.dumps(options))
    db.sql("SELECT outbox_emit(NULL, 'e', 't', '{}')")
    eventually(lambda: db.value("SELECT failures FROM outbox_status") > 0)
    assert db.sql("SELECT * FROM public.got") == []


# -- what the far side says is shown as text --

def test_an_answer_writes_no_line_of_its_own_into_the_log(server, db):
    """Line breaks and escape sequences of a far side, in the log and in the views."""
    lies = b"no\r\n2026-01-01 00:00:00 UTC [1] FATAL:  the disk is on fire\r\n\x1b[2J\x1b[31m\xe2\x80\xae\x9b\x00end"

    def talk(line):
        line.read_until(rb"\r\n\r\n")
        line.send(b"HTTP/1.1 503 No\r\ncontent-length: %d\r\n\r\n%s" % (len(lies), lies))
    hostile = Hostile(talk)
    try:
        before = len(server.log())
        db.sql("SELECT outbox_create_destination('d', 'http', %s)", json.dumps({"url": f"http://127.0.0.1:{hostile.port}/"}))
        db.sql("SELECT outbox_emit(NULL, 'e', 't', '{}')")
        shown = eventually(lambda: db.value("SELECT last_error FROM outbox_status"))
        eventually(lambda: "on fire" in server.log()[before:])
        assert not any(line.startswith("2026-01-01") for line in server.log()[before:].splitlines())
        for text in (shown, server.log()[before:]):
            assert not re.search("[\x00-\x09\x0b-\x1f\x7f-\x9f\u202e]", text)
        assert "\n" not in shown
    finally:
        hostile.close()


def test_a_publisher_writes_no_line_of_its_own_into_the_log(server, db):
    """Reasons that come through the pull API."""
    db.sql("SELECT outbox_create_destination('d', 'pull', start_at => 'earliest')")
    db.sql("SELECT outbox_emit(NULL, 'e' || i, 't', '{}') FROM generate_series(1, 3) i")
    lie = "no\r\n2026-01-01 00:00:00 UTC [1] FATAL:  the disk is on fire\r\n\x1b[2J"
    before = len(server.log())
    batch, event = db.sql("SELECT batch, event_id FROM outbox_fetch('d')")[0]
    session = db.connect()
    run(session, "SET log_statement = 'none'")
    run(session, "SELECT outbox_nack(%s, %s, %s, dead => true)", batch, event, lie)
    run(session, "SELECT outbox_record(%s, NULL, %s)", batch, lie)
    assert not any(line.startswith("2026-01-01") for line in server.log()[before:].splitlines())


# -- slow and compressed answers --

SLOW = {"http": {"url": "http://127.0.0.1:{port}/", "timeout": "500ms"},
        "postgres": {"host": "127.0.0.1", "port": "{port}", "dbname": "d", "user": "u", "password": "p", "connect_timeout": "500ms"},
        "redis": {"host": "127.0.0.1", "port": "{port}", "stream": "s", "connect_timeout": "500ms", "timeout": "500ms"},
        "nats": {"servers": "127.0.0.1:{port}", "subject": "s", "connect_timeout": "500ms", "timeout": "500ms"},
        "rabbitmq": {"host": "127.0.0.1", "port": "{port}", "user": "u", "password": "p", "connect_timeout": "500ms"},
        "kafka": {"brokers": "127.0.0.1:{port}", "topic": "t", "timeout": "1s"}}
BEGINNING = {"http": b"HTTP/1.1 200 OK\r\nx: " + b"y" * 1000, "postgres": b"R\x00\x00\x00\x08\x00\x00\x00\x03" + b"N" * 100,
             "redis": b"+" + b"x" * 1000, "nats": b"INFO {" + b'"a":1,' * 200, "rabbitmq": b"\x01\x00\x00\x00\x00\x03\xe8" + b"\0" * 1000,
             "kafka": b"\x00\x00\x03\xe8" + b"\0" * 1000}


@pytest.mark.parametrize("kind", SLOW)
def test_an_answer_byte_by_byte_has_the_time_that_an_option_gives(db, kind):
    def talk(line):
        if kind not in ("nats",):
            line.read()
        line.drip(BEGINNING[kind], 0.05)
    hostile = Hostile(talk)
    try:
        with healthy_neighbour(db) as neighbour_works:
            options = {name: value.replace("{port}", str(hostile.port)) for name, value in SLOW[kind].items()}
            if "port" in options:
                options["port"] = hostile.port
            db.sql("SELECT outbox_create_destination('d', %s, %s, backoff => '50 ms', event_types => '{t}')", kind, json.dumps(options))
            db.sql("SELECT outbox_emit(NULL, 'e', 't', '{}')")
            eventually(lambda: db.value("SELECT failures FROM outbox_status WHERE name = 'd'") > 0, timeout=15)
            neighbour_works()
    finally:
        hostile.close()


@pytest.mark.parametrize("coding", [b"content-encoding: gzip", b"transfer-encoding: gzip, chunked", b"transfer-encoding: gzip"])
def test_a_compressed_answer_is_not_blown_up(db, coding):
    """A megabyte that would be a thousand."""
    packer = zlib.compressobj(9, zlib.DEFLATED, 31)
    bomb = b"".join(packer.compress(b"a" * MEGABYTE) for _ in range(1000)) + packer.flush()
    chunked = b"".join(b"%x\r\n%s\r\n" % (len(bomb[i:i + 8192]), bomb[i:i + 8192]) for i in range(0, len(bomb), 8192)) + b"0\r\n\r\n"

    def talk(line):
        head = line.read_until(rb"^(.*?\r\n\r\n)").group(1)
        accepted.append(b"accept-encoding" in head.lower() or b"\r\nte:" in head.lower())
        line.send(b"HTTP/1.1 500 No\r\n" + coding + b"\r\n\r\n" + (chunked if b"chunked" in coding else bomb))
    accepted = []
    hostile = Hostile(talk)
    try:
        with healthy_neighbour(db) as neighbour_works:
            pid, most = worker_pid(db), 0
            before = memory(pid)
            db.sql("SELECT outbox_create_destination('d', 'http', %s, max_attempts => 1000, backoff => '50 ms', event_types => '{t}')",
                   json.dumps({"url": f"http://127.0.0.1:{hostile.port}/", "response_bytes": 16 * MEGABYTE}))
            db.sql("SELECT outbox_emit(NULL, 'e', 't', '{}')")
            end = time.monotonic() + 3
            while time.monotonic() < end:
                most = max(most, memory(pid))
                time.sleep(0.01)
            assert hostile.connections and not any(accepted), "it does not ask for compression"
            assert most - before < 24 * MEGABYTE
            neighbour_works()
    finally:
        hostile.close()
