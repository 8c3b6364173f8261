"""Rings that turn all the time under everything that writers do at once.

Writers overlap, abort, roll back to savepoints, prepare, use keys and event keys again, in all isolation levels, while the
rings turn as fast as they can: retention is nothing or a second, a piece is as old as it gets after one. The truth is in
tables that each transaction writes beside. At the end one effect per key and lifetime is there, every committed event was
delivered and nothing else, in order within an ordering key, and no event key had two positions at once.
"""
import collections
import itertools
import json
import random
import threading
import time
import traceback

import psycopg2
import pytest

import null_destination
from conftest import cluster, eventually, load_factor, run
from rings import ring

SECONDS = 20 * load_factor()
WRITERS = 12
HOT = 5
LIFETIME = 2  # seconds, of a key in the ring

SETUP = f"""
CREATE TABLE hot (key text PRIMARY KEY, n bigint NOT NULL DEFAULT 0);
INSERT INTO hot SELECT 'h' || i FROM generate_series(1, {HOT}) i;
CREATE TABLE effects (id bigint GENERATED ALWAYS AS IDENTITY, key text, begun timestamptz, completed timestamptz);
CREATE TABLE truth (event_key text, position bigint, ordering_key text, n bigint, kind text);
CREATE SEQUENCE number;
"""
PERMITTED = {"40001", "40P01"}


@pytest.fixture(scope="module")
def server():
    with cluster("retrysafe.workers_per_database = 0", "retrysafe.outbox_retention = 0", "retrysafe.outbox_rotation_age = 0",
                 f"retrysafe.idem_retention = {LIFETIME}s", "retrysafe.idem_rotation_age = 1s", "max_prepared_transactions = 50",
                 "max_connections = 60", "deadlock_timeout = 200ms",
                 "autovacuum_naptime = 1s", "autovacuum_vacuum_threshold = 20", "autovacuum_analyze_threshold = 20") as own:
        yield own


class Run:
    def __init__(self, db, seed):
        self.db, self.seed = db, seed
        self.until = time.monotonic() + SECONDS
        self.errors, self.counts = [], collections.Counter()
        self.replays, self.delivered = [], collections.defaultdict(list)
        self.recent = collections.deque(["d0"], maxlen=20)  # event keys that others use again
        self.prepared = itertools.count()
        self.writing, self.turning = True, True
        self.threads = []
        db.sql(SETUP)

    def spawn(self, target, *arguments):
        def guarded():
            try:
                target(*arguments)
            except Exception as error:  # noqa: BLE001 - for the main thread
                self.errors.append(f"{target.__name__}: {error!r} {traceback.format_exc()}")
                self.until = 0
        thread = threading.Thread(target=guarded)
        self.threads.append(thread)
        thread.start()

    def join(self):
        for thread in self.threads:
            thread.join()
        self.threads = []
        assert self.errors == []

    # --- writers ---

    def writer(self, number):
        r = random.Random(f"{self.seed}/{number}")
        c = self.db.connect()
        while time.monotonic() < self.until:
            isolation = r.choice(("READ COMMITTED", "READ COMMITTED", "REPEATABLE READ", "SERIALIZABLE"))
            q = c.cursor()
            q.execute(f"BEGIN ISOLATION LEVEL {isolation}")
            try:
                replays = []
                self.work(q, r, replays)
                self.end(q, r, replays)
            except psycopg2.Error as error:
                self.counts[error.pgcode] += 1
                if error.pgcode not in PERMITTED:
                    raise
                q.execute("ROLLBACK")

    def work(self, q, r, replays):
        for _ in range(r.choice((1, 1, 2))):
            choice = r.random()
            savepoint = r.random() < 0.25
            if savepoint:
                q.execute("SAVEPOINT s")
            if choice < 0.4:
                self.request(q, r, replays)
            elif choice < 0.6:
                self.ordered(q, r)
            elif choice < 0.7:
                self.delayed(q, r)
            elif choice < 0.75:
                self.emit(q, f"rare{r.randint(1, 10**9)}", "rare", f"r{r.randint(1, 4)}", kind="rare")
            elif choice < 0.9:
                key = f"again{r.randint(1, HOT)}" if r.random() < 0.6 else r.choice(tuple(self.recent))
                self.emit(q, key, kind="again")
            else:
                self.emit(q, self.fresh(q), kind="once")
            if savepoint and r.random() < 0.6:
                q.execute("ROLLBACK TO s")
                self.counts["rolled back to a savepoint"] += 1
                if r.random() < 0.5:
                    self.emit(q, f"again{r.randint(1, HOT)}", kind="again")
            if r.random() < 0.1:
                time.sleep(r.random() * 0.02)

    def fresh(self, q):
        q.execute("SELECT 'e' || nextval('number')")
        return q.fetchone()[0]

    def emit(self, q, key, type="t", ordering_key=None, n=None, kind="once", idempotency_key=None):
        payload = json.dumps({"n": n}) if n else "{}"
        q.execute("SELECT outbox_emit(%s, %s, %s, %s, %s)", (idempotency_key, key, type, payload, ordering_key))
        position = q.fetchone()[0]
        q.execute("INSERT INTO truth VALUES (%s, %s, %s, %s, %s)", (key, position, ordering_key, n, kind))

    def ordered(self, q, r):
        hot = f"h{r.randint(1, HOT)}"
        q.execute("UPDATE hot SET n = n + 1 WHERE key = %s RETURNING n", (hot,))
        n = q.fetchone()[0]
        self.emit(q, self.fresh(q), ordering_key=hot, n=n)

    def delayed(self, q, r):
        key = "d" + self.fresh(q)
        q.execute("SELECT outbox_emit(NULL, %s, 't', '{}', deliver_after => clock_timestamp() + %s)",
                  (key, f"{r.randint(1, 300)} ms"))
        q.execute("INSERT INTO truth VALUES (%s, NULL, NULL, NULL, 'delayed')", (key,))
        self.recent.append(key)

    def request(self, q, r, replays):
        """ttl keys live longer than the run, in a table of their own; the others in the ring, for LIFETIME."""
        ttl = r.random() < 0.3
        key = f"{'ttl' if ttl else 'ring'}{r.randint(1, 3) if r.random() < 0.5 else r.randint(4, 500)}"
        q.execute("SELECT outcome, response FROM " + ("idem_begin" if r.random() < 0.7 else "idem_try_begin")
                  + "(%s, 'h', ttl => %s)", (key, "1 hour" if ttl else None))
        outcome, response = q.fetchone()
        self.counts[outcome] += 1
        if outcome == "replay":
            replays.append((key, response))
        elif outcome == "new":
            q.execute("INSERT INTO effects (key, begun) VALUES (%s, clock_timestamp()) RETURNING id", (key,))
            effect = q.fetchone()[0]
            self.emit(q, f"{key}/{effect}", kind="once", idempotency_key=key)
            q.execute("SELECT idem_complete(%s, %s)", (key, str(effect)))
            q.execute("UPDATE effects SET completed = clock_timestamp() WHERE id = %s", (effect,))
        else:
            assert outcome == "in_progress", outcome

    def end(self, q, r, replays):
        choice = r.random()
        if choice < 0.15:
            q.execute("ROLLBACK")
            self.counts["aborted"] += 1
        elif choice < 0.25:
            name = f"p{next(self.prepared)}"
            q.execute(f"PREPARE TRANSACTION '{name}'")
            time.sleep(r.random() * 0.1)
            q.execute(f"{r.choice(('COMMIT', 'COMMIT', 'ROLLBACK'))} PREPARED '{name}'")
            self.counts["prepared"] += 1
        else:
            q.execute("COMMIT")
            self.replays += replays

    # --- what turns and looks ---

    def cleaner(self, function):
        c = self.db.connect()
        while self.turning:
            self.counts[function] += run(c, f"SELECT {function}()")[0][0]

    def settings(self):
        """Retention changes while the rings turn."""
        r = random.Random(f"{self.seed}/settings")
        while time.monotonic() < self.until:
            self.db.server.set("retrysafe.outbox_retention", r.choice(("0", "0", "1s")))
            time.sleep(1)

    def consumer(self, destination, number):
        r = random.Random(f"{self.seed}/{destination}/{number}")
        c = self.db.connect()
        while self.turning:
            rows = run(c, "SELECT batch, id, event_key, ordering_key, payload FROM outbox_fetch(%s, %s, lease => '1 minute')",
                       destination, r.choice((1, 10, 200)))
            if not rows:
                time.sleep(0.01)
                continue
            self.delivered[destination] += [row[1:] for row in rows]
            if r.random() < 0.2:
                run(c, "SELECT outbox_ack(%s, %s)", rows[0][0], rows[len(rows) // 2][1])
            if r.random() < 0.3:
                time.sleep(r.random() * 0.05)
            run(c, "SELECT outbox_ack(%s)", rows[0][0])
            if r.random() < 0.1:
                run(c, "SELECT outbox_release(%s)", rows[0][0])

    def watcher(self):
        """At no time has an event key two positions, or a key two answers that are alive."""
        c = self.db.connect()
        while time.monotonic() < self.until:
            # A retired piece is not looked at any more.
            assert run(c, """SELECT event_key FROM outbox_log
                              WHERE tableoid NOT IN (SELECT ('outbox_log_' || (generation - 1) % 3 + 1)::regclass
                                                       FROM ring_pieces WHERE ring = 'log' AND retired)
                              GROUP BY event_key HAVING count(*) > 1""") == []
            assert run(c, """SELECT key FROM idem_records WHERE expires_at > clock_timestamp()
                              GROUP BY key HAVING count(*) > 1""") == []
            run(c, "SELECT count(*), count(sent_at) FROM outbox_events")
            run(c, "SELECT * FROM ring_status")
            run(c, "SELECT * FROM outbox_status")


def test_rings_turn_under_load(db):
    seed = random.SystemRandom().randrange(10**9)
    print(f"seed {seed}")  # of a failure: put it in above
    w = Run(db, seed)
    worker = null_destination.NullDestination(db, "worker")
    db.sql("SELECT outbox_create_destination('pull', 'pull', shards => 3)")
    db.sql("SELECT outbox_create_destination('rare', 'pull', shards => 4, event_types => '{rare}')")
    db.sql("SELECT outbox_run_worker()")
    for number in range(WRITERS):
        w.spawn(w.writer, number)
    w.spawn(w.settings)
    w.spawn(w.watcher)
    writers = list(w.threads)
    w.spawn(w.cleaner, "outbox_cleanup")
    w.spawn(w.cleaner, "idem_cleanup")
    for number in range(2):
        w.spawn(w.consumer, "pull", number)
    w.spawn(w.consumer, "rare", 0)
    for thread in writers:
        thread.join()
    db.server.set("retrysafe.outbox_retention", "0")

    truth = db.sql("SELECT DISTINCT event_key, position, ordering_key, n, kind FROM truth")
    all_keys = {row[0] for row in truth}
    try:
        if not w.errors:
            eventually(lambda: all_keys <= {row[1] for row in w.delivered["pull"]} and all_keys <= set(worker.delivered()), 60,
                       "events are lost")
            # When all is delivered the rings empty themselves, but for what came last.
            try:
                eventually(lambda: db.value("SELECT count(*) FROM outbox_log") == 0, 30)
            except AssertionError:
                where = db.sql("""SELECT d.name, h.*, outbox_passed_position(h.destination, h.shard), b.*
                                    FROM outbox_shards h JOIN outbox_destinations d USING (destination),
                                         LATERAL (SELECT * FROM outbox_batches n WHERE n.destination = h.destination
                                                     AND n.shard = h.shard ORDER BY seq DESC LIMIT 1) AS b""")
                raise AssertionError(f"the log stays: {db.sql('SELECT * FROM ring_pieces')} {ring(db, 'log')} {where}") from None
    finally:
        w.turning = False
        w.join()
        print(dict(w.counts), dict(db.sql("SELECT ring, max(generation) FROM ring_pieces GROUP BY ring")))

    assert {row[1] for row in w.delivered["pull"]} == all_keys, "what was rolled back was delivered"
    assert set(worker.delivered()) == all_keys
    assert {row[1] for row in w.delivered["rare"]} == {row[0] for row in truth if row[4] == "rare"}
    for destination in ("pull", "rare"):
        positions = [row[0] for row in w.delivered[destination]]
        assert len(set(positions)) == len(positions), "delivered twice, though nobody lost a lease"
    position_of = {row[0]: row[1] for row in truth if row[4] == "once"}
    for position, key, _, _ in w.delivered["pull"]:
        assert position_of.get(key, position) == position
    assert {row[1] for row in truth if row[1]} <= {row[0] for row in w.delivered["pull"]}, "a position that was told and lost"

    for rows in (w.delivered["pull"],):
        order = collections.defaultdict(list)
        for _, _, ordering_key, payload in rows:
            if ordering_key and ordering_key.startswith("h"):
                order[ordering_key].append(payload["n"])
        assert len(order) == HOT and all(numbers == sorted(numbers) for numbers in order.values())
    first = {}
    for i, key in enumerate(worker.delivered()):
        first.setdefault(key, i)
    for hot in range(1, HOT + 1):
        keys = [key for _, key in sorted((n, key) for key, _, ordering_key, n, _ in truth if ordering_key == f"h{hot}")]
        assert [first[key] for key in keys] == sorted(first[key] for key in keys)

    # One effect per key and lifetime.
    effects = collections.defaultdict(list)
    ids = {}
    for i, key, begun, completed in db.sql("SELECT id, key, begun, completed FROM effects ORDER BY begun"):
        effects[key].append((begun, completed))
        ids[i] = key
    for key, history in effects.items():
        if key.startswith("ttl"):
            assert len(history) == 1, (key, history)
        for (_, completed), (begun, _) in zip(history, history[1:]):
            # Completed is noted a moment after the record was.
            assert (begun - completed).total_seconds() > LIFETIME - 0.2, (key, completed, begun)
    for key, response in w.replays:
        assert ids.get(response) == key, "an answer whose work was rolled back"
    generations = dict(db.sql("SELECT ring, max(generation) FROM ring_pieces GROUP BY ring"))
    assert generations["log"] >= SECONDS / 2 and generations["progress"] >= 5 and generations["records"] >= SECONDS / 6, generations
    for what in ("new", "replay", "prepared", "aborted", "rolled back to a savepoint"):
        assert w.counts[what] > 10, w.counts
    assert db.value("SELECT sum(n_dead_tup) FROM pg_stat_user_tables WHERE relname ~ '^outbox_(log|batches|windows)_[123]$'") \
        <= w.counts["40001"] + 100
