"""What scripts/demo --with KIND shows, on the server in the folder that it is given: a real broker of that kind."""
import contextlib
import importlib
import json
import pathlib
import subprocess
import sys
import time

import psycopg2

TOP = pathlib.Path(__file__).resolve().parents[1]
sys.path.insert(0, str(TOP / "test/system"))
import ending  # noqa: E402
from brokers.broker import Broker  # noqa: E402

CLUSTER, KIND = pathlib.Path(sys.argv[1]), sys.argv[2]
PORT = int((CLUSTER / "data/postmaster.pid").read_text().splitlines()[3])
ORDERS = 10  # before the broker is killed, and as many while it is down

failures = []


def title(text):
    print(f"\n{text}", flush=True)


def note(text):
    print(f"     {text}", flush=True)


def promise(holds, text):
    print(f"   {'✓' if holds else '✗'} {text}", flush=True)
    if not holds:
        failures.append(text)


def rows(query, *parameters, database="shop"):
    with contextlib.closing(psycopg2.connect(host=str(CLUSTER), port=PORT, user="postgres", dbname=database)) as connection:
        connection.autocommit = True
        with connection.cursor() as sql:
            sql.execute(query, parameters or None)
            return sql.fetchall() if sql.description else None


def eventually(condition, seconds=60):
    """Polls until the condition is true and returns its value; None when it does not become so."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if value := condition():
            return value
        time.sleep(0.02)
    return None


def place_orders(first):
    """Each in one transaction: the row, and two events about it under one ordering key."""
    for number in range(first, first + ORDERS):
        rows("""WITH placed AS (INSERT INTO orders (customer) VALUES (%s) RETURNING id)
                SELECT outbox_emit(NULL, format('order-%%s:%%s', id, what), 'order.' || what,
                                   jsonb_build_object('order_id', id), 'order-' || id)
                  FROM placed, unnest(ARRAY['placed', 'paid']) WITH ORDINALITY AS step (what, n) ORDER BY n""",
             f"customer {number}")


def status():
    names = ("state", "delivered", "backlog", "parked_retry", "parked_blocked", "last_error")
    return dict(zip(names, rows(f"SELECT {', '.join(names)} FROM outbox_status WHERE name = 'stream'")[0]))


def all_sent():
    now = status()
    return now["backlog"] == now["parked_retry"] == now["parked_blocked"] == 0


def backs_off():
    now = status()
    return now if now["state"] == "backing off" else None


def show(broker):
    options = broker.options()
    title(f"1. A destination of kind {KIND}, and {ORDERS} orders: each commits with two events.")
    note(json.dumps({name: "…" if "password" in name else value for name, value in options.items()}, ensure_ascii=False))
    rows("SELECT outbox_create_destination('stream', %s, %s, backoff => '200 ms', backoff_max => '1 s')", KIND, json.dumps(options))
    place_orders(0)
    promise(eventually(all_sent), f"the broker has acknowledged {status()['delivered']} events")

    title(f"2. The broker gets SIGKILL, and {ORDERS} more orders are placed meanwhile.")
    broker.kill()
    place_orders(ORDERS)
    promise(True, f"they commit all the same: {rows('SELECT count(*) FROM orders')[0][0]} orders in the database")
    now = eventually(backs_off) or status()
    promise(now["state"] == "backing off", f"outbox_status: {now['state']}, {now['backlog']} events wait")
    note(now["last_error"])

    title("3. The broker is started again.")
    broker.start()
    promise(eventually(all_sent), f"what waited has arrived: {status()['delivered']} events acknowledged")

    title(f"4. What {broker.reader} reads from the broker:")
    messages = broker.read()
    for message in messages[:3] + messages[-3:]:
        note(f"{message.id}  {message.ordering_key:8}  {message.type:12}  {message.payload}")
    ids = {event_id for event_id, in rows("SELECT event_id::text FROM outbox_events")}
    first = {}
    for message in messages:
        first.setdefault(message.id, message)
    promise(first.keys() == ids, f"{len(first)} events, {len(messages) - len(first)} of them more than once, none missing")
    steps = {}
    for message in first.values():
        steps.setdefault(message.ordering_key, []).append(message.type)
    promise(all(types == ["order.placed", "order.paid"] for types in steps.values()),
            "of every order the event placed came before the event paid")


def main():
    sys.stdout.reconfigure(encoding="utf-8")
    ending.by_signals()
    with ending.deferred():
        module = importlib.import_module(f"brokers.{KIND}")
    kind, = (c for c in vars(module).values() if isinstance(c, type) and issubclass(c, Broker) and c.__module__ == module.__name__)
    rows("CREATE DATABASE shop", database="postgres")
    rows("ALTER DATABASE shop SET search_path = retrysafe, public", database="postgres")
    rows("CREATE SCHEMA retrysafe")
    rows("CREATE EXTENSION retrysafe SCHEMA retrysafe")
    rows("CREATE TABLE public.orders (id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY, customer text NOT NULL)")
    note(f"Starting a broker of kind {KIND} …")
    with contextlib.ExitStack() as stack:
        try:
            broker = stack.enter_context(kind())
        except (OSError, RuntimeError, AssertionError, subprocess.SubprocessError) as error:
            sys.exit(f"demo: no broker of kind {KIND}: {str(error).rstrip()}")
        show(broker)
    print()
    print("Everything came out as promised." if not failures else f"{len(failures)} promises did not hold.")
    return 1 if failures else 0


try:
    sys.exit(main())
except ending.Ended as end:
    sys.exit(end.exit_code)
