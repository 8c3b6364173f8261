"""Windows that are left half read while the destination is away: what was recorded does not come again, and no outage leaves
one row behind another."""
import json

import pytest

from conftest import eventually, run
from pull_client import STALE, Client, create, emit, expire, refused

ROWS = "SELECT (SELECT count(*) FROM outbox_windows), (SELECT count(*) FROM outbox_batches)"


def away(client):
    """What a relay records when nothing got through."""
    outcomes = {str(row[1]): {"status": "not tried"} for row in client.rows}
    run(client.connection, "SELECT outbox_record(%s, %s, 'down', '0 s')", client.batch, json.dumps(outcomes))


def comes(client, *keys):
    eventually(lambda: client.fetch() == list(keys))


def half_read(db, *keys, later="t"):
    """The first of them is recorded, the others found the destination away, and a later one is there."""
    create(db, backoff="1 ms", backoff_max="1 ms", event_types=["t"])
    emit(db, "first", *keys, ordering_key="k")
    client = Client(db)
    comes(client, "first", *keys)
    client.ack("first")
    comes(client, *keys)
    away(client)
    emit(db, "later", ordering_key="k", event_type=later)
    return client


def test_a_window_that_is_read_on_after_all(db):
    """A smaller batch does not reach its end, and is acknowledged."""
    client = half_read(db, "a", "b")
    comes(client, "a", "b", "later")
    assert client.fetch(1) == ["a"]
    client.ack()
    assert client.drain() == ["b", "later"]


def test_a_batch_of_before_is_acknowledged(db):
    """Two programs share a session. What the later batch brought again is recorded, so that it is of no use any more."""
    client = half_read(db, "a", "b")
    before = client.batch
    comes(client, "a", "b", "later")
    assert client.ack(batch=before) == 2
    refused(STALE, client.ack)
    assert client.drain() == ["later"]


def test_nothing_is_wanted_behind_a_batch_of_before(db):
    """What is stored of the way past it takes the place of the window that is of no use any more."""
    client = half_read(db, "a", "b", later="unwanted")
    before = client.batch
    comes(client, "a", "b")
    assert client.ack(batch=before) == 2
    run(client.connection, "SET retrysafe.fault_points = 'reader.store_progress'")
    assert client.fetch() == []
    assert db.value("SELECT backlog FROM outbox_status") == 0
    emit(db, "next")
    assert client.drain() == ["next"]


def test_a_parked_event_gets_through(db):
    """It ends the back-off, and the window is read on."""
    create(db, backoff="1 ms", backoff_max="1 ms")
    emit(db, "parked")
    emit(db, "first", "a", "b", ordering_key="k")
    client = Client(db)
    comes(client, "parked", "first", "a", "b")
    client.nack("parked", retry_after="100 ms")
    client.ack("first")
    eventually(lambda: client.fetch()[-2:] == ["a", "b"])
    away(client)
    emit(db, "later", ordering_key="k")
    comes(client, "parked", "a", "b", "later")
    client.ack("parked")
    assert client.drain() == ["a", "b", "later"]


def test_an_outage_leaves_no_row_behind_another(db):
    client = half_read(db, "a")
    comes(client, "a", "later")
    before = db.sql(ROWS)
    keys = ["a", "later"]
    for number in range(20):
        away(client)
        keys.append(f"e{number}")
        emit(db, keys[-1])
        comes(client, *keys)
    assert db.sql(ROWS) == before


@pytest.mark.parametrize("keys", [("a", "refused"), ("refused", "a")])
def test_a_refused_event_beside_one_that_an_outage_holds_up(db, keys):
    """Progress that stands before it does not count it, and progress that gets past it counts it once."""
    create(db, backoff="1 ms", backoff_max="1 ms")
    emit(db, "first", *keys)
    client = Client(db)
    comes(client, "first", *keys)
    client.nack("refused", retry_after="1 hour")
    client.ack("first")
    for _ in range(2):
        comes(client, "a")
        away(client)
    comes(client, "a")
    before = db.sql(ROWS)
    for _ in range(20):
        away(client)
        comes(client, "a")
    assert db.sql(ROWS) == before
    client.ack()
    assert db.value("SELECT max(total_parked) FROM outbox_batches") == 1


def test_a_parked_event_that_is_all_that_is_wanted(db):
    """Whoever fetches has passed over nothing yet, since each is a session of its own."""
    create(db, event_types=["t", "u"])
    emit(db, "a", ordering_key="k")
    client = Client(db)
    comes(client, "a")
    client.nack("a")
    db.sql("SELECT outbox_alter_destination('d', event_types => ARRAY['u'])")
    client.connection.close()
    expire(db)
    assert Client(db).fetch() == ["a"]
