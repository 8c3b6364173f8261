"""Payloads and answers as text: written by the extension, byte for byte what the server writes."""
import json
import random

import psycopg2.extras
import pytest

from conftest import eventually, run
from receiver import Receiver

CHARACTERS = {"UTF8": "éß中日€😀\u0085\u2028\ufffd", "LATIN1": "éßÿ\u0085\u00a0", "EUC_JP": "中日あア", "SQL_ASCII": "éß中😀"}
NUMBERS = ["0", "-0", "0.0", "1.50", "1e3", "1E-7", "-12.340e2", "9007199254740993", "0.1", "1e1000", "-1e-1000", "1e-16383",
           "123456789012345678901234567890.000000000000000000009", "10000", "0.0001", "99999999", "-32768.32767"]


def documents(encoding, count):
    """As JSON text, with the spelling of numbers and the order of members by chance."""
    chance = random.Random(f"{encoding} 1")
    special = '"\\/\b\f\n\r\t\x01\x1b\x1f\x7f \'' + CHARACTERS[encoding]

    def string():
        text = "".join(chance.choice(special) if chance.random() < 0.15 else chance.choice("abcXYZ019 _-:,{}[]")
                       for _ in range(chance.choice((0, 1, 3, 7, 8, 9, 15, 16, 17, 40, 300))))
        return json.dumps(text, ensure_ascii=False)

    def number():
        if chance.random() < 0.5:
            return chance.choice(NUMBERS)
        digits = str(chance.randrange(10 ** chance.randrange(1, 40)))
        return chance.choice(("", "-")) + digits + chance.choice(("", "." + str(chance.randrange(10 ** 9)).zfill(9)))

    def value(depth):
        kind = chance.random()
        if depth == 0 or kind < 0.5:
            return chance.choice((string, string, number, number, lambda: "true", lambda: "false", lambda: "null"))()
        size = chance.choice((0, 1, 2, 3, 8))
        if kind < 0.75:
            return "[" + ",".join(value(depth - 1) for _ in range(size)) + "]"
        return "{" + ",".join(string() + ":" + value(depth - 1) for _ in range(size)) + "}"

    deep = ["[" * 500 + "]" * 500, '{"a":' * 500 + "[]" + "}" * 500, "[[], {}, [[]], [{}], {\"\": {}}]"]
    return deep + NUMBERS + [value(chance.randrange(6)) for _ in range(count)]


@pytest.mark.parametrize("encoding, db_options", [
    (encoding, f"ENCODING '{encoding}' LOCALE 'C' TEMPLATE template0") for encoding in CHARACTERS], ids=CHARACTERS)
def test_json_text_is_that_of_the_server(db, encoding, db_options):
    connection = db.connect(autocommit=False)
    connection.set_client_encoding("UTF8")
    run(connection, "CREATE TEMP TABLE documents (number serial, document jsonb)")
    given = documents(encoding, 5000)
    with connection.cursor() as cursor:
        psycopg2.extras.execute_values(cursor, "INSERT INTO documents (document) VALUES %s", [(text,) for text in given])
    # Digests are of the text in UTF-8; where nobody knows the encoding, of its bytes.
    to = "SQL_ASCII" if encoding == "SQL_ASCII" else "UTF8"
    wrong = run(connection, """
        SELECT number, document::text FROM documents
         WHERE retrysafe.idem_hash(document) IS DISTINCT FROM sha256(convert_to(document::text, %s))""", to)
    assert wrong == []
    assert run(connection, "SELECT count(*) FROM documents") == [(len(given),)]


@pytest.mark.parametrize("encoding, db_options", [
    (encoding, f"ENCODING '{encoding}' LOCALE 'C' TEMPLATE template0") for encoding in CHARACTERS], ids=CHARACTERS)
def test_events_leave_in_utf8(db, encoding, db_options):
    """A worker sends the same bytes, whatever the database keeps them in."""
    text = CHARACTERS[encoding].replace("\u0085", "")
    connection = db.connect()
    connection.set_client_encoding("UTF8")
    with Receiver() as receiver:
        run(connection, "SELECT retrysafe.outbox_create_destination('hook', 'http', %s)",
            json.dumps({"url": receiver.url, "mode": "structured"}))
        run(connection, "SELECT retrysafe.outbox_emit(NULL, %s, 't', %s, %s, scope => %s)", text, json.dumps({text: text},
            ensure_ascii=False), text, text)
        (request,) = eventually(lambda: receiver.requests)
    event = json.loads(request.body.decode("utf-8"))
    assert (event["data"], event["eventkey"], event["partitionkey"]) == ({text: text}, text, text)
    ((event_id,),) = run(connection, "SELECT event_id::text FROM retrysafe.outbox_events")
    assert event["id"] == event_id
