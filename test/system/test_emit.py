"""Emitting: what a transaction writes is there if and only if it commits, whatever way it takes there."""
import hashlib
import pathlib
import random
import subprocess
import threading
import uuid

import psycopg2
import pytest

from conftest import Pending, cluster, make_database, run


def emit(connection, event_key, payload="1", **options):
    arguments = "".join(f", {name} => %s" for name in options)
    return run(connection, f"SELECT outbox_emit(null, %s, 't', %s::jsonb{arguments})", event_key, payload,
               *options.values())[0][0]


def event_keys(db):
    return [row[0] for row in db.sql("SELECT event_key FROM outbox_log ORDER BY id")]


def error_code(function, *arguments, **options):
    with pytest.raises(psycopg2.Error) as caught:
        function(*arguments, **options)
    return caught.value.pgcode


# --- how it gets into the log; test_transactions.py tells what is sent of it --------------------------------------

def test_exception_block(db):
    db.sql("""
        DO $$
        BEGIN
          PERFORM retrysafe.outbox_emit(null, 'before', 't', '1');
          BEGIN
            PERFORM retrysafe.outbox_emit(null, 'inside', 't', '1');
            PERFORM 1 / 0;
          EXCEPTION WHEN division_by_zero THEN
            PERFORM retrysafe.outbox_emit(null, 'handler', 't', '1');
          END;
          BEGIN
            PERFORM retrysafe.outbox_emit(null, 'good block', 't', '1');
          EXCEPTION WHEN OTHERS THEN NULL;
          END;
        END
        $$""")
    assert event_keys(db) == ["before", "handler", "good block"]
    # All of it under one transaction id, subtransactions included: that is what readers go by.
    assert db.value("SELECT count(DISTINCT txid) FROM outbox_log") == 1


def test_prepared_transaction_survives_a_restart():
    with cluster() as server:
        db = make_database(server)
        c = db.connect()
        for event_key, name, options in (("committed", "good", {}), ("rolled back", "bad", {}),
                                         ("delayed", "delayed", {"deliver_after": "2100-01-01"})):
            run(c, "BEGIN")
            emit(c, event_key, **options)
            run(c, f"PREPARE TRANSACTION '{name}'")
        assert event_keys(db) == []
        db.close()
        server.pg_ctl("restart", "-m", "immediate")

        # The event key is taken until the transaction is decided.
        c = db.connect()
        run(c, "SET lock_timeout = '200ms'")
        assert error_code(emit, c, "committed") == "55P03"
        assert error_code(emit, c, "delayed") == "55P03"
        waiting = Pending(db, "SELECT outbox_emit(null, 'committed', 't', '1')")
        assert waiting.blocks()
        db.sql("COMMIT PREPARED 'good'")
        db.sql("ROLLBACK PREPARED 'bad'")
        db.sql("COMMIT PREPARED 'delayed'")
        assert waiting.result() == [(db.value("SELECT id FROM outbox_log"),)]
        assert event_keys(db) == ["committed"]
        assert db.value("SELECT event_key FROM outbox_scheduled") == "delayed"
        assert emit(c, "rolled back", "2") is not None
        waiting.close()
        db.close()


def test_many_events_in_one_transaction(db):
    c = db.connect(autocommit=False)
    run(c, "SELECT outbox_emit(null, 'e' || i, 't', to_jsonb(i)) FROM generate_series(1, 100000) i")
    assert event_keys(db) == []
    c.commit()
    # Positions in the order of the emits.
    assert db.sql("SELECT count(*), count(DISTINCT txid), bool_and(event_key = 'e' || n AND payload = to_jsonb(n)) "
                  "FROM (SELECT *, row_number() OVER (ORDER BY id) n FROM outbox_log) l") == [(100000, 1, True)]


# --- what goes in comes out (case 22) ----------------------------------------------------------------------------

@pytest.mark.parametrize("payload, stored", [
    ('{}', '{}'),
    ('null', 'null'),
    (None, None),
    ('"\\ud83d\\ude00 😀 \\u00e9 \\\\ \\" \\u0001"', '"😀 😀 é \\\\ \\" \\u0001"'),
    ('[9007199254740993, 1.50, 1e3]', '[9007199254740993, 1.50, 1000]'),
])
def test_payload_is_stored_as_it_is(db, payload, stored):
    emit(db.connect(), "e", payload)
    assert db.value("SELECT payload::text FROM outbox_log") == stored


@pytest.mark.parametrize("payload", ['"\\u0000"', '"\\ud83d"', '"\\ude00"', '{"\\ud83dx": 1}'])
def test_payload_that_json_text_cannot_hold_is_refused(db, payload):
    c = db.connect(autocommit=False)
    run(c, "SAVEPOINT s")
    assert error_code(emit, c, "e", payload) in ("22P02", "22P05")
    run(c, "ROLLBACK TO s")
    emit(c, "f")
    c.commit()
    assert event_keys(db) == ["f"]


def test_event_keys_are_compared_byte_by_byte(db):
    c = db.connect()
    keys = ["k", "K", "k ", " k", "\u00e9", "e\u0301", "a\r\nb", "'\"%_*?\\", "$1", "😀", "x" * 255, "\x01\x7f"]
    for key in keys:
        emit(c, key)
    assert event_keys(db) == keys
    for key in ("", "x" * 256, "é" * 128, None):
        assert error_code(emit, c, key) == "RS101"


def test_event_id_can_be_computed_by_anybody(db):
    c = db.connect()
    log = str(uuid.uuid4())
    run(c, "INSERT INTO outbox_eras VALUES (1, %s, 0, 1, 1, 1, 1)", log)
    for scope, key in (("", "e"), ("shop", "é😀"), ("a", "bc"), ("ab", "c")):
        digest = bytearray(hashlib.sha256(uuid.UUID(log).bytes + scope.encode() + b"\0" + key.encode()).digest()[:16])
        digest[6] = digest[6] & 0x0F | 0x80
        digest[8] = digest[8] & 0x3F | 0x80
        assert run(c, "SELECT outbox_event_id(%s, %s)::text", key, scope) == [(str(uuid.UUID(bytes=bytes(digest))),)]


# --- many at once ------------------------------------------------------------------------------------------------

def in_threads(count, function):
    failures = []

    def guarded(number):
        try:
            function(number)
        except BaseException as failure:  # noqa: B902: shown below
            failures.append(failure)

    threads = [threading.Thread(target=guarded, args=(n,)) for n in range(count)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    if failures:
        raise failures[0]


def test_one_event_key_from_many_sessions(db):
    ids = {}

    def emit_all(number):
        c = db.connect(autocommit=False)
        for i in range(100):
            ids[number, i] = emit(c, f"e{i}")
            if random.random() < 0.3:
                c.rollback()
                del ids[number, i]
            else:
                c.commit()

    in_threads(12, emit_all)
    log = dict(db.sql("SELECT event_key, id FROM outbox_log"))
    assert all(log[f"e{i}"] == position for (_, i), position in ids.items())


def test_nobody_who_loses_a_race_for_an_event_key_fails(db, tmp_path):
    """All clients use the key of the moment, and most roll back: whoever had lost to them goes on, one after the other."""
    script = tmp_path / "emit.sql"
    script.write_text("""
        \\set end random(1, 100)
        BEGIN;
        SELECT retrysafe.outbox_emit(NULL, 'e' || (extract(epoch FROM clock_timestamp()) * 300)::bigint, 't', '{}');
        \\if :end > 85
        COMMIT;
        \\else
        ROLLBACK;
        \\endif
        """)
    told = subprocess.run([db.server.bindir() / "pgbench", "-n", "-c", "16", "-t", "1500", "-f", script, db.server.dsn(db.name)],
                          check=True, capture_output=True, text=True)
    assert "actually processed: 24000/24000" in told.stdout, told.stderr
    committed, keys = db.sql("SELECT count(*), count(DISTINCT event_key) FROM outbox_log")[0]
    assert committed == keys > 0


def test_serializable_transactions_with_different_event_keys(db):
    def emit_all(number):
        c = db.connect(autocommit=False)
        c.set_session(isolation_level="SERIALIZABLE")
        for i in range(100):
            emit(c, f"e{number}-{i}")
            emit(c, f"d{number}-{i}", deliver_after="2100-01-01")
            run(c, "SELECT outbox_cancel(%s)", f"d{number}-{i}")
            c.commit()

    in_threads(8, emit_all)
    assert len(event_keys(db)) == 800


def test_serializable_transactions_are_not_tied_to_others_by_what_was_read(db):
    """Without predicate locks of ours they cannot abort each other because of us. In a new session, which reads all
    that others have in memory."""
    c = db.connect(autocommit=False)
    c.set_session(isolation_level="SERIALIZABLE")
    run(c, "SELECT idem_begin('k', 'h'), idem_peek('other')")
    run(c, "SELECT outbox_emit('k', 'e', 't', '1'), outbox_emit('k', 'd', 't', '1', deliver_after => '2100-01-01')")
    run(c, "SELECT outbox_cancel('d'), idem_complete('k', '1'), idem_forget('other')")
    assert run(c, "SELECT relation::regclass::text FROM pg_locks WHERE mode = 'SIReadLock' AND pid = pg_backend_pid()") == []
    c.commit()


@pytest.mark.parametrize("encoding, bytes, sqlstate", [("SQL_ASCII", "61ff", "22021"), ("EUC_JP", "61a9a1", "22P05")])
def test_what_has_no_form_in_utf8_is_refused(server, encoding, bytes, sqlstate):
    """Nobody could take such an event, and all others would wait behind it."""
    db = make_database(server, options=f"ENCODING '{encoding}' LOCALE 'C' TEMPLATE template0")
    text = f"convert_from('\\x{bytes}', '{encoding}')"
    json = f"to_jsonb({text})"
    for arguments in (f"{text}, 't', '1'", f"'k', {text}, '1'", f"'k', 't', {json}", f"'k', 't', '1', {text}",
                      f"'k', 't', '1', headers => jsonb_build_object('h', {text})", f"'k', 't', '1', scope => {text}",
                      f"'k', 't', {json}, deliver_after => '2100-01-01'"):
        assert error_code(db.sql, f"SELECT outbox_emit(NULL, {arguments})") == sqlstate, arguments
    c = db.connect()
    assert error_code(run, c, f"SELECT idem_begin({text}, '\\x00'::bytea), outbox_emit({text}, 'k', 't', '1')") == sqlstate
    db.sql("SELECT outbox_create_destination('d', 'pull', '{}')")
    db.sql("SELECT outbox_emit(NULL, 'k', 't', '1')")
    assert db.value("SELECT event_key FROM outbox_fetch('d')") == "k"
    db.close()
