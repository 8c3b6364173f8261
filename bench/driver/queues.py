"""Queues of events without the requests around them: ours twice, by the background worker and through the pull API, the
outbox of (b) and (b+), and PgQ. Each in a database of its own."""
import concurrent.futures
import os
import time

from driver import subjects
from driver.cluster import execute
from driver.load import pgbench
from driver.subjects import SQL

DEADLINE = 600


def wait(condition, what, timeout=DEADLINE, every=0.01):
    """Until `condition` is true."""
    deadline = time.monotonic() + timeout
    while not condition():
        if time.monotonic() > deadline:
            raise RuntimeError(f"waited {timeout} s for {what}")
        time.sleep(every)


def in_parallel(*jobs):
    """For what is not measured, such as filling tables: as many at a time as there are cores."""
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        try:
            for future in [pool.submit(job) for job in jobs]:
                future.result()
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise


class Queue:
    """A table that is claimed from. `label` and `database` tell apart what is of one subject."""

    def __init__(self, subject, file, batch, *, label=None, database=None, in_server=False):
        self.subject, self.file, self.batch, self.in_server = subject, file, batch, in_server
        self.label, self.database = label or subject.label, database or subject.database
        self.extension, self.schemas = subject.extension, subject.schemas
        self.emitted = self.pending = 0

    def create(self, cluster):
        self.subject.create(cluster, self.database)
        for file in ("payload", self.file):
            cluster.sql(self._text("events", file), database=self.database)

    def _text(self, folder, file):
        return (SQL / folder / f"{file}.sql").read_text().replace("@schema@", self.subject.name)

    def emit(self, connection, count, per_transaction):
        first, self.emitted, self.pending = self.emitted + 1, self.emitted + count, count
        self._emit(connection, first, self.emitted, per_transaction)

    def _emit(self, connection, first, last, per_transaction):
        execute(connection, "CALL emit_events(%s, %s, %s)", (first, last, per_transaction))

    def fill(self, connection, count):
        """With what is to be drained later."""
        self.hold(connection)
        self.emit(connection, count, per_transaction=100)
        execute(connection, "ANALYZE")

    def prepare_drain(self, connection):
        """Before the first event."""

    def hold(self, connection):
        """Events that are emitted now are to be drained later."""

    def empty(self, cluster, connection):
        """Until nothing is pending; returns the seconds it took."""
        return self.drain(connection) if self.in_server else self.relay(cluster)

    def drain(self, connection):
        """By a loop in the server: what it costs without a client."""
        start = time.monotonic()
        execute(connection, "CALL drain_events(%s, NULL)", (self.batch,))
        return time.monotonic() - start

    def relay(self, cluster):
        """By a program that is handed each event over a socket and drops it."""
        script = self._text("relay", self.file).replace("@batch@", str(self.batch))
        return pgbench(cluster, self.database, script, clients=1, each=self.pending // self.batch, seed=1).seconds


class PgQ(Queue):
    def _emit(self, connection, first, last, per_transaction):
        # A batch is what lies between two ticks.
        execute(connection, "CALL emit_events(%s, %s, %s, %s)", (first, last, per_transaction, self.batch))


class Pull(Queue):
    def prepare_drain(self, connection):
        execute(connection, "SELECT retrysafe.outbox_create_destination('relay', 'pull')")


class Worker(Queue):
    """The kind `null` counts what it is given, and nothing else."""

    def __init__(self, batch, **names):
        super().__init__(subjects.RUN, "retrysafe", batch, in_server=True, **{"label": "retrysafe, worker", **names})

    def create(self, cluster):
        super().create(cluster)
        cluster.sql((SQL / "events/worker.sql").read_text(), database=self.database)

    def prepare_drain(self, connection):
        execute(connection, "SELECT retrysafe.outbox_create_destination('counter', 'null', '{\"parallel\": 10000}',"
                            " batch_events => %s)", (self.batch,))

    def hold(self, connection):
        execute(connection, "SELECT retrysafe.outbox_pause('counter')")

    def drain(self, connection):
        execute(connection, "SELECT retrysafe.outbox_resume('counter')")
        # Not too often: the view costs a millisecond or two on one of few cores.
        wait(lambda: self.is_drained(connection), "the backlog to go", every=0.02)
        # From the record of the first batch to that of the last one: a worker takes a paused destination up again within
        # a second, which is no part of the work.
        between = execute(connection, """
            SELECT extract(epoch FROM (SELECT sent_at FROM retrysafe.outbox_events WHERE event_key = 'event-' || %s)
                                    - (SELECT sent_at FROM retrysafe.outbox_events WHERE event_key = 'event-' || %s))::float8""",
            (self.emitted, self.emitted - self.pending + 1))[0][0]
        return between * self.pending / (self.pending - self.batch)

    def is_drained(self, connection):
        return execute(connection, "SELECT backlog FROM retrysafe.outbox_status")[0][0] == 0


def by_hand(batch, subject=subjects.HANDWRITTEN, **names):
    return Queue(subject, "handwritten", batch, **names)


def pgq(batch, **names):
    return PgQ(subjects.PGQ, "pgq", batch, **names)
