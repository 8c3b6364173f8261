"""Odd payloads, odd keys and far sides that answer with rubbish (case 22), the same for every kind of destination.

One table of values (odd_values.py), and one place for each kind where everything ends up that the kind carries of an event.
What is emitted is refused at once, with an error that the reference lists, or arrives bit for bit. Kinds that are brokers get
the same values from brokers/contract.py.
"""
import collections
import contextlib
import json
import re
import socket
import threading
from dataclasses import dataclass, field
from urllib.parse import quote, unquote

import psycopg2
import pytest
from pika import spec
from pika.frame import Header

import closing
from conftest import TOP, eventually, make_database, run
from hostile import Hostile
from null_destination import worker_pids
from odd_values import ACCEPTED, VALUES, Value, emit
from receiver import Answer, Raw, Receiver
from relay_process import Relay
from scripted_amqp import ScriptedBroker
from scripted_redis import ScriptedRedis
from test_security_far_sides import INFO, options

@dataclass
class Arrived:
    """An event as it arrived. `fields` is everything that the kind says about it but payload and key, compared as a
    whole with what the kind expects."""
    id: str
    key: str
    payload: str
    fields: dict = field(repr=False)


def encoded_in(encoding):
    """What the command that makes such a database ends in."""
    return f"ENCODING '{encoding}' LOCALE 'C' TEMPLATE template0"


def encoded(value):
    """A header value of CloudEvents, and a segment of a source."""
    return quote(value, safe="!#$&'()*+,-./:;<=>?@[\\]^_`{|}~")


def members(text):
    """The members of a JSON object, each as the text that was there."""
    decoder, found = json.JSONDecoder(), {}
    assert text[0] == "{" and text[-1] == "}"
    at = 1
    while at < len(text) - 1:
        name, at = decoder.raw_decode(text, at)
        assert text[at] == ":" and name not in found
        begin = at + 1
        _, at = decoder.raw_decode(text, begin)
        found[name] = text[begin:at]
        assert text[at] in ",}"
        at += 1
    assert at == len(text)
    return found


class Kind:
    """A destination of a kind, and what arrived at it."""

    def __init__(self, db):
        self.db = db

    def create(self, kind, options):
        self.db.sql("SELECT outbox_create_destination('d', %s, %s, backoff => '20 ms', backoff_max => '100 ms')", kind,
                    json.dumps(options))

    def close(self):
        pass

    def event(self, key):
        """What is the same for all kinds."""
        event_id, time = self.db.sql(
            """SELECT event_id::text, to_char(created_at AT TIME ZONE 'UTC', 'YYYY-MM-DD"T"HH24:MI:SS.US"Z"')
                 FROM outbox_events WHERE event_key = %s""", key)[0]
        return {"id": event_id, "time": time, "scope": key, "ordering_key": key,
                "source": f"retrysafe/{self.db.name}/{quote(key, safe='')}"}

    def expected(self, value):
        raise NotImplementedError

    def arrived(self):
        raise NotImplementedError


class Http(Kind):
    mode = None

    def __init__(self, db):
        super().__init__(db)
        self.receiver = Receiver()
        self.create("http", {"url": self.receiver.url, "mode": self.mode})

    def close(self):
        self.receiver.stop()

    def attributes(self, value):
        event = self.event(value.key)
        return {"specversion": "1.0", "id": event["id"], "source": event["source"], "type": value.type,
                "time": event["time"], "partitionkey": value.key, "eventkey": value.key, "scope": value.key, **value.extensions()}

    def headers(self, request):
        """All of them, but those whose value is the clock's and the client's own business."""
        found = collections.Counter(name.lower() for name, _ in request.headers)
        assert set(found.values()) == {1}
        return {name.lower(): value for name, value in request.headers
                if name.lower() not in ("host", "user-agent", "accept", "webhook-timestamp")}


class HttpBinary(Http):
    mode = "binary"

    def expected(self, value):
        body = value.stored and value.stored.encode()
        headers = {f"ce-{name}": encoded(text) for name, text in self.attributes(value).items()}
        headers |= {"webhook-id": headers["ce-id"], "content-length": str(len(body or b""))}
        return headers | ({} if body is None else {"content-type": "application/json"})

    def arrived(self):
        for request in self.receiver.requests:
            headers = self.headers(request)
            key = unquote(headers["ce-eventkey"])
            has_payload = "content-type" in headers
            assert has_payload or request.body == b""
            yield Arrived(request.id, key, request.body.decode() if has_payload else None, headers)


class HttpStructured(Http):
    mode = "structured"

    def expected(self, value):
        attributes = self.attributes(value)
        if value.stored is not None:
            attributes |= {"datacontenttype": "application/json", "data": json.loads(value.stored)}
        return attributes

    def arrived(self):
        for request in self.receiver.requests:
            text = request.body.decode()
            headers = self.headers(request)
            envelope = json.loads(text)
            assert headers == {"content-type": "application/cloudevents+json; charset=utf-8",
                               "content-length": str(len(request.body)), "webhook-id": envelope["id"]}
            yield Arrived(request.id, envelope["eventkey"], members(text).get("data"), envelope)


def handler_object(kind, value):
    """What functions get, but for the payload."""
    event = kind.event(value.key)
    return {"id": event["id"], "type": value.type, "key": value.key, "scope": value.key, "ordering_key": value.key,
            "headers": value.headers, "created_at": event["time"], "attempt": 1}


HANDLER = """CREATE TABLE public.effects (event jsonb);
    CREATE FUNCTION public.handle(event jsonb) RETURNS void LANGUAGE sql
    AS 'INSERT INTO public.effects VALUES (event)'"""
# The operator -> gives SQL null where there is no member, and null where the member is null.
EFFECTS = "SELECT event->>'id', event->>'key', (event->'payload')::text, event - 'payload' FROM public.effects"


class Postgres(Kind):
    """Both the inbox table and the function over there."""

    def __init__(self, db):
        super().__init__(db)
        self.far = make_database(db.server)
        self.far.sql("""CREATE TABLE public.retrysafe_inbox (event_id uuid PRIMARY KEY, event_type text, source text,
            event_key text, scope text, ordering_key text, payload text, headers text, created_at timestamptz)""")
        self.far.sql(HANDLER)
        self.create("postgres", {"host": "127.0.0.1", "port": db.server.port, "dbname": self.far.name,
                                 "user": "postgres", "function": "public.handle"})

    def close(self):
        admin = self.db.server.connect()
        run(admin, f'DROP DATABASE "{self.far.name}" WITH (FORCE)')
        admin.close()

    def expected(self, value):
        event = self.event(value.key)
        return {"function": handler_object(self, value),
                "row": (event["id"], value.type, event["source"], value.key, value.key, value.stored, value.headers, event["time"])}

    def arrived(self):
        with contextlib.closing(self.far.connect()) as session:
            run(session, "BEGIN ISOLATION LEVEL REPEATABLE READ")  # both tables as they are at one moment
            called = {key: (payload, rest) for _, key, payload, rest in run(session, EFFECTS)}
            rows = run(session, """
                SELECT event_id::text, event_type, source, event_key, scope, ordering_key, payload, headers::jsonb,
                       to_char(created_at AT TIME ZONE 'UTC', 'YYYY-MM-DD"T"HH24:MI:SS.US"Z"')
                  FROM public.retrysafe_inbox""")
        for *row, time in rows:
            key = row.pop(3)
            payload, rest = called.pop(key)
            yield Arrived(row[0], key, payload, {"function": rest, "row": (*row, time)})
        assert called == {}


class Function(Kind):
    def __init__(self, db):
        super().__init__(db)
        db.sql(HANDLER)
        self.create("function", {"function": "public.handle"})

    def expected(self, value):
        return handler_object(self, value)

    def arrived(self):
        return [Arrived(*row) for row in self.db.sql(EFFECTS)]


class Pull(Kind):
    def __init__(self, db):
        super().__init__(db)
        self.create("pull", {})
        self.fetched = []

    def expected(self, value):
        event = self.event(value.key)
        return {"event_id": event["id"], "attempt": 1, "event_type": value.type, "scope": value.key,
                "ordering_key": value.key, "idempotency_key": None, "headers": value.headers, "created_at": event["time"]}

    def arrived(self):
        """Fetches what is there, too."""
        session = self.db.connect()
        with session.cursor() as cursor:
            cursor.execute("""SELECT batch, event_id::text, attempt, event_type, event_key, scope, ordering_key,
                idempotency_key, payload::text, headers, to_char(created_at AT TIME ZONE 'UTC',
                'YYYY-MM-DD"T"HH24:MI:SS.US"Z"') AS created_at FROM outbox_fetch('d')""")
            rows = [dict(zip([c.name for c in cursor.description], row)) for row in cursor]
        if rows:
            assert run(session, "SELECT count(*) FROM outbox_ack(%s)", rows[0]["batch"]) == [(1,)]
        session.close()
        for row in rows:
            del row["batch"]
            self.fetched.append(Arrived(row["event_id"], row.pop("event_key"), row.pop("payload"), row))
        return self.fetched


KINDS = {"http binary": HttpBinary, "http structured": HttpStructured, "postgres": Postgres, "function": Function,
         "pull": Pull}


@pytest.fixture(params=KINDS)
def kind(request, db):
    one = KINDS[request.param](db)
    yield one
    if request.param != "pull":
        db.sql("SELECT outbox_drop_destination('d')")
    one.close()


def documented_codes():
    """SQLSTATEs that the reference tells of."""
    lines = (TOP / "docs/reference.md").read_text().splitlines()
    first_cells = [line.split("|")[1] for line in lines if line.startswith("| ") and line.count("|") >= 4]
    return {code for cell in first_cells for code in cell.replace(",", " ").split() if len(code) == 5}


def test_a_value_is_refused_or_arrives_bit_for_bit(kind):
    db = kind.db
    known = documented_codes()
    positions = {}
    for value in VALUES:
        if value.error is None:
            positions[value.key] = emit(db, value)
            continue
        with pytest.raises(psycopg2.Error) as refused:
            emit(db, value)
        assert (refused.value.pgcode, value.error in known) == (value.error, True), value.about
    # Each key is one of its own, and none is a pattern that another one matches.
    assert [emit(db, value) for value in ACCEPTED.values()] == list(positions.values())
    assert len(set(positions.values())) == len(ACCEPTED)
    seen = []

    def all_there():
        seen[:] = kind.arrived()
        return len(seen) >= len(ACCEPTED)

    eventually(all_there, message="not everything arrived")
    eventually(lambda: db.sql("SELECT state, delivered, backlog, dead FROM outbox_status") ==
               [("idle", len(ACCEPTED), 0, 0)])
    seen = list(kind.arrived())
    assert sorted(a.key for a in seen) == sorted(ACCEPTED)
    for a in seen:
        value = ACCEPTED[a.key]
        assert (a.payload, a.fields) == (value.stored, kind.expected(value)), value.about
    closing.balance(db, "d", [a.id for a in seen], committed=ACCEPTED,
                    rolled_back=[value.key for value in VALUES if value.error])


@pytest.fixture
def smallest_stack(server):
    server.set("max_stack_depth", "100kB")
    yield
    server.set("max_stack_depth", None)


@pytest.mark.parametrize("value", [value for value in ACCEPTED.values() if value.payload and "deep" in value.about],
                         ids=lambda value: value.about)
def test_the_deepest_payload_arrives_where_the_stack_is_smallest(smallest_stack, kind, value):
    """Whoever parses it again has other things on its stack than who emitted it."""
    emit(kind.db, value)
    (a,) = eventually(lambda: list(kind.arrived()))
    assert (a.payload, a.fields) == (value.stored, kind.expected(value))


@pytest.mark.parametrize("db_options, letter", [
    pytest.param(encoded_in(encoding), letter, id=encoding)
    for encoding, letter in (("LATIN1", "é"), ("EUC_JP", "あ"), ("SQL_ASCII", "é😀"))])
def test_what_a_database_in_another_encoding_holds_arrives_in_utf8(kind, letter):
    db = kind.db
    value = Value(f"key {letter}", payload=f'{{"{letter}": "{letter}"}}', type=f"type {letter}", headers={"h-1": letter})
    db.sql(f"ALTER DATABASE {db.name} SET client_encoding = 'UTF8'")
    emit(db, value)
    (a,) = eventually(lambda: list(kind.arrived()))
    assert (a.key, a.payload, a.fields) == (value.key, value.stored, kind.expected(value))
    eventually(lambda: db.value("SELECT sent_at IS NOT NULL FROM outbox_events"))
    closing.balance(db, "d", [a.id], committed=[value.key])


@pytest.mark.parametrize("publisher", ["worker", "relay"])
@pytest.mark.parametrize("name, size", [("店", 3), ("婩婩", 6)], ids=["not of its encoding", "not in UTF-8"])
def test_the_name_of_a_database_can_be_any_bytes(server, name, size, publisher):
    """The catalog of databases is shared: a name is stored as another database writes it."""
    db = make_database(server, name, encoded_in("EUC_JP"))
    try:
        with Receiver() as receiver:
            db.sql("SELECT outbox_create_destination('d', 'http', %s, workers => %s)", json.dumps({"url": receiver.url}),
                   publisher == "worker")
            db.sql("SELECT outbox_emit(NULL, 'e', 't', '{}')")
            with Relay(db, "--allowed-addresses", "127.0.0.1, ::1", "d") if publisher == "relay" else contextlib.nullcontext():
                eventually(lambda: db.value("SELECT delivered FROM outbox_status") == 1)
            (request,) = receiver.requests
            assert request.header("ce-source") == encoded("retrysafe/" + "%3F" * size)
    finally:
        admin = server.connect()
        run(admin, f'DROP DATABASE "{name}" WITH (FORCE)')
        admin.close()


@pytest.mark.parametrize("db_options", [encoded_in("EUC_JP")])
def test_events_that_cannot_be_read_are_an_error_of_the_destination(db):
    """Of the status, for who does not read the log. Nobody can emit such an event; the owner changes one."""
    with Receiver() as receiver:
        db.sql("SELECT outbox_create_destination('d', 'http', %s)", json.dumps({"url": receiver.url}))
        db.sql("SELECT outbox_pause('d')")
        db.sql("SELECT outbox_emit(NULL, 'e', 't', '{}')")
        db.sql("UPDATE outbox_log SET event_type = E'\\xa9\\xa9'")
        db.sql("SELECT outbox_resume('d')")
        ((error,),) = eventually(lambda: db.sql("SELECT last_error FROM outbox_status WHERE error_at IS NOT NULL"))
        assert "no equivalent in encoding" in error
        db.sql("UPDATE outbox_log SET event_type = 't'")
        eventually(lambda: db.sql("SELECT state, delivered, failures FROM outbox_status") == [("idle", 1, 0)])
        assert len(receiver.requests) == 1


def test_no_key_is_a_pattern(db):
    """The way back of dead letters, one ordering key at a time."""
    with Receiver() as receiver:
        receiver.behave(422)
        db.sql("SELECT outbox_create_destination('d', 'http', %s)", json.dumps({"url": receiver.url}))
        keys = [value.key for value in ACCEPTED.values() if value.payload == "{}"]
        for key in keys:
            emit(db, ACCEPTED[key])
        eventually(lambda: db.value("SELECT dead FROM outbox_status") == len(keys))
        assert sorted(db.sql("SELECT event_key, ordering_key, scope FROM outbox_dead_letters")) == sorted(
            (key, key, key) for key in keys)
        receiver.clear()
        receiver.behave(204)
        for number, key in enumerate(keys, 1):
            assert db.value("SELECT outbox_retry('d', ordering_key => %s)", key) == 1
            eventually(lambda: len(receiver.requests) == number)
            assert receiver.requests[-1].header("ce-eventkey") == encoded(key)
        closing.balance(db, "d", receiver.ids, committed=keys)


# -- far sides that answer with rubbish --

RUBBISH = b"a\xff\xfe\xc3(\xed\xa0\x80\xf0\x9f\r\n\x1b[31m\x7f \xc2\x85b " + "é".encode() * 300
BODY = b"a\xff\xc3 \xed\xa0\x80 \x00 " + RUBBISH


def shown(db):
    """What operators are shown, byte by byte: in the encoding of the database, on one line, and short."""
    texts = []
    for query in ("SELECT last_error FROM outbox_status", "SELECT reason FROM outbox_dead_letters",
                  "SELECT reason FROM outbox_parked",
                  "SELECT last_error FROM outbox_workers WHERE database = current_database()"):
        texts += [bytes(text) for (text,) in db.sql(f"SELECT textsend(t) FROM ({query}) AS x (t) WHERE t IS NOT NULL")]
    for text in texts:
        decoded = text.decode()
        assert decoded.isprintable() and len(text) <= 300, text
    return [text.decode() for text in texts]


@pytest.fixture
def healthy(db):
    """Another destination of the same worker. It is checked at the end that it went on, and that the worker lived."""
    with Receiver() as receiver:
        db.sql("SELECT outbox_create_destination('healthy', 'http', %s, event_types => '{healthy}')",
               json.dumps({"url": receiver.url}))
        pid = eventually(lambda: worker_pids(db))
        number = 0

        def check():
            nonlocal number
            number += 1
            db.sql("SELECT outbox_emit(NULL, %s, 'healthy', NULL)", f"healthy-{number}")
            eventually(lambda: len(receiver.requests) == number, message="another destination was held up")
            assert worker_pids(db) == pid, "the worker was stopped"

        yield check
        check()
        logged = [line for line in db.server.log().splitlines() if "retrysafe: " in line]
        assert not [line for line in logged if "\ufffd" in line or not line.isprintable()]


def head(line=b"HTTP/1.1 200 OK", *more):
    return Raw(b"\r\n".join([line, *more, b"Content-Length: 0", b"", b""]))


# What becomes of an event whose request is answered like this: delivered, dead, or not yet.
ANSWERS = {
    "body": (Answer(200, body=BODY), "delivered"),
    "header": (head(b"HTTP/1.1 200 OK", b"X-Junk: \xff\xfe\xc3\x1b", b"\xff\xfe: \xff"), "delivered"),
    "NUL in a header": (head(b"HTTP/1.1 200 OK", b"X-Junk: a\x00b"), "not yet"),
    "name with NUL": (head(b"HTTP/1.1 200 OK", b"X\x00Junk: x"), "not yet"),
    "reason phrase": (head(b"HTTP/1.1 200 \xff\xfe\x1b\xc3"), "delivered"),
    "NUL in the reason phrase": (head(b"HTTP/1.1 200 O\x00K"), None),
    "length": (Raw(b"HTTP/1.1 200 OK\r\nContent-Length: \xff\x00\r\n\r\n"), None),
    "refusal": (Answer(422, body=BODY), "dead"),
    "redirect": (Answer(302, {"Location": "\xff\xfe\x1b"}), "dead"),
    "failure": (Answer(500, body=BODY), "not yet"),
    "overload": (Answer(503, {"Retry-After": "\xff\xfe"}, body=BODY), "not yet"),
    **{f"overload, cut after {n} of three bytes": (Answer(503, body=b"x" * n + "€".encode() * 300), "not yet")
       for n in range(3)},
    "NUL in Retry-After": (Raw(b"HTTP/1.1 429 \xff\r\nRetry-After: \x00\xff\r\n\r\n" + RUBBISH), "not yet"),
    "no HTTP": (Raw(b"\x00" + RUBBISH), "not yet"),
    "no status": (Raw(b"HTTP/1.1 \xff\x00\r\n\r\n" + RUBBISH), "not yet"),
}


@pytest.mark.parametrize("answer", ANSWERS)
def test_a_receiver_that_answers_with_rubbish(db, healthy, answer):
    what, outcome = ANSWERS[answer]
    with Receiver() as receiver:
        receiver.behave(what)
        db.sql("""SELECT outbox_create_destination('d', 'http', %s, event_types => '{t}', max_attempts => 1000,
                  backoff => '20 ms', backoff_max => '50 ms')""", json.dumps({"url": receiver.url, "timeout": "2s"}))
        db.sql("SELECT outbox_emit(NULL, 'first', 't', '{}', 'k')")

        def became():
            delivered, dead, failures, waiting = db.sql(
                "SELECT delivered, dead, failures, parked_retry FROM outbox_status WHERE name = 'd'")[0]
            return "delivered" if delivered else "dead" if dead else "not yet" if failures or waiting else None

        found = eventually(became)
        assert outcome in (found, None)
        healthy()
        texts = shown(db)
        assert found == "delivered" or texts
        receiver.behave(204)
        db.sql("SELECT outbox_emit(NULL, 'second', 't', '{}', 'k')")
        eventually(lambda: receiver.requests[-1].header("ce-eventkey") == "second")
        keys = [request.header("ce-eventkey") for request in receiver.requests]
        assert keys == ["first"] * (len(keys) - 1) + ["second"] and (found == "not yet" or len(keys) == 2)
        eventually(lambda: db.value("SELECT delivered + dead FROM outbox_status WHERE name = 'd'") == 2)
        shown(db)
        closing.balance(db, "d", receiver.ids, committed=["first", "second"])


# Raises what the payload says, until somebody is calm.
RUBBISH_HANDLER = """CREATE TABLE public.calm (yes boolean);
    CREATE TABLE public.effects (serial bigint GENERATED ALWAYS AS IDENTITY, key text, id text);
    CREATE FUNCTION public.handle(event jsonb) RETURNS void LANGUAGE plpgsql AS $$
    DECLARE
      rubbish text := %(rubbish)s;
    BEGIN
      IF event->'payload' ? 'sqlstate' AND NOT EXISTS (SELECT FROM public.calm) THEN
        RAISE WARNING '%%', rubbish;
        RAISE EXCEPTION '%%', rubbish
              USING ERRCODE = event->'payload'->>'sqlstate', DETAIL = rubbish, HINT = rubbish, COLUMN = rubbish;
      END IF;
      INSERT INTO public.effects (key, id) VALUES (event->>'key', event->>'id');
    END $$"""
ENCODINGS = {"UTF8": "", "SQL_ASCII": encoded_in("SQL_ASCII")}
RAISED = {"mixed": RUBBISH, "no character at all": b"\xff" * 300, "cut character": b"ends early \xf0"}


def rubbish_text(encoding, rubbish):
    """In SQL_ASCII every byte but NUL is text. In UTF8 it takes damage, a library in C or a cast that only a superuser
    can make; NUL gets into a text so as well."""
    if encoding == "SQL_ASCII":
        return f"convert_from('\\x{rubbish.hex()}', 'SQL_ASCII')"
    return f"'\\x{(rubbish + bytes(1) + rubbish).hex()}'::bytea::text"


class Handler:
    """That of a database, whose effects are what has arrived."""

    def __init__(self, database, encoding, rubbish):
        self.database = database
        if encoding == "UTF8":
            database.sql("CREATE CAST (bytea AS text) WITHOUT FUNCTION")
        run(database.connect(), RUBBISH_HANDLER % {"rubbish": rubbish_text(encoding, rubbish)})

    def calm(self):
        self.database.sql("INSERT INTO public.calm VALUES (true)")

    def arrived(self):
        """(event key, event id), in their order."""
        return self.database.sql("SELECT key, id FROM public.effects ORDER BY serial")


def create_function_destination(db):
    db.sql("""SELECT outbox_create_destination('d', 'function', '{"function": "public.handle"}', event_types => '{t}',
              max_attempts => 1000, backoff => '20 ms', backoff_max => '50 ms')""")


def becomes_of_rubbish(db, far, healthy, payload, outcome, reason):
    """Said again and again, it is what the error makes it, and what comes after it arrives."""
    emit = "SELECT outbox_emit(NULL, %s, 't', %s, 'k')"
    db.sql(emit, "first", json.dumps(payload))

    def became():
        dead, waiting, failures = db.sql("SELECT dead, parked_retry, failures FROM outbox_status WHERE name = 'd'")[0]
        return "dead" if dead else "retry" if waiting else "away" if failures else None

    assert eventually(became) == outcome
    healthy()
    texts = shown(db)
    assert texts and all(text.removeprefix("d: ").startswith(reason) for text in texts), texts
    far.calm()
    db.sql(emit, "second", "{}")
    keys = ["second"] if outcome == "dead" else ["first", "second"]
    eventually(lambda: [key for key, _ in far.arrived()] == keys)
    eventually(lambda: db.sql("SELECT delivered, dead FROM outbox_status WHERE name = 'd'") ==
               [(len(keys), 2 - len(keys))])
    shown(db)
    closing.balance(db, "d", [event_id for _, event_id in far.arrived()], committed=["first", "second"])


@pytest.fixture
def far(server, encoding):
    database = make_database(server, options=ENCODINGS[encoding])
    yield database
    database.close()
    admin = server.connect()
    run(admin, f'DROP DATABASE "{database.name}" WITH (FORCE)')
    admin.close()


def errors(away, **outcomes):
    """Every SQLSTATE with a bit of everything, and the other rubbish with one that is stored with the event and one
    that is stored with the destination."""
    return [("mixed", sqlstate, outcome) for sqlstate, outcome in outcomes.items()] + [
        (rubbish, sqlstate, outcomes[sqlstate])
        for rubbish in RAISED if rubbish != "mixed" for sqlstate in ("P0001", away)]


# A connection that is lost has no reason but the far side's, and an undefined table may be the inbox: the sink looks.
# What is no UTF-8 does not leave a server of SQL_ASCII: it raises 22021 in its place.
@pytest.mark.parametrize("encoding, rubbish, sqlstate, outcome", [
    *(("UTF8", *error) for error in errors("57P03", **{"P0001": "retry", "22023": "dead", "42P01": "retry",
                                                       "57P03": "away", "53100": "away"})),
    ("SQL_ASCII", "mixed", "P0001", "dead"), ("SQL_ASCII", "cut character", "57P03", "dead")])
def test_a_server_that_answers_with_rubbish(db, far, healthy, encoding, rubbish, sqlstate, outcome):
    far.sql("CREATE TABLE public.retrysafe_inbox (event_id uuid PRIMARY KEY)")
    handler = Handler(far, encoding, RAISED[rubbish])
    db.sql("""SELECT outbox_create_destination('d', 'postgres', %s, event_types => '{t}', max_attempts => 1000,
              backoff => '20 ms', backoff_max => '50 ms')""",
           json.dumps({"host": "127.0.0.1", "port": far.server.port, "dbname": far.name, "user": "postgres",
                       "function": "public.handle"}))
    reason = "22021: " if encoding == "SQL_ASCII" else f"{sqlstate}: "
    becomes_of_rubbish(db, handler, healthy, {"sqlstate": sqlstate}, outcome, reason)


@pytest.mark.parametrize("rubbish, sqlstate, outcome",
                         errors("53100", **{"P0001": "retry", "22023": "dead", "53100": "away"}))
@pytest.mark.parametrize("encoding, db_options", ENCODINGS.items(), ids=ENCODINGS)
def test_a_function_that_raises_rubbish(db, healthy, encoding, db_options, rubbish, sqlstate, outcome):
    handler = Handler(db, encoding, RAISED[rubbish])
    create_function_destination(db)
    becomes_of_rubbish(db, handler, healthy, {"sqlstate": sqlstate}, outcome, f"{sqlstate}: ")


@pytest.mark.parametrize("db_options, letter", [
    pytest.param(encoded_in(encoding), letter, id=encoding)
    for encoding, letter in (("LATIN1", "é"), ("EUC_JP", "あ"))])
def test_messages_in_the_encoding_of_the_database_stay_readable(db, letter):
    message = letter + "\x1b\n" + letter * 300
    run(db.connect(), f"""CREATE FUNCTION public.handle(event jsonb) RETURNS void LANGUAGE plpgsql AS $$
        BEGIN
          RAISE EXCEPTION '%', convert_from('\\x{message.encode().hex()}', 'UTF8') USING ERRCODE = '22023';
        END $$""")
    create_function_destination(db)
    db.sql("SELECT outbox_emit(NULL, 'e', 't', '{}')")
    eventually(lambda: db.value("SELECT dead FROM outbox_status") == 1)
    reason = bytes(db.value("SELECT convert_to(reason, 'UTF8') FROM outbox_dead_letters")).decode()
    start = f"22023: {letter}  "
    assert reason.startswith(start) and set(reason.removeprefix(start)) == {letter} and 100 < len(reason) < 300


@pytest.mark.parametrize("db_options", [encoded_in("LATIN1")])
def test_what_a_far_side_answers_fits_the_encoding_of_the_database(db):
    """It came in UTF-8, or in anything."""
    with Receiver() as receiver:
        receiver.behave(Answer(422, body="größer".encode()))
        db.sql("SELECT outbox_create_destination('d', 'http', %s)", json.dumps({"url": receiver.url}))
        db.sql("SELECT outbox_emit(NULL, 'e', 't', '{}')")
        eventually(lambda: db.value("SELECT dead FROM outbox_status") == 1)
        assert db.value("SELECT reason FROM outbox_dead_letters") == "HTTP 422: gr????er"


@pytest.mark.parametrize("encoding, db_options", ENCODINGS.items(), ids=ENCODINGS)
def test_a_function_that_leaves_rubbish_for_the_commit(db, healthy, encoding, db_options):
    """A key that is begun and not completed fails the transaction when it commits, with the key in the message."""
    handler = Handler(db, encoding, RUBBISH[:30])
    run(db.connect(), """CREATE FUNCTION public.forget() RETURNS trigger LANGUAGE plpgsql AS $$
        BEGIN
          IF NEW.key = 'first' AND NOT EXISTS (SELECT FROM public.calm) THEN
            PERFORM retrysafe.idem_begin(%s, '\\x00'::bytea);
          END IF;
          RETURN NULL;
        END $$;
        CREATE TRIGGER forget AFTER INSERT ON public.effects FOR EACH ROW EXECUTE FUNCTION public.forget()"""
        % rubbish_text(encoding, RUBBISH[:30]))
    create_function_destination(db)
    becomes_of_rubbish(db, handler, healthy, {}, "retry", "idempotency key \"a")


# -- brokers: what they say, of an event or of themselves, is a text of theirs --

LINE = RUBBISH.replace(b"\r\n", b"\0")  # it ends no line of a protocol


class Scripted:
    """A broker that takes events when it is calm. `refusals`: what it says before that, and to what."""

    def __init__(self, refusals):
        self._refusals, self._calm, self._arrived = refusals, False, []

    def refusal(self, of):
        return None if self._calm else self._refusals.get(of)

    def calm(self):
        self._calm = True

    def take(self, event):
        self._arrived.append((event["eventkey"], event["id"]))

    def arrived(self):
        return list(self._arrived)


@contextlib.contextmanager
def scripted_redis(far):
    def answer(words):
        if refusal := far.refusal(words[0]):
            return refusal + b"\r\n"
        if words[0] != b"XADD":
            return b"+OK\r\n"
        fields = [word.decode() for word in words[words.index(b"*") + 1:]]
        far.take(dict(zip(fields[::2], fields[1::2])))
        return b"$3\r\n1-1\r\n"

    with ScriptedRedis(answer) as server:
        yield server.options()


@contextlib.contextmanager
def scripted_nats(far):
    def talk(line):
        line.send(INFO)
        stream = line.connection.makefile("rb")
        for words in map(bytes.split, stream):
            answer = far.refusal(words[0])
            if words[0] == b"PING":
                line.send(answer or b"PONG\r\n")
            elif words[0] == b"SUB":
                subscription = words[-1]
            elif words[0] == b"HPUB":
                message = stream.read(int(words[-1]) + 2).decode()
                if answer is None:
                    far.take(dict(re.findall("ce-([a-z]+): *(\\S+)", message)))
                    answer = b'{"stream": "s", "seq": 1}'
                if not answer.startswith(b"-"):
                    answer = b"MSG %b %b %d\r\n%b\r\n" % (words[2], subscription, len(answer), answer)
                line.send(answer)

    with contextlib.closing(Hostile(talk)) as server:
        yield options("nats", server.port)


@contextlib.contextmanager
def scripted_rabbitmq(far):
    def on_message(talk, message):
        if refuse := far.refusal("message"):
            return refuse(talk, message)
        far.take({name.removeprefix("cloudEvents:"): value for name, value in message.properties.headers.items()})
        talk.send(spec.Basic.Ack(message.number))

    with ScriptedBroker(on_message) as server:
        yield server.options()


def give_back(talk, message):
    talk.send(spec.Basic.Return(312, LINE[:255], "e", "k"))
    talk.raw(Header(1, 0, message.properties).marshal())
    talk.send(spec.Basic.Ack(message.number))


def block(talk, message):
    talk.send(spec.Connection.Blocked(LINE[:255]), 0)
    talk.close()


def jetstream_error(code):
    return b'{"error": {"code": 400, "err_code": %d, "description": "%b \\ud83d per subject"}}' % (code, LINE[:100])


BROKERS = {"redis": scripted_redis, "nats": scripted_nats, "rabbitmq": scripted_rabbitmq}
# What becomes of an event to which a broker says so, and how the reason begins.
REFUSALS = {
    ("redis", "unknown"): ({b"XADD": b"-ERR " + LINE}, "retry", "ERR a???"),
    ("redis", "memory"): ({b"XADD": b"-OOM " + LINE}, "away", "OOM a???"),
    ("redis", "type"): ({b"XADD": b"-WRONGTYPE " + LINE}, "away", "WRONGTYPE a???"),
    ("redis", "no answer"): ({b"XADD": LINE}, "away", "the answer is not that of a Redis server"),
    ("redis", "login"): ({b"AUTH": b"-WRONGPASS " + LINE}, "away", "WRONGPASS a???"),
    ("nats", "refused"): ({b"HPUB": jetstream_error(10023)}, "away", "a???"),
    ("nats", "full subject"): ({b"HPUB": jetstream_error(10077)}, "retry", "a???"),
    ("nats", "too large"): ({b"HPUB": jetstream_error(10054)}, "dead", "a???"),
    ("nats", "no answer"): ({b"HPUB": LINE}, "away", "somebody else than JetStream answers"),
    ("nats", "rights"): ({b"HPUB": b"-ERR 'Permissions Violation for Publish to \"s\" %b'\r\n" % LINE}, "away",
                         "Permissions Violation"),
    ("nats", "error"): ({b"HPUB": b"-ERR '%b'\r\n" % LINE}, "away", "connection lost: a???"),
    ("nats", "login"): ({b"PING": b"-ERR 'Authorization Violation %b'\r\n" % LINE}, "away", "127.0.0.1:"),
    ("rabbitmq", "channel"): ({"message": lambda talk, _: talk.close_channel(404, LINE[:255])}, "away", "a???"),
    ("rabbitmq", "message"): ({"message": lambda talk, _: talk.close_channel(406, LINE[:255])}, "dead", "a???"),
    ("rabbitmq", "connection"): ({"message": lambda talk, _: talk.send(spec.Connection.Close(320, LINE[:255], 0, 0), 0)}, "away",
                                 "a???"),
    ("rabbitmq", "given back"): ({"message": give_back}, "retry", "no queue took the message: a???"),
    ("rabbitmq", "blocked"): ({"message": block}, "away", "the broker takes no messages for now: a???"),
}


@pytest.mark.parametrize("kind, how, db_options", [
    *(pytest.param(*which, "", id="-".join(which)) for which in REFUSALS),
    *(pytest.param(*which, encoded_in(encoding), id=f"{which[0]}-{encoding}")
      for which in (("redis", "unknown"), ("nats", "refused"), ("rabbitmq", "channel")) for encoding in ("SQL_ASCII", "LATIN1"))])
def test_a_broker_that_answers_with_rubbish(db, healthy, kind, how):
    refusals, outcome, reason = REFUSALS[kind, how]
    far = Scripted(refusals)
    with BROKERS[kind](far) as where:
        db.sql("""SELECT outbox_create_destination('d', %s, %s, event_types => '{t}', max_attempts => 1000,
                  backoff => '20 ms', backoff_max => '50 ms')""", kind, json.dumps(where))
        becomes_of_rubbish(db, far, healthy, {}, outcome, reason)


# What a server is greeted with that connects to something else.
GREETINGS = {
    "an error": b"E\x00\x00\x00\x20SFATAL\x00Mb\x00\xff\xfe\x01d" + bytes(15),
    "an old error": b"Ebroken \xff\xfe\x1b[31m\r\n\x00",
    "text": b"\x00" + RUBBISH,
    "a length": b"R\xff\xff\xff\xff",
}


@pytest.mark.parametrize("greeting", GREETINGS)
@pytest.mark.parametrize("encoding", ["UTF8"])
def test_something_that_is_no_server(db, far, healthy, greeting, encoding):
    far.sql("CREATE TABLE public.retrysafe_inbox (event_id uuid PRIMARY KEY, event_key text)")
    with socket.create_server(("127.0.0.1", 0)) as listener:
        def greet():
            while True:
                try:
                    connection, _ = listener.accept()
                except OSError:
                    return
                with connection:
                    connection.sendall(GREETINGS[greeting])

        threading.Thread(target=greet, daemon=True).start()
        db.sql("""SELECT outbox_create_destination('d', 'postgres', %s, event_types => '{t}', backoff => '20 ms',
                  backoff_max => '50 ms')""",
               json.dumps({"host": "127.0.0.1", "port": listener.getsockname()[1], "dbname": far.name,
                           "user": "postgres", "connect_timeout": "500ms"}))
        db.sql("SELECT outbox_emit(NULL, 'first', 't', '{}')")
        eventually(lambda: db.value("SELECT failures FROM outbox_status WHERE name = 'd'") > 2)
        healthy()
        assert shown(db)
        db.sql("SELECT outbox_alter_destination('d', %s)", json.dumps({"port": far.server.port}))
        eventually(lambda: far.sql("SELECT event_key FROM public.retrysafe_inbox") == [("first",)])
        eventually(lambda: db.value("SELECT failures FROM outbox_status WHERE name = 'd'") == 0)
        listener.shutdown(socket.SHUT_RDWR)
        closing.balance(db, "d", [i for (i,) in far.sql("SELECT event_id::text FROM public.retrysafe_inbox")])
