"""H1: deliveries a second to a web server that is not the limit."""
import contextlib
import functools
import json
import subprocess
import time

from driver import build, queues, relay, subjects
from driver.cluster import Cluster, execute
from driver.footprint import Footprint
from driver.numbers import Ratio, median, rate
from driver.queues import Worker
from driver.results import Bars, Check, Result

IN_FLIGHT, BATCH = 64, 500
OURS, BY_HAND = "retrysafe, worker", "(b) with a relay in Node.js"


class HttpWorker(Worker):
    def __init__(self, url):
        super().__init__(BATCH, label=OURS)
        self.url = url

    def prepare_drain(self, connection):
        options = json.dumps({"url": self.url, "max_in_flight": IN_FLIGHT})
        execute(connection, "SELECT retrysafe.outbox_create_destination('counter', 'http', %s, batch_events => %s)",
                (options, self.batch))


class NodeRelay(queues.Queue):
    def __init__(self, url):
        super().__init__(subjects.HANDWRITTEN, "handwritten", BATCH, label=BY_HAND)
        self.url = url

    def empty(self, cluster, connection):
        with relay.running(cluster, self.database, self.url, batch=self.batch, in_flight=IN_FLIGHT):
            # Its start does not count.
            _wait(connection, "SELECT EXISTS (SELECT FROM pg_stat_activity WHERE application_name = 'relay')")
            start = time.monotonic()
            _wait(connection, "SELECT NOT EXISTS (SELECT FROM handwritten.outbox WHERE sent_at IS NULL)")
            return time.monotonic() - start


def measure(run):
    # The relay takes several times as long for each event.
    pending, of_relay = run.size(full=200_000, quick=15_000), run.size(full=60_000, quick=15_000)
    with receiver() as (port, url), Cluster() as cluster, contextlib.ExitStack() as at_end:
        limit = _limit(port)
        candidates = [HttpWorker(url)] + ([NodeRelay(url)] if relay.available() else [])
        present, missing = subjects.create_all(cluster, candidates)
        if len(candidates) == 1:
            missing.append(relay.MISSING)
        connections = {queue: at_end.enter_context(cluster.connect(queue.database)) for queue in present}
        speed = {queue: [] for queue in present}
        footprint = Footprint(cluster, present)
        for queue, connection in connections.items():
            queue.prepare_drain(connection)
        for number in run.rounds("H1"):
            queues.in_parallel(*(functools.partial(
                queue.fill, connection, pending if queue.label == OURS else of_relay) for queue, connection in connections.items()))
            cluster.checkpoint()
            for queue in run.turn(present, number):
                speed[queue].append(queue.pending / queue.empty(cluster, connections[queue]))
        for queue, connection in connections.items():
            footprint.one_more_round(queue, connection, run.size(full=10_000, quick=5_000))
        left_behind = footprint.table("H1: deliveries over HTTP", "event")
    by_label = {queue.label: values for queue, values in speed.items()}
    ours = by_label[OURS]
    checks = [Check(f"{rate(median(ours))} ({rate(min(ours))}–{rate(max(ours))})", median(ours) >= 20_000)]
    if BY_HAND in by_label:
        faster = Ratio(ours, by_label[BY_HAND])
        checks.append(Check(f"to the relay {faster}", faster.value >= 1.5))
    else:
        checks.append(Check("to the relay: not measured", None))
    return {"H1": Result(
        measured=[f"{label}: {rate(median(values))}" for label, values in by_label.items()]
        + [f"the web server alone: {rate(limit)} over {IN_FLIGHT} connections"],
        checks=checks, missing=missing,
        settings=f"synchronous_commit = on; {pending:,} events, {of_relay:,} for the relay, {BATCH} in a batch, {IN_FLIGHT} requests in flight",
        footprint=left_behind,
        charts=[Bars("H1: HTTP deliveries per second", "1/s", by_label)])}


@contextlib.contextmanager
def receiver():
    """The web server; yields its port and URL."""
    process = subprocess.Popen([build.program("http/receiver.cpp")], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        port = int(process.stdout.readline())
        yield port, f"http://127.0.0.1:{port}/"
    finally:
        process.communicate()


def _limit(port):
    return float(subprocess.run([build.program("http/flood.cpp"), str(port), str(IN_FLIGHT), "200000"], check=True,
                                capture_output=True, text=True).stdout)


def _wait(connection, condition):
    queues.wait(lambda: execute(connection, condition)[0][0], condition)
