"""Writers that do everything at once: savepoints, exception blocks, aborts, prepared transactions, every isolation level,
hot and cold keys, replays and conflicts, event keys that are used again, delayed and large events."""
import collections
import contextlib
import itertools
import json
import random
import threading
import time

import psycopg2

from ledger import COMMITTED, ROLLED_BACK, Transaction, digest
from player import Player

HOT = 5       # ordering keys, and keys of requests, that all writers share
TTL = "1 day"  # of the answers that live as long as the run
LIFETIME = 4   # seconds, of the others: they are in the ring
HASTY = 0.3    # of the transactions wait for nothing
LATE = 0.004   # of them commit late

SETUP = f"""
CREATE TABLE done (name text PRIMARY KEY);
CREATE TABLE hot (key text PRIMARY KEY, n bigint NOT NULL DEFAULT 0) WITH (fillfactor = 10);
INSERT INTO hot SELECT 'h' || i FROM generate_series(1, {HOT}) i;
CREATE TABLE effects (id bigint GENERATED ALWAYS AS IDENTITY, key text, hash text, name text, begun timestamptz, completed timestamptz);
CREATE FUNCTION emit_and_fail(event_key text, payload jsonb) RETURNS void LANGUAGE plpgsql AS $$
BEGIN
  PERFORM retrysafe.outbox_emit(NULL, event_key, 'failed', payload);
  PERFORM 1 / 0;
EXCEPTION WHEN division_by_zero THEN
END $$;
"""
PATIENCE = 3    # seconds that anybody waits for a lock

# What a client has to be ready for: serialisation, deadlocks, timeouts, being cancelled or ended, a full disk.
EXPECTED = {"40001", "40P01", "55P03", "57014", "57P01", "57P02", "57P03", "53100"}


def short_lived(key):
    return key.startswith("short")


class Writer(Player):
    def __init__(self, site, ledger, seed, number, rate):
        super().__init__(f"writer {number}")
        self.site, self.db, self.ledger, self.number, self.rate = site, site.db, ledger, number, rate
        self.r = random.Random(f"{seed}/writer/{number}")
        self.again = collections.deque(maxlen=20)  # requests whose answer got lost
        self.held_up = []                          # by what it need not wait for
        self._numbers = itertools.count(1)

    def play(self):
        while not self.stop.is_set():
            try:
                connection = self.db.server.connect(self.db.name)
            except psycopg2.Error:
                self.stop.wait(0.1)
                continue
            try:
                with connection.cursor() as q:
                    q.execute(f"SET lock_timeout = '{PATIENCE}s'")
                    while not self.stop.wait(self.r.expovariate(self.rate)):
                        if not self.site.quiet.is_set():
                            self.transaction(connection, q)
            except psycopg2.Error:
                self.counts["lost connections"] += 1
            finally:
                connection.close()

    def transaction(self, connection, q, work=None, waits=None):
        """`waits`: for the disk and the standby; None: either."""
        if work is None:
            work = self.late if self.r.random() < LATE else self.work
        if waits is None:
            waits = work == self.late or self.r.random() > HASTY
        waits = (waits and not self.site.haste.is_set()) or not self.site.without_waiting.enter()
        try:
            self.one_transaction(connection, q, work, waits)
        finally:
            if not waits:
                self.site.without_waiting.leave()

    def one_transaction(self, connection, q, work, waits):
        t = Transaction(f"w{self.number}-{next(self._numbers)}", time.monotonic(), waits=waits)
        asked = []
        try:
            isolation = self.r.choice(("READ COMMITTED", "READ COMMITTED", "REPEATABLE READ", "SERIALIZABLE"))
            q.execute(f"BEGIN ISOLATION LEVEL {isolation}")
            if not waits:
                q.execute("SET LOCAL synchronous_commit = off")
                self.counts["without waiting"] += 1
            work(q, t)
            q.execute("INSERT INTO done VALUES (%s)", (t.name,))
            self.end(q, t, asked)
        except psycopg2.Error as error:
            code = error.pgcode
            self.counts[code or "connection lost"] += 1
            gone = connection.closed or code is None or code.startswith("57P")
            if not gone and code not in EXPECTED and not asked:
                self.unexpected.append(f"{t.name}: {code} {error}")
            if asked and (gone or asked[-1] == "prepared"):
                self.again += [effect[:2] for effect in t.effects]
                self.counts["unknown"] += 1
            else:
                if not asked:
                    self.ledger.asks(t)
                self.ledger.told(t, ROLLED_BACK)
            if gone:
                raise
            q.execute("ROLLBACK")

    def end(self, q, t, asked):
        """How it ends; `asked` says how far that came, in case of an error."""
        choice = self.r.random()
        self.ledger.asks(t)
        if choice < 0.1:
            q.execute("ROLLBACK")
            end = ROLLED_BACK
            self.counts["rolled back"] += 1
        elif choice < 0.2:
            asked.append("prepare")
            q.execute(f"PREPARE TRANSACTION '{t.name}'")
            asked.append("prepared")
            self.counts["prepared"] += 1
            end = self.r.choice((COMMITTED, COMMITTED, ROLLED_BACK))
            self.stop.wait(self.r.random() * 0.2)
            q.execute(f"{'COMMIT' if end == COMMITTED else 'ROLLBACK'} PREPARED '{t.name}'")
        else:
            asked.append("commit")
            q.execute("COMMIT")
            end = COMMITTED
        self.ledger.told(t, end)
        self.counts[end] += 1

    # --- what one transaction does ---

    def work(self, q, t):
        if self.again and self.r.random() < 0.7:
            key, request_hash = self.again.popleft()
            self.request(q, t, key, request_hash)
            self.counts["sent again"] += 1
        for _ in range(self.r.choice((1, 1, 2, 3))):
            mark = t.mark() if self.r.random() < 0.25 else None
            if mark:
                q.execute("SAVEPOINT s")
            self.step(q, t)
            if mark and self.r.random() < 0.5:
                q.execute("ROLLBACK TO s")
                t.back_to(mark)
                self.counts["rolled back to a savepoint"] += 1
            if self.r.random() < 0.1:
                time.sleep(self.r.random() * 0.05)

    def late(self, q, t):
        """It commits when the log has gone on for long; nobody waits for it."""
        self.emit(q, t, self.fresh(t), "late")
        self.counts["late"] += 1
        self.stop.wait(self.r.uniform(2, 25))

    def step(self, q, t):
        choice = self.r.random()
        if choice < 0.35:
            self.any_request(q, t)
        elif choice < 0.6:
            self.ordered(q, t)
        elif choice < 0.68:
            self.emit(q, t, self.fresh(t), "delayed", deliver_after=f"{self.r.randint(1, 3000)} ms")
        elif choice < 0.78:
            again = self.r.randint(1, 40)
            self.emit(q, t, f"again{again}", "again", {"again": again})
        elif choice < 0.83:
            q.execute("SELECT emit_and_fail(%s, %s)", (f"{self.fresh(t)}-failed", json.dumps({"tx": t.name})))
            self.counts["exception blocks"] += 1
        elif choice < 0.85:
            self.emit(q, t, self.fresh(t), "large", {"tx": t.name, "pad": "x" * self.r.randint(10_000, 200_000)})
        else:
            ordering_key = f"cold{self.r.randint(1, 1000)}" if self.r.random() < 0.5 else None
            self.emit(q, t, self.fresh(t), "plain", ordering_key=ordering_key)

    @contextlib.contextmanager
    def of_its_own(self, t, key):
        """A call for a key that nobody else has waits for nobody: neither in vain nor in a circle."""
        began = time.monotonic()
        try:
            yield
            self.counts["calls for keys of their own"] += 1
        except psycopg2.Error as error:
            # A clock that is set ends time-outs early.
            if error.pgcode == "40P01" or error.pgcode == "55P03" and time.monotonic() > began + PATIENCE - 0.5:
                self.held_up.append(f"{t.name}: {key}: {error.pgcode} after {time.monotonic() - began:.1f} s")
            raise

    def fresh(self, t):
        return f"{t.name}/{len(t.events)}-{self.r.randint(0, 10**6)}"

    def emit(self, q, t, event_key, event_type, payload=None, ordering_key=None, n=None, idempotency_key=None, deliver_after=None):
        payload = payload or {"tx": t.name} | ({"n": n} if n else {})
        with contextlib.nullcontext() if event_type == "again" else self.of_its_own(t, event_key):
            q.execute("SELECT retrysafe.outbox_emit(%s, %s, %s, %s, %s, deliver_after => clock_timestamp() + %s::interval)",
                      (idempotency_key, event_key, event_type, json.dumps(payload), ordering_key, deliver_after))
        t.events.append([event_key, event_type, ordering_key, n, digest(payload)])

    def ordered(self, q, t, key=None):
        """The row lock gives transactions of one key an order, and the number tells it."""
        key = key or f"h{self.r.randint(1, HOT)}"
        for _ in range(self.r.choice((1, 1, 1, 3))):
            q.execute("UPDATE hot SET n = n + 1 WHERE key = %s RETURNING n", (key,))
            n = q.fetchone()[0]
            self.emit(q, t, self.fresh(t), "ordered", ordering_key=key, n=n)

    def any_request(self, q, t):
        choice, of_its_own = self.r.random(), contextlib.nullcontext()
        if choice < 0.1:
            key = f"short{self.r.randint(1, 20)}"
        elif choice < 0.3:
            key = f"hot{self.r.randint(1, HOT)}"
        elif choice < 0.6:
            key = f"warm{self.r.randint(1, 200)}"
        else:
            key = f"cold{self.number}-{self.r.randint(1, 10**9)}"
            of_its_own = self.of_its_own(t, key)
        with of_its_own:
            self.request(q, t, key, "other" if self.r.random() < 0.1 else "usual")

    def request(self, q, t, key, request_hash):
        function = "idem_begin" if self.r.random() < 0.7 else "idem_try_begin"
        q.execute(f"SELECT outcome, response FROM retrysafe.{function}(%s, %s, ttl => %s)",
                  (key, request_hash, None if short_lived(key) else TTL))
        outcome, response = q.fetchone()
        self.counts[outcome] += 1
        if outcome == "new":
            q.execute("INSERT INTO effects (key, hash, name, begun) VALUES (%s, %s, %s, clock_timestamp()) RETURNING id",
                      (key, request_hash, t.name))
            effect = q.fetchone()[0]
            self.emit(q, t, f"{key}/{t.name}", "request", idempotency_key=key)
            q.execute("SELECT retrysafe.idem_complete(%s, %s)", (key, json.dumps({"effect": effect})))
            if short_lived(key):
                q.execute("UPDATE effects SET completed = clock_timestamp() WHERE id = %s", (effect,))
            t.effects.append([key, request_hash, effect])
        elif outcome == "replay":
            # An answer of this very transaction is not one that was given.
            if [key, request_hash, response["effect"]] not in t.effects:
                t.replays.append([key, request_hash, response["effect"]])
        elif outcome == "conflict":
            t.conflicts.append([key, request_hash])


class Messenger(Writer):
    """Commits an event when it is told to."""

    def message(self, q, t):
        self.emit(q, t, f"{t.name}/message", "plain")

    def send(self, waits):
        """Whether it was committed."""
        before = self.counts[COMMITTED]
        connection = self.db.server.connect(self.db.name)
        try:
            with connection.cursor() as q:
                self.transaction(connection, q, self.message, waits)
        finally:
            connection.close()
        return self.counts[COMMITTED] > before

    def end(self, q, t, asked):
        self.ledger.asks(t)
        asked.append("commit")
        q.execute("COMMIT")
        self.ledger.told(t, COMMITTED)
        self.counts[COMMITTED] += 1


class Straggler(Messenger):
    """Has written everything, and commits when all others have long been through; with an odd number in two steps."""

    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.written, self.may_commit = threading.Event(), threading.Event()

    def play(self):
        connection = self.db.server.connect(self.db.name)
        with connection.cursor() as q:
            while not self.written.is_set():  # one of another may have made it fail
                self.transaction(connection, q, self.everything, waits=True)
        connection.close()

    def everything(self, q, t):
        self.message(q, t)
        self.ordered(q, t, f"h{1 + self.number % HOT}")
        self.request(q, t, f"straggler{self.number}", "usual")

    def end(self, q, t, asked):
        self.ledger.asks(t)
        if self.number % 2:
            q.execute(f"PREPARE TRANSACTION '{t.name}'")
        self.written.set()
        self.may_commit.wait()
        q.execute(f"COMMIT PREPARED '{t.name}'" if self.number % 2 else "COMMIT")
        self.ledger.told(t, COMMITTED)


class Resolver(Player):
    """Ends prepared transactions whose writer lost its connection, as a transaction manager does: in its own time."""

    def __init__(self, db, seed):
        super().__init__("resolver")
        self.db, self.seed = db, seed
        self.resolved = 0

    def play(self):
        while not self.stop.wait(1):
            try:
                self.resolve(lambda r: r.choice((3, 3, 10, 25)))
            except psycopg2.Error:
                pass

    def resolve(self, patience=lambda _: 0):
        """Those that are as many seconds old."""
        connection = self.db.server.connect(self.db.name)
        try:
            with connection.cursor() as q:
                q.execute("SELECT gid, extract(epoch FROM clock_timestamp() - prepared) FROM pg_prepared_xacts")
                for gid, age in q.fetchall():
                    r = random.Random(f"{self.seed}/{gid}")
                    end = r.choice(("COMMIT", "ROLLBACK"))
                    if age >= patience(r):
                        q.execute(f"{end} PREPARED '{gid}'")
                        self.resolved += 1
        finally:
            connection.close()
