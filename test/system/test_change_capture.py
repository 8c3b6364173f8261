"""A change-data-capture pipeline reads the log beside the workers, as docs/scaling-out.md tells."""
import hashlib
import uuid

import pytest

from conftest import Database, cluster, eventually, run
from rings import bytes_of, fetch_all, ring, turn_until

COLUMNS = """id bigint, txid xid8, created_at timestamptz, deliver_after timestamptz, event_number integer, scope text, idempotency_key text, event_key text,
             event_type text, ordering_key text, payload jsonb, headers jsonb, arrival bigint DEFAULT nextval('arrivals')"""


@pytest.fixture(scope="module")
def logical():
    with cluster("wal_level = logical", "max_worker_processes = 16", "retrysafe.outbox_retention = 0") as server:
        yield server


@pytest.fixture
def far(logical, db):
    """A database that subscribes to what is inserted into the pieces of the log."""
    name = f"{db.name}_far"
    db.sql(f"CREATE DATABASE {name}")
    db.sql(f"ALTER DATABASE {name} SET search_path = retrysafe")
    database = Database(logical, name)
    database.sql("CREATE SCHEMA retrysafe; CREATE SEQUENCE retrysafe.arrivals")
    for piece in (1, 2, 3):
        database.sql(f"CREATE TABLE retrysafe.outbox_log_{piece} ({COLUMNS})")
    db.sql("CREATE PUBLICATION events FOR TABLE outbox_log_1, outbox_log_2, outbox_log_3 WITH (publish = 'insert')")
    db.sql("SELECT pg_create_logical_replication_slot('pipeline', 'pgoutput')")
    database.sql(f"CREATE SUBSCRIPTION pipeline CONNECTION '{logical.dsn(db.name)}' PUBLICATION events"
                 " WITH (create_slot = false, copy_data = false)")
    yield database
    database.sql("DROP SUBSCRIPTION pipeline")
    db.sql(f"DROP DATABASE {name}")


@pytest.fixture
def server(logical):
    return logical


def arrived(far):
    return [key for (key,) in far.sql("""
        SELECT coalesce(event_key, idempotency_key || '~' || event_number) FROM (SELECT * FROM retrysafe.outbox_log_1 UNION ALL SELECT * FROM retrysafe.outbox_log_2
                               UNION ALL SELECT * FROM retrysafe.outbox_log_3) AS log ORDER BY arrival""")]


def test_a_subscriber_gets_what_was_committed_in_the_order_of_commits(db, far):
    first, second, third = (db.connect(autocommit=False) for _ in range(3))
    run(first, "SELECT outbox_emit(NULL, 'late', 't', '{}')")
    run(second, "SELECT outbox_emit(NULL, 'rolled back', 't', '{}')")
    run(third, "SELECT outbox_emit(NULL, 'early', 't', '{}'), outbox_emit(NULL, 'early too', 't', '{}')")
    third.commit()
    second.rollback()
    first.commit()
    run(second, "SELECT idem_begin('k', 'digest'), outbox_emit('k', NULL, 't', '{}'), outbox_emit('k', NULL, 't', '{}'), idem_complete('k')")
    second.commit()
    db.sql("SELECT outbox_emit(NULL, 'last', 't', '{}')")
    eventually(lambda: "last" in arrived(far))
    assert arrived(far) == ["early", "early too", "late", "k~1", "k~2", "last"]


def test_an_event_key_that_is_emitted_again_may_come_twice_with_one_content(db, far):
    emit = "outbox_emit('k', 'a', 't', '{\"n\": 1}', 'o')"
    db.sql(f"SELECT idem_begin('k', 'digest'), {emit}, {emit}, idem_complete('k')")
    db.sql("SELECT outbox_emit(NULL, 'last', 't', '{}')")
    eventually(lambda: "last" in arrived(far))
    assert arrived(far) == ["a", "a", "last"]
    assert far.value("""SELECT count(DISTINCT (scope, event_key, event_type, ordering_key, payload, headers)) FROM retrysafe.outbox_log_1
                          WHERE event_key = 'a'""") == 1
    assert db.value("SELECT count(*) FROM outbox_events WHERE event_key = 'a'") == 1


def test_what_is_removed_here_stays_there(db, far):
    db.sql("SELECT outbox_create_destination('d', 'pull')")
    db.sql("SELECT outbox_emit(NULL, 'a', 't', '{}')")
    piece = ring(db, "log")[0][0]
    assert fetch_all(db, "d") == ["a"]
    turn_until(db, "log", lambda: fetch_all(db, "d") == [] and bytes_of(db, "log", piece) == 0)
    db.sql("SELECT outbox_emit(NULL, 'b', 't', '{}')")
    eventually(lambda: "b" in arrived(far))
    assert arrived(far) == ["a", "b"]


def test_a_reader_can_compute_the_event_id(db):
    db.sql("SELECT outbox_create_destination('d', 'pull')")
    db.sql("SELECT outbox_emit(NULL, 'order-1 ✓', 't', '{}', scope => 'shop')")
    log, = db.sql("SELECT log FROM outbox_eras ORDER BY era DESC LIMIT 1")[0]
    digest = bytearray(hashlib.sha256(uuid.UUID(log).bytes + "shop".encode() + b"\0" + "order-1 ✓".encode()).digest()[:16])
    digest[6] = digest[6] & 0x0F | 0x80     # version 8
    digest[8] = digest[8] & 0x3F | 0x80     # variant of RFC 9562
    assert str(uuid.UUID(bytes=bytes(digest))) == db.value("SELECT event_id FROM outbox_events")


def test_a_publication_of_all_tables_is_in_nobodys_way(db):
    """The server refuses to change or remove rows of a published table that have nothing to be told apart by."""
    assert db.sql("""SELECT c.relname FROM pg_class c JOIN pg_depend d ON d.classid = 'pg_class'::regclass AND d.objid = c.oid
                      WHERE d.deptype = 'e' AND c.relkind = 'r' AND c.relreplident <> 'f'
                        AND NOT EXISTS (SELECT FROM pg_index i WHERE i.indrelid = c.oid
                                           AND (i.indisreplident OR (c.relreplident = 'd' AND i.indisprimary)))""") == []
    db.sql("CREATE PUBLICATION everything FOR ALL TABLES")
    db.sql("SELECT idem_begin('k', 'digest'), idem_complete('k')")
    for _ in range(2):
        db.sql("SELECT idem_begin('short', 'digest', ttl => '1us'), idem_complete('short')")
    assert db.value("SELECT idem_forget('k')")
    db.sql("SELECT outbox_create_destination('d', 'pull', max_attempts => 1)")
    db.sql("SELECT outbox_emit(NULL, 'cancelled', 't', '{}', deliver_after => '2100-01-01')")
    assert db.value("SELECT outbox_cancel('cancelled')")
    db.sql("SELECT outbox_emit(NULL, 'later', 't', '{}', deliver_after => clock_timestamp() + '100ms')")
    eventually(lambda: db.value("SELECT count(*) FROM outbox_events") == 1)
    batch, event_id = db.sql("SELECT batch, event_id FROM outbox_fetch('d')")[0]
    db.sql("SELECT outbox_record(%s, jsonb_build_object(%s, '{\"status\": \"dead\"}'::jsonb))", batch, event_id)
    assert db.value("SELECT outbox_retry('d')") == 1
    assert fetch_all(db, "d") == ["later"]
    db.sql("SELECT outbox_alter_destination('d', shards => 2)")
    db.sql("SELECT outbox_consent('fork')")
    assert db.value("SELECT outbox_drop_destination('d')")
