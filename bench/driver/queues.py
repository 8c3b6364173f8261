"""Queues of events without the requests around them: ours twice, by the background worker and through the pull API, the
outbox of (b), and PgQ. Each in a database of its own."""
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


class Queue:
    def __init__(self, label, database, subject, file):
        self.label, self.database, self.subject, self.file = label, database, subject, file
        self.extension = subject.extension
        self.emitted = self.pending = 0

    def create(self, cluster):
        self.subject.create(cluster, self.database)
        for file in ("payload", self.file):
            cluster.sql((SQL / "events" / f"{file}.sql").read_text(), database=self.database)

    def emit(self, connection, count, per_transaction, batch):
        first, self.emitted, self.pending = self.emitted + 1, self.emitted + count, count
        self._emit(connection, first, self.emitted, per_transaction, batch)

    def _emit(self, connection, first, last, per_transaction, _):
        execute(connection, "CALL emit_events(%s, %s, %s)", (first, last, per_transaction))

    def prepare_drain(self, connection, batch):
        """Before the first event."""

    def hold(self, connection):
        """Events that are emitted now are to be drained later."""

    def drain(self, connection, batch):
        """Until nothing is pending, by a loop in the server: what it costs without a client. Returns the seconds it took."""
        start = time.monotonic()
        execute(connection, "CALL drain_events(%s, NULL)", (batch,))
        return time.monotonic() - start

    def relay(self, cluster, connection, count, batch):
        """Hands `count` pending events to a program that counts them; returns the seconds it took."""
        script = (SQL / "relay" / f"{self.file}.sql").read_text().replace("@batch@", str(batch))
        return pgbench(cluster, self.database, script, clients=1, each=count // batch, seed=1).seconds


class PgQ(Queue):
    def _emit(self, connection, first, last, per_transaction, batch):
        # A batch is what lies between two ticks.
        execute(connection, "CALL emit_events(%s, %s, %s, %s)", (first, last, per_transaction, batch))


class Pull(Queue):
    def prepare_drain(self, connection, batch):
        execute(connection, "SELECT retrysafe.outbox_create_destination('relay', 'pull')")


class Worker(Queue):
    """The kind `null` counts what it is given, and nothing else."""

    def create(self, cluster):
        super().create(cluster)
        cluster.sql((SQL / "events/worker.sql").read_text(), database=self.database)

    def prepare_drain(self, connection, batch):
        execute(connection, "SELECT retrysafe.outbox_create_destination('counter', 'null', '{\"parallel\": 10000}',"
                            " batch_events => %s)", (batch,))

    def hold(self, connection):
        execute(connection, "SELECT retrysafe.outbox_pause('counter')")

    def drain(self, connection, batch):
        execute(connection, "SELECT retrysafe.outbox_resume('counter')")
        # Not too often: the view costs a millisecond or two on one of few cores.
        wait(lambda: execute(connection, "SELECT backlog FROM retrysafe.outbox_status")[0][0] == 0, "the backlog to go", every=0.02)
        # From the record of the first batch to that of the last one: a worker takes a paused destination up again within
        # a second, which is no part of the work.
        between = execute(connection, """
            SELECT extract(epoch FROM (SELECT sent_at FROM retrysafe.outbox_events WHERE event_key = 'event-' || %s)
                                    - (SELECT sent_at FROM retrysafe.outbox_events WHERE event_key = 'event-' || %s))::float8""",
            (self.emitted, self.emitted - self.pending + 1))[0][0]
        return between * self.pending / (self.pending - batch)

    def relay(self, cluster, connection, count, batch):
        return self.drain(connection, batch)


def every():
    return [
        Worker("retrysafe, worker", "retrysafe_worker", subjects.RUN, "retrysafe"),
        Pull("retrysafe, fetch and ack", "retrysafe_pull", subjects.RUN, "retrysafe"),
        Queue(subjects.HANDWRITTEN.label, "handwritten", subjects.HANDWRITTEN, "handwritten"),
        PgQ(subjects.PGQ.label, "pgq_orders", subjects.PGQ, "pgq"),
    ]


def with_relay():
    return [queue for queue in every() if not isinstance(queue, Pull)]
