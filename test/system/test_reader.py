"""The reader of the log against everything that writers do at once.

Writers overlap, abort, roll back to savepoints, commit late, prepare; every committed event must reach every
destination that wants it, nothing else may, and the events of one ordering key must arrive in order. The truth is a
table that each transaction writes beside its events.

The test must be able to fail: builds with fault points are also run with a piece of the reader left out, and then
events have to get lost.
"""
import collections
import itertools
import random
import threading
import time

import psycopg2
import pytest

from conftest import load_factor, run

HOT_KEYS = 6

SETUP = """
CREATE TABLE hot (key text PRIMARY KEY, n bigint NOT NULL DEFAULT 0);
INSERT INTO hot SELECT 'h' || i FROM generate_series(1, %d) i;
CREATE TABLE truth (event_key text PRIMARY KEY, ordering_key text, n bigint, at timestamptz);
CREATE SEQUENCE event_number;
-- An event of a hot key: its writers are serialised by the row lock, and count.
CREATE FUNCTION emit_ordered(ordering_key text, event_type text) RETURNS text LANGUAGE plpgsql AS $$
DECLARE
  k text := 'e' || nextval('event_number');
  c bigint;
BEGIN
  UPDATE hot SET n = n + 1 WHERE key = ordering_key RETURNING n INTO c;
  INSERT INTO truth VALUES (k, ordering_key, c, clock_timestamp());
  PERFORM outbox_emit(NULL, k, event_type, jsonb_build_object('n', c), ordering_key);
  RETURN k;
END $$;
-- An event without order; the emit comes before anything else is written, so that it is what gives the transaction
-- its number.
CREATE FUNCTION emit_free(event_type text) RETURNS text LANGUAGE plpgsql AS $$
DECLARE
  k text := 'e' || nextval('event_number');
BEGIN
  PERFORM outbox_emit(NULL, k, event_type, '{}');
  INSERT INTO truth VALUES (k, NULL, NULL, clock_timestamp());
  RETURN k;
END $$;
""" % HOT_KEYS



class Destination:
    """What arrived at one destination, and what has to."""

    def __init__(self, name, since=None, must_have=()):
        self.name = name
        self.since = since  # events written after this time have to arrive; None: all
        self.must_have = must_have
        self.not_before = None  # events known to be committed before this time must not arrive
        self.lock = threading.Lock()
        self.arrived = []

    def deliver(self, rows):
        with self.lock:
            self.arrived.extend(rows)


class Simulation:
    def __init__(self, db, seed, faults="", writers=12):
        self.db, self.seed, self.faults, self.writer_count = db, seed, faults, writers
        self.stop_writing = threading.Event()
        self.stop_reading = threading.Event()
        self.errors = []
        self.destinations = []
        self.committed_by = {}  # event key → when its commit was known
        self.counts = collections.Counter()
        self.threads = []
        self.prepared = itertools.count()
        db.sql(SETUP)

    def connect(self, autocommit=True):
        c = self.db.connect(autocommit=autocommit)
        if self.faults:
            run(c, f"SET retrysafe.fault_points = '{self.faults}'")
            if not autocommit:
                c.commit()
        return c

    def spawn(self, target, *arguments):
        def guarded():
            try:
                target(*arguments)
            except Exception as error:  # reported by the main thread
                self.errors.append(f"{target.__name__}: {error!r}")
                self.stop_writing.set()
        thread = threading.Thread(target=guarded)
        self.threads.append(thread)
        thread.start()
        return thread

    # --- writers ---

    def writer(self, number):
        r = random.Random(f"{self.seed}/{number}")
        c = self.connect(autocommit=False)
        while not self.stop_writing.is_set():
            q = c.cursor()
            prepare = r.random() < 0.08
            keys = []
            if prepare:
                name = f"p{next(self.prepared)}"
                c.rollback()
                c.autocommit = True
                q.execute("BEGIN")
            hot = f"h{r.randint(1, HOT_KEYS)}"
            for _ in range(r.choice((1, 1, 2, 5))):
                keys.append(self.emit(q, r, hot))
                if r.random() < 0.2:
                    time.sleep(r.random() * 0.01)
            if r.random() < 0.3:
                q.execute("SAVEPOINT s")
                inner = [self.emit(q, r, hot) for _ in range(r.randint(1, 3))]
                if r.random() < 0.5:
                    q.execute("ROLLBACK TO SAVEPOINT s")
                    self.counts["rolled back to a savepoint"] += len(inner)
                else:
                    q.execute("RELEASE SAVEPOINT s")
                    keys += inner
                if r.random() < 0.5:
                    keys.append(self.emit(q, r, hot))
            if r.random() < 0.15:
                time.sleep(r.random() * (0.2 if r.random() < 0.2 else 0.03))  # a late commit
            commit = r.random() < 0.85
            if prepare:
                q.execute(f"PREPARE TRANSACTION '{name}'")
                time.sleep(r.random() * 0.1)
                q.execute(f"{'COMMIT' if commit else 'ROLLBACK'} PREPARED '{name}'")
                c.autocommit = False
                self.counts["prepared"] += 1
            elif commit:
                c.commit()
            else:
                c.rollback()
            if commit:
                now = time.time()
                for key in keys:
                    self.committed_by[key] = now
                self.counts["committed"] += len(keys)
            else:
                self.counts["aborted"] += len(keys)
        c.close()

    @staticmethod
    def emit(q, r, hot):
        event_type = r.choice(("order.placed", "order.paid", "audit"))
        if r.random() < 0.6:
            q.execute("SELECT emit_ordered(%s, %s)", (hot, event_type))
        else:
            q.execute("SELECT emit_free(%s)", (event_type,))
        return q.fetchone()[0]

    # --- destinations ---

    def create(self, name, since=None, emit_around=False, **options):
        """Makes a destination; with `emit_around`, in the middle of a transaction that emits."""
        c = self.connect(autocommit=False)
        q = c.cursor()
        must_have = []
        if emit_around:
            q.execute("SELECT emit_free('order.placed')")
            must_have.append(q.fetchone()[0])
            time.sleep(0.05)  # others get higher numbers and end
        started = time.time()
        arguments = {"start_at": "now", "shards": 1, "backoff": "10 ms", **options}
        text = ", ".join(f"{k} => %s" for k in arguments)
        q.execute(f"SELECT outbox_create_destination(%s, 'pull', {text})", [name, *arguments.values()])
        q.execute("SELECT clock_timestamp()")
        now = q.fetchone()[0]
        if emit_around:
            q.execute("SELECT emit_free('order.placed')")
            must_have.append(q.fetchone()[0])
        c.commit()
        c.close()
        destination = Destination(name, since=now if arguments["start_at"] == "now" else None, must_have=must_have)
        if arguments["start_at"] == "now":
            destination.not_before = started
        self.destinations.append(destination)
        return destination

    # --- readers ---

    def reader(self, destination, number, careless=False):
        """Fetches and acknowledges; a careless one loses its connection, acknowledges prefixes and gives events
        back."""
        r = random.Random(f"{self.seed}/{destination.name}/{number}")
        c = self.connect()
        while not self.stop_reading.is_set():
            rows = run(c, "SELECT batch, id, event_key, ordering_key, (payload->>'n')::bigint, event_id"
                          " FROM outbox_fetch(%s, %s, lease => %s)",
                       destination.name, r.choice((1, 7, 50, 200)), "500 ms" if careless else "30 s")
            if not rows:
                time.sleep(0.005)
                continue
            if careless and r.random() < 0.03:
                c.close()  # while the batch is leased
                c = self.connect()
                self.counts["lost connections"] += 1
                continue
            batch = rows[0][0]
            refused = set()
            try:
                for _, id, event_key, ordering_key, n, event_id in rows:
                    if ordering_key in refused and ordering_key is not None:
                        continue
                    if careless and r.random() < 0.02:
                        run(c, "SELECT outbox_nack(%s, %s, 'refused', '5 ms')", batch, event_id)
                        refused.add(ordering_key)
                        self.counts["given back"] += 1
                        continue
                    destination.deliver([(event_key, ordering_key, n)])
                    if careless and r.random() < 0.02:
                        run(c, "SELECT outbox_ack(%s, %s)", batch, id)
                run(c, "SELECT outbox_ack(%s)", batch)
            except psycopg2.Error as error:
                # With a fault, events come that the client was not told of: its batch is refused.
                if error.pgcode != "RS210" or not (careless or self.faults):
                    raise
                self.counts["stale"] += 1
        c.close()

    # --- the run ---

    def run(self, seconds, quiet_timeout=60):
        self.create("start", shards=3)
        self.create("first", start_at="earliest")
        careless = self.create("careless", shards=4, max_attempts=1000)
        for d in self.destinations:
            for number in range(2):
                self.spawn(self.reader, d, number, d is careless)
        writers = [self.spawn(self.writer, n) for n in range(self.writer_count)]
        deadline = time.monotonic() + seconds
        number = 0
        while time.monotonic() < deadline and not self.errors:
            time.sleep(seconds / 8)
            number += 1
            new = [self.create(f"now{number}", shards=1 + number % 3),
                   self.create(f"own{number}", emit_around=True, shards=1 + number % 2)]
            if number == 3:
                new.append(self.create("earliest", start_at="earliest", shards=2))
                new.append(self.create("orders", start_at="earliest", event_types=["order.*"]))
            for d in new:
                self.spawn(self.reader, d, 0)
        self.stop_writing.set()
        for thread in writers:
            thread.join()
        # What is left is delivered; what is lost never comes: wait until nothing has come for a while.
        arrived, since, limit = -1, time.monotonic(), time.monotonic() + quiet_timeout
        while time.monotonic() < limit and not self.errors:
            if not any(self.missing().values()):
                break
            count = sum(len(d.arrived) for d in self.destinations)
            if count != arrived:
                arrived, since = count, time.monotonic()
            elif time.monotonic() - since > 2:
                break
            time.sleep(0.05)
        self.stop_reading.set()
        for thread in self.threads:
            thread.join()
        assert not self.errors, self.errors[:3]

    def truth(self):
        if not hasattr(self, "_truth") or not self.stop_writing.is_set():
            self._truth = {k: (o, n, at) for k, o, n, at in self.db.sql(
                "SELECT t.event_key, t.ordering_key, t.n, t.at FROM truth t")}
            self._types = dict(self.db.sql("SELECT event_key, event_type FROM outbox_log"))
        return self._truth

    def missing(self):
        """Per destination, the events that have to be there and are not."""
        result = {}
        for d in self.destinations:
            wanted = {k for k, (_, _, at) in self.truth().items() if d.since is None or at > d.since}
            if d.name == "orders":
                wanted = {k for k in wanted if self._types[k].startswith("order.")}
            with d.lock:
                result[d.name] = (wanted | set(d.must_have)) - {a[0] for a in d.arrived}
        return result

    def check(self):
        truth = self.truth()
        for d in self.destinations:
            careless = d.name == "careless"
            seen, last = set(), {}
            for key, ordering_key, n in d.arrived:
                assert key in truth, f"{d.name}: {key} was rolled back"
                if key in seen:
                    assert careless, f"{d.name}: {key} came twice"
                    self.counts["duplicates"] += 1
                    continue
                seen.add(key)
                if d.not_before is not None:
                    assert self.committed_by.get(key, d.not_before) >= d.not_before, f"{d.name}: {key} is older"
                if ordering_key is not None:
                    assert last.get(ordering_key, 0) < n, f"{d.name}: {ordering_key} went back from {last[ordering_key]} to {n}"
                    last[ordering_key] = n
            self.counts["delivered"] += len(seen)
        missing = {name: len(keys) for name, keys in self.missing().items() if keys}
        assert not missing, missing


@pytest.mark.parametrize("seed", [1])
def test_every_committed_event_arrives_once_and_in_order(db, seed):
    simulation = Simulation(db, seed)
    simulation.run(15 * load_factor())
    simulation.check()
    print(dict(simulation.counts))
    for what in ("committed", "aborted", "prepared", "rolled back to a savepoint", "lost connections", "given back"):
        assert simulation.counts[what] > 0, what


def test_the_same_where_what_is_left_of_a_window_goes_with_the_next(db):
    fault_points(db)
    simulation = Simulation(db, 4, "reader.reopen_window")
    simulation.run(8 * load_factor())
    simulation.check()


def fault_points(db):
    try:
        db.sql("SET retrysafe.fault_points = ''")
        db.sql("SHOW retrysafe.fault_points")
    except psycopg2.Error:
        pytest.skip("the build has no fault points")


def test_without_the_range_above_xmax_events_get_lost(db):
    fault_points(db)
    simulation = Simulation(db, 2, "reader.no_late_range")
    simulation.run(5)
    lost = sum(len(keys) for keys in simulation.missing().values())
    print(f"lost {lost} of {simulation.counts['committed']}")
    assert lost > 0


def test_with_positions_drawn_before_the_transaction_id_events_get_lost(db):
    fault_points(db)
    simulation = Simulation(db, 3, "emit.position_before_transaction")
    simulation.run(5)
    lost = sum(len(keys) for keys in simulation.missing().values())
    print(f"lost {lost} of {simulation.counts['committed']}")
    assert lost > 0


def first_event_arrives(db, faults):
    """A destination made before the very first emit."""
    c = db.connect()
    run(c, f"SET retrysafe.fault_points = '{faults}'")
    run(c, "SELECT outbox_create_destination('d', 'pull')")
    run(c, "SELECT outbox_emit(NULL, 'first', 't', '{}')")
    return [row[0] for row in run(c, "SELECT event_key FROM outbox_fetch('d')")] == ["first"]


@pytest.mark.parametrize("faults", ["", "reader.fresh_sequence"])
def test_the_first_event_of_a_log(db, faults):
    fault_points(db)
    assert first_event_arrives(db, faults) == (faults == "")


def own_events_arrive(db, faults):
    """A destination made by a transaction that emits before and after it, while a younger transaction ends."""
    c = db.connect(autocommit=False)
    run(c, f"SET retrysafe.fault_points = '{faults}'")
    run(c, "SELECT outbox_emit(NULL, 'before', 't', '{}')")
    db.sql("SELECT outbox_emit(NULL, 'other', 't', '{}')")
    run(c, "SELECT outbox_create_destination('d', 'pull')")
    run(c, "SELECT outbox_emit(NULL, 'after', 't', '{}')")
    c.commit()
    return [row[0] for row in run(c, "SELECT event_key FROM outbox_fetch('d')")] == ["before", "after"]


@pytest.mark.parametrize("faults", ["", "reader.no_own_xid"])
def test_a_destination_gets_the_events_of_its_own_transaction(db, faults):
    fault_points(db)
    assert own_events_arrive(db, faults) == (faults == ""), faults
