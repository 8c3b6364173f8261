"""D3: a server starts with a large backlog."""
import contextlib
import functools
import time

from driver import queues
from driver.cluster import Cluster, execute, private_memory
from driver.footprint import Footprint
from driver.numbers import duration, median, size
from driver.results import Check, Lines, Result

WITHIN = 600


def measure(run):
    due, delayed = run.size(full=1_000_000, quick=30_000), run.size(full=4_000_000, quick=120_000)
    # Nothing is published while the backlog grows. The second database has nothing to publish: its worker is idle.
    with Cluster(synchronous_commit="off", **{"retrysafe.publish": "off"}) as cluster:
        pending = queues.Worker(500, database="pending")
        for queue in (pending, queues.Worker(500, database="idle")):
            queue.create(cluster)
            with cluster.connect(queue.database) as session:
                queue.prepare_drain(session)
        run.say(f"D3: {due + delayed:,} events")
        footprint = Footprint(cluster, [pending])
        half = due + delayed // 2
        queues.in_parallel(*(functools.partial(cluster.sql, f"CALL {what}(%s, %s, 100)", numbers, "pending") for what, numbers in (
            ("emit_events", (1, due)), ("emit_delayed", (due + 1, half)), ("emit_delayed", (half + 1, due + delayed)))))
        cluster.sql("ANALYZE", database="pending")
        with (cluster.directory / "data/postgresql.conf").open("a") as file:
            file.write("retrysafe.publish = on\n")
        started = []
        with footprint.stretch(pending, due, "delivered"):
            cluster.restart(lambda: started.append(time.monotonic()))
            watch = _Watch(cluster, started[0])
            watch.until_delivered(due)
        left_behind = footprint.table("D3: start with a large backlog", "event")
    above = watch.highest - watch.idle
    slowest = max(watch.status)
    return {"D3": Result(
        measured=[f"first delivery recorded {duration(watch.first)} after the start of the server",
                  f"worker: {size(watch.idle)} idle, {size(watch.highest)} at most",
                  f"outbox_status: {duration(median(watch.status))} in the median, {duration(slowest)} at most",
                  f"{due:,} due events were delivered {duration(watch.all)} after the start"],
        checks=[Check(f"first delivery {duration(watch.first)}", watch.first < 2),
                Check(f"memory {size(above)} above idle", above < 64 << 20),
                Check(f"outbox_status {duration(slowest)} at most", slowest < 0.050)],
        settings=f"{due:,} events due, {delayed:,} due a day later",
        charts=[Lines("D3: memory of the worker", "seconds after the start", "MB", {"worker": watch.memory})],
        footprint=left_behind)}


class _Watch:
    def __init__(self, cluster, start):
        self._cluster, self._start = cluster, start
        self.first = self.all = None
        self.idle = self.highest = 0
        self.status, self.memory = [], []

    def until_delivered(self, count):
        with self._cluster.connect("pending") as session:
            while self.all is None:
                before = time.monotonic()
                row = execute(session, "SELECT delivered FROM retrysafe.outbox_status")
                now = time.monotonic()
                self.status.append(now - before)
                delivered = row[0][0] or 0
                if delivered and self.first is None:
                    self.first = now - self._start
                if delivered >= count:
                    self.all = now - self._start
                self._look_at_memory(session)
                if now - self._start > WITHIN:
                    raise RuntimeError(f"D3: {delivered} of {count} were delivered within {WITHIN} s")
                time.sleep(0.02)

    def _look_at_memory(self, session):
        workers = dict(execute(session, "SELECT datname, pid FROM pg_stat_activity WHERE backend_type = 'retrysafe worker'"))
        with contextlib.suppress(FileNotFoundError):            # a worker may end
            if "idle" in workers:
                self.idle = private_memory(workers["idle"])
            if "pending" in workers:
                used = private_memory(workers["pending"])
                self.highest = max(self.highest, used)
                self.memory.append((time.monotonic() - self._start, used / 2 ** 20))
