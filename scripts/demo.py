"""What scripts/demo shows, on the server in the folder that it is given."""
import collections
import concurrent.futures
import contextlib
import json
import pathlib
import statistics
import sys
import threading
import time

import psycopg2

TOP = pathlib.Path(__file__).resolve().parents[1]
sys.path.insert(0, str(TOP / "test/system"))
import ending  # noqa: E402
from receiver import Receiver  # noqa: E402

CLUSTER = pathlib.Path(sys.argv[1])
PORT = int((CLUSTER / "data/postmaster.pid").read_text().splitlines()[3])

SHOP = """
CREATE TABLE orders (id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY, customer text NOT NULL, amount numeric NOT NULL)
"""

# The other side: what a service behind a webhook keeps, and the table that a destination of kind postgres fills.
DOWNSTREAM = """
CREATE TABLE parcels (order_id bigint NOT NULL);
CREATE TABLE retrysafe_inbox (
  event_id uuid PRIMARY KEY, event_type text, payload jsonb, received_at timestamptz NOT NULL DEFAULT clock_timestamp());
CREATE ROLE courier LOGIN;
GRANT INSERT ON retrysafe_inbox TO courier
"""

ADA = {"customer": "ada", "amount": 12.50}
BOB = {"customer": "bob", "amount": 8}

failures = []


def title(text):
    print(f"\n{text}", flush=True)


def note(text):
    print(f"     {text}", flush=True)


def promise(holds, text):
    print(f"   {'✓' if holds else '✗'} {text}", flush=True)
    if not holds:
        failures.append(text)


def connect(database="shop"):
    return psycopg2.connect(host=str(CLUSTER), port=PORT, user="postgres", dbname=database)


@contextlib.contextmanager
def session(database="shop"):
    """A cursor on a connection of its own, without a transaction block."""
    with contextlib.closing(connect(database)) as connection:
        connection.autocommit = True
        with connection.cursor() as cursor:
            yield cursor


def rows(query, *parameters, database="shop"):
    with session(database) as sql:
        sql.execute(query, parameters or None)
        return sql.fetchall() if sql.description else None


def value(query, *parameters, database="shop"):
    return rows(query, *parameters, database=database)[0][0]


def eventually(condition, seconds=60):
    """Polls until the condition is true; false when it does not become so. A server that restarts is waited for."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        with contextlib.suppress(psycopg2.OperationalError):
            if condition():
                return True
        time.sleep(0.01)
    return False


def counts():
    return rows("""SELECT (SELECT count(*) FROM orders), (SELECT count(*) FROM idempotency_records),
                          (SELECT count(*) FROM outbox_events)""")[0]


Answer = collections.namedtuple("Answer", "outcome body committing")


def place_order(connection, key, request, *event_types, work_ms=0):
    """The request handler: begin; if the key is new do the work, emit, save the answer; commit."""
    with connection.cursor() as sql:
        sql.execute("SELECT outcome, response FROM idem_begin(%s, idem_hash(%s))", (key, json.dumps(request)))
        outcome, body = sql.fetchone()
        if outcome == "new":
            sql.execute("INSERT INTO orders (customer, amount) VALUES (%s, %s) RETURNING id, pg_sleep(%s)",
                        (request["customer"], request["amount"], work_ms / 1000))
            body = {"order_id": sql.fetchone()[0]}
            for event_type in event_types:
                sql.execute("SELECT outbox_emit(%s, NULL, %s, %s, ordering_key => %s)",
                            (key, event_type, json.dumps(body), f"order-{body['order_id']}"))
            sql.execute("SELECT idem_complete(%s, %s)", (key, json.dumps(body)))
        committing = time.monotonic()
        connection.commit()
    return Answer(outcome, body, committing)


def place_order_once(key, request, *event_types):
    with contextlib.closing(connect()) as connection:
        return place_order(connection, key, request, *event_types)


class Shipping:
    """A service behind a webhook: it remembers the id of each event in the transaction that does the work."""

    Delivery = collections.namedtuple("Delivery", "event_id order_id first at")

    def __init__(self):
        self.deliveries = []
        self.receiver = Receiver()
        self.receiver.behave(self.receive)

    def receive(self, request):
        event_id, order_id = request.header("webhook-id"), request.json()["order_id"]
        try:
            with contextlib.closing(connect("downstream")) as connection, connection, connection.cursor() as sql:
                sql.execute("SELECT inbox_accept('shipping', %s)", (event_id,))
                first = sql.fetchone()[0]
                if first:
                    sql.execute("INSERT INTO parcels VALUES (%s)", (order_id,))
        except psycopg2.OperationalError:
            return 503
        self.deliveries.append(self.Delivery(event_id, order_id, first, request.at))
        return 204

    def of(self, answer):
        return [d for d in self.deliveries if d.order_id == answer.body["order_id"]]


def install():
    for database, script in (("shop", SHOP), ("downstream", DOWNSTREAM)):
        rows(f"CREATE DATABASE {database}", database="postgres")
        rows(f"ALTER DATABASE {database} SET search_path = public, retrysafe", database="postgres")
        rows("CREATE SCHEMA retrysafe; CREATE EXTENSION retrysafe SCHEMA retrysafe", database=database)
        rows(script, database=database)


def one_key():
    title('1. Twenty clients send the same order with the key demo-001 at the same time; the work takes 50 ms.')
    start = threading.Barrier(20)

    def client(connection):
        start.wait()
        return place_order(connection, "demo-001", ADA, "order.placed", work_ms=50)

    connections = [connect() for _ in range(20)]
    began = time.monotonic()
    with concurrent.futures.ThreadPoolExecutor(20) as pool:
        answers = list(pool.map(client, connections))
    took = time.monotonic() - began
    for connection in connections:
        connection.close()
    outcomes = collections.Counter(a.outcome for a in answers)
    bodies = {json.dumps(a.body) for a in answers}
    note(f"{', '.join(f'{n} × {outcome}' for outcome, n in sorted(outcomes.items()))}, {took * 1000:.0f} ms in all")
    promise(len(bodies) == 1, f"20 answers, all the same: {' '.join(sorted(bodies))}")
    orders, answers_saved, events = counts()
    promise(outcomes == {"new": 1, "replay": 19} and (orders, answers_saved, events) == (1, 1, 1),
            f"in the database: {orders} order, {answers_saved} saved answer, {events} event")


def conflict():
    title("2. The key demo-001 again, but with an amount of 99.")
    before = counts()
    with contextlib.closing(connect()) as connection:
        refused = place_order(connection, "demo-001", ADA | {"amount": 99}, "order.placed")
    promise(refused.outcome == "conflict" and refused.body is None and counts() == before,
            f"{refused.outcome}; still {counts()[0]} order and {counts()[2]} event")


def two_events():
    title("3. One request, two events: order.placed and audit.order_placed. It is sent twice, as after a lost answer.")
    before = counts()
    answers = [place_order_once("demo-002", BOB, "order.placed", "audit.order_placed") for _ in range(2)]
    orders, _, events = (now - then for now, then in zip(counts(), before))
    promise([a.outcome for a in answers] == ["new", "replay"] and answers[0].body == answers[1].body
            and (orders, events) == (1, 2),
            f"first {answers[0].outcome}, then {answers[1].outcome}: {orders} more order and {events} more events")


def publishing(shipping):
    title("4. The worker publishes: order.placed to a webhook, audit.order_placed into a table of a second database.")
    rows("SELECT outbox_create_destination('shipping', 'http', %s, 'earliest', '{order.placed}')",
         json.dumps({"url": shipping.receiver.url}))
    rows("SELECT outbox_create_destination('audit', 'postgres', %s, 'earliest', '{audit.order_placed}')",
         json.dumps({"host": "127.0.0.1", "port": PORT, "dbname": "downstream", "user": "courier"}))

    def audited():
        return value("SELECT count(*) FROM retrysafe_inbox", database="downstream")

    eventually(lambda: len(shipping.deliveries) >= 2 and audited() >= 1)
    promise((len(shipping.deliveries), audited()) == (2, 1),
            f"what waited has arrived: {len(shipping.deliveries)} requests at the webhook, {audited()} row over there")

    answers = []
    for i in range(50):
        answers.append(place_order_once(f"more-{i}", BOB, "order.placed", "audit.order_placed"))
        eventually(lambda: shipping.of(answers[-1]))
    eventually(lambda: audited() >= 51)
    took = [delivery.at - a.committing for a in answers for delivery in shipping.of(a)]
    promise((len(shipping.deliveries), audited()) == (52, 51),
            f"50 more orders one by one, each event once: from COMMIT (with its fsync) to the webhook "
            f"{statistics.median(took) * 1000:.1f} ms in the median" if took else "50 more orders: nothing arrived")
    ids = {str(i) for i, in rows("SELECT event_id FROM outbox_events WHERE event_type = 'order.placed'")}
    promise({d.event_id for d in shipping.deliveries} == ids, "the ids there are those in outbox_events")


def worker():
    """The process that works for both destinations."""
    found = rows("SELECT pid FROM outbox_workers WHERE process = 'worker' AND database = 'shop' AND shards = 2")
    return found[0][0] if found else None


def arm_the_next_worker():
    """Only the next worker of this database kills itself at the named place: its successor must not."""
    before = worker()
    rows("ALTER DATABASE shop SET retrysafe.fault_points = 'worker.after_ack=kill'")
    rows("SELECT pg_terminate_backend(%s)", before)
    eventually(lambda: worker() not in (None, before))
    rows("ALTER DATABASE shop RESET retrysafe.fault_points")
    return worker()


def killed_worker(shipping):
    title("5. The worst moment: the webhook has done the work and said so; the worker dies before it notes that down.")
    eventually(lambda: worker() is not None)
    victim = arm_the_next_worker()
    answer = place_order_once("demo-003", ADA, "order.placed")
    eventually(lambda: len(shipping.of(answer)) >= 2)
    log = (CLUSTER / "log").read_text(errors="replace")
    promise(f"(PID {victim}) was terminated by signal 9" in log,
            f"worker {victim} got SIGKILL (and PostgreSQL recovered, as after every killed process)")
    deliveries = shipping.of(answer)
    if len(deliveries) < 2:
        return promise(False, f"the event arrived {len(deliveries)} time")
    note(f"event {deliveries[0].event_id} arrived")
    note(f"event {deliveries[1].event_id} arrived again {deliveries[1].at - deliveries[0].at:.2f} s later")
    promise(len({d.event_id for d in deliveries}) == 1, "the copy has the same event id")
    parcels = value("SELECT count(*) FROM parcels WHERE order_id = %s", answer.body["order_id"], database="downstream")
    promise(parcels == 1 and [d.first for d in deliveries] == [True, False],
            f"inbox_accept said {', then '.join(str(d.first).lower() for d in deliveries)}: {parcels} parcel")

    eventually(lambda: value("SELECT bool_and(sent_at IS NOT NULL) FROM outbox_events"))
    lost = value("SELECT count(*) FROM outbox_events WHERE sent_at IS NULL")
    orders, parcels = counts()[0], value("SELECT count(*) FROM parcels", database="downstream")
    promise(lost == 0 and orders == parcels, f"in the end: {orders} orders, {parcels} parcels, {lost} events left to send")


def main():
    sys.stdout.reconfigure(encoding="utf-8")
    ending.by_signals()
    install()
    version = value("SHOW server_version").split()[0]
    print(f"retrysafe {value('SELECT extversion FROM pg_extension WHERE extname = %s', 'retrysafe')} on PostgreSQL {version}")
    one_key()
    conflict()
    two_events()
    shipping = Shipping()
    with shipping.receiver:
        publishing(shipping)
        killed_worker(shipping)
    title("Everything came out as promised." if not failures else f"NOT AS PROMISED: {'; '.join(failures)}")
    return 1 if failures else 0


try:
    sys.exit(main())
except ending.Ended as end:
    sys.exit(end.exit_code)
