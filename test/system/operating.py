"""What operators do, for tests: events that are emitted, fetched, drained and buried, a row of outbox_status, calls that are
refused."""
import psycopg2
import pytest

from conftest import eventually, run


def refused(connection, sqlstate, query, *parameters):
    with pytest.raises(psycopg2.Error) as error:
        run(connection, query, *parameters)
    assert error.value.pgcode == sqlstate, error.value
    return error.value


def emit(db, key, type="t", ordering_key=None, **more):
    return db.value("SELECT outbox_emit(NULL, %s, %s, '{}', %s)", key, type, ordering_key)


def fetch(db, destination, max_events=100, lease="1 minute"):
    """The batch's name and the event keys; (None, []) when there is nothing."""
    rows = db.sql("SELECT batch, event_key FROM outbox_fetch(%s, %s, lease => %s)", destination, max_events, lease)
    return (rows[0][0] if rows else None), [key for _, key in rows]


def drain(db, destination):
    """Fetches and acknowledges until nothing is left; returns the event keys in order of delivery."""
    keys = []
    while True:
        batch, some = fetch(db, destination)
        if not some:
            return keys
        keys += some
        db.sql("SELECT outbox_ack(%s)", batch)


def fail_first(db, destination, **arguments):
    """Gives the first event of the next batch back, and acknowledges what is left of the batch."""
    batch, event_id = db.sql("SELECT batch, event_id FROM outbox_fetch(%s)", destination)[0]
    names = "".join(f", {name} => %s" for name in arguments)
    db.sql(f"SELECT outbox_nack(%s, %s{names})", batch, event_id, *arguments.values())
    db.sql("SELECT outbox_ack(%s)", batch)


def bury(db, destination):
    """Makes dead letters of everything that is pending."""
    while rows := db.sql("SELECT batch, event_id FROM outbox_fetch(%s, 1)", destination):
        batch, event_id = rows[0]
        db.sql("SELECT outbox_nack(%s, %s, reason => 'refused: ' || %s, dead => true)", batch, event_id, event_id)
        db.sql("SELECT outbox_ack(%s)", batch)


def status(db, destination):
    with db.connect() as connection, connection.cursor() as cursor:
        cursor.execute("SELECT * FROM outbox_status WHERE name = %s", (destination,))
        return dict(zip([c.name for c in cursor.description], cursor.fetchone()))


def sent_at(db):
    return dict(db.sql("SELECT event_key, sent_at FROM outbox_events"))


def dead(db):
    return [row[0] for row in db.sql("SELECT event_key FROM outbox_dead_letters ORDER BY id")]


@pytest.fixture
def no_retention(server, db):
    """Nothing needs to be kept, and no worker removes it before the test does."""
    server.set("retrysafe.outbox_retention", "0")
    server.set("retrysafe.workers_per_database", "0")
    eventually(lambda: db.value("SHOW retrysafe.outbox_retention") == "0" and not db.value(
        "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND backend_type = 'retrysafe worker'"))
    yield
    server.set("retrysafe.outbox_retention", None)
    server.set("retrysafe.workers_per_database", None)


def kept(db):
    return [row[0] for row in db.sql("SELECT event_key FROM outbox_log ORDER BY id")]


def pass_a_minute(db):
    """For pieces that are sealed."""
    db.sql("UPDATE ring_pieces SET sealed_at = sealed_at - interval '1 minute'")


def clean_up(db, *destinations):
    """Each call takes one step; destinations look in between, as their clients do."""
    for _ in range(2):
        while db.value("SELECT outbox_cleanup()") > 0:
            pass
        for name in destinations:
            assert drain(db, name) == []
