"""What the extension promises to whoever sees it first: requests sent again over real concurrent connections."""
import pytest

from conftest import eventually, run
from payments import begin, complete, in_threads, insert_order, make_orders, orders, pay


@pytest.fixture
def shop(db):
    make_orders(db)
    return db


def counts(db):
    """(records, events, orders)"""
    return db.sql("""SELECT (SELECT count(*) FROM idempotency_records), (SELECT count(*) FROM outbox_events),
                            (SELECT count(*) FROM public.orders)""")[0]


def test_a1_twenty_concurrent_requests(shop):
    connections = [shop.connect(autocommit=False) for _ in range(20)]
    answers = in_threads([lambda c=c: pay(c, "demo-001", work="SELECT pg_sleep(0.05)")[1] for c in connections])
    assert len(answers) == 20 and len(set(answers)) == 1
    assert counts(shop) == (1, 1, 1)
    assert shop.value("SELECT idempotency_key FROM outbox_events") == "demo-001"


def test_a2_a_new_key_adds_one_to_each(shop):
    connection = shop.connect(autocommit=False)
    pay(connection, "demo-001")
    assert counts(shop) == (1, 1, 1)
    pay(connection, "demo-002")
    assert counts(shop) == (2, 2, 2)


def test_a3_other_parameters_are_a_conflict(shop):
    connection = shop.connect(autocommit=False)
    pay(connection, "demo-001", "amount=10")
    others = [shop.connect(autocommit=False) for _ in range(5)]
    assert in_threads([lambda c=c: pay(c, "demo-001", "amount=11")[0] for c in others]) == ["conflict"] * 5
    assert counts(shop) == (1, 1, 1)


@pytest.mark.parametrize("digest, outcome", [("a", "replay"), ("b", "conflict")])
def test_a4_the_transaction_goes_on_after_an_outcome(shop, digest, outcome):
    connection = shop.connect(autocommit=False)
    pay(connection, "demo-001", "a")
    assert begin(connection, "demo-001", digest)[0] == outcome
    insert_order(connection, "unrelated")
    assert begin(connection, "demo-002", digest)[0] == "new"
    complete(connection, "demo-002", insert_order(connection, "demo-002"))
    connection.commit()
    assert counts(shop) == (2, 1, 3)


def test_a5_two_events_of_one_request(shop):
    def request():
        connection = shop.connect(autocommit=False)
        if begin(connection, "demo-001")[0] == "new":
            order = insert_order(connection, "demo-001")
            for event_key, event_type in ((f"order-{order}", "order.paid"), (f"audit-{order}", "audit.order_paid")):
                run(connection, "SELECT outbox_emit('demo-001', %s, %s, '{}')", event_key, event_type)
            complete(connection, "demo-001", order)
        connection.commit()

    in_threads([request] * 5)
    request()
    assert counts(shop) == (1, 2, 1)
    types = [row[0] for row in shop.sql("SELECT event_type FROM outbox_events ORDER BY id")]
    assert types == ["order.paid", "audit.order_paid"]


def test_a8_after_retention_a_key_counts_as_new(shop):
    connection = shop.connect(autocommit=False)
    run(connection, "SET retrysafe.idem_retention = '1s'")
    connection.commit()
    first = pay(connection, "demo-001")
    assert pay(connection, "demo-001") == ("replay", first[1])
    eventually(lambda: shop.value("SELECT expires_at <= clock_timestamp() FROM idempotency_records"))
    again = pay(connection, "demo-001")
    assert again[0] == "new" and again[1] != first[1]
    assert orders(shop) == 2
    assert shop.value("SELECT count(*) FROM idempotency_records") == 1
