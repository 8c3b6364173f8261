"""A small shop for the tests of idempotent writes.

PAY(key, digest) is: begin, insert an order, emit one event, complete with the order's id, commit.
"""
import threading

import psycopg2
import pytest

import closing
from conftest import Pending, run

ISOLATION_LEVELS = ("REPEATABLE READ", "SERIALIZABLE")


def make_orders(db):
    db.sql("CREATE TABLE public.orders (id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY, key text)")


def announce_orders(db):
    """From now on each order has an event `placed-ID`, whichever way it is made."""
    db.sql("""
      CREATE FUNCTION public.announce() RETURNS trigger LANGUAGE plpgsql AS $$
      BEGIN
        PERFORM retrysafe.outbox_emit(NULL, 'placed-' || NEW.id, 'order.placed', to_jsonb(NEW));
        RETURN NULL;
      END $$;
      CREATE TRIGGER announce AFTER INSERT ON public.orders FOR EACH ROW EXECUTE FUNCTION public.announce()""")


def assert_orders_in_balance(db):
    """Each order that there is was delivered, and none that was rolled back."""
    placed = [f"placed-{order}" for (order,) in db.sql("SELECT id FROM public.orders")]
    closing.balance(db, "all", closing.drain(db), committed=placed)
    events = {key for (key,) in db.sql("SELECT event_key FROM outbox_events WHERE event_type = 'order.placed'")}
    assert events == set(placed)


def begin(connection, key, digest="a", function="idem_begin", **options):
    """(outcome, response, status) of a begin on a synchronous connection."""
    extra = "".join(f", {name} => %s" for name in options)
    return run(connection, f"SELECT * FROM {function}(%s, %s{extra})", key, digest, *options.values())[0]


def insert_order(connection, key):
    return run(connection, "INSERT INTO public.orders (key) VALUES (%s) RETURNING id", key)[0][0]


def complete(connection, key, order):
    run(connection, "SELECT idem_complete(%s, jsonb_build_object('id', %s))", key, order)


def pay(connection, key, digest="a", work="", **options):
    """PAY in one transaction of a connection that does not autocommit; (outcome, order id)."""
    outcome, response, _ = begin(connection, key, digest, **options)
    if outcome == "new":
        if work:
            run(connection, work)
        order = insert_order(connection, key)
        run(connection, "SELECT outbox_emit(%s, NULL, 'order.paid', %s)", key, '{"paid": true}')
        complete(connection, key, order)
    else:
        order = response and response["id"]
    connection.commit()
    return outcome, order


def pay_in_new_session(db, key, digest="a"):
    connection = db.connect(autocommit=False)
    try:
        return pay(connection, key, digest)
    finally:
        connection.close()


def error_of(function, *arguments):
    """The SQLSTATE that a call fails with."""
    with pytest.raises(psycopg2.Error) as caught:
        function(*arguments)
    return caught.value.pgcode


def orders(db, key=None):
    return db.value("SELECT count(*) FROM public.orders WHERE %s::text IS NULL OR key = %s", key, key)


def in_threads(functions):
    """Runs them at the same time; returns results in order and re-raises the first error."""
    results, errors = [None] * len(functions), []
    barrier = threading.Barrier(len(functions))

    def call(i, function):
        try:
            barrier.wait()
            results[i] = function()
        except BaseException as error:  # noqa: BLE001 - handed to the main thread
            errors.append(error)

    threads = [threading.Thread(target=call, args=pair) for pair in enumerate(functions)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return results


@pytest.fixture
def shop(db):
    make_orders(db)
    announce_orders(db)
    yield db
    assert_orders_in_balance(db)


def begin_pending(db, key, digest="a", *before):
    return Pending(db, *before, "BEGIN", f"SELECT outcome FROM idem_begin('{key}', '{digest}')")
