"""B2: a relay beside a worker."""
import contextlib
import functools
import json
import subprocess

from driver import build, http, latency, subjects
from driver.cluster import Cluster
from driver.destinations import BATCH, Destinations
from driver.numbers import Ratio, rates
from driver.receiver import Receiver
from driver.results import Bars, Result

WORKER, RELAY = "worker", "relay"
KEYS = 10_000


def measure(run):
    with http.receiver() as (_, url), Cluster() as cluster:
        ways = {
            "a sink that only counts": ("null", {"parallel": 10_000}, run.size(full=100_000, quick=20_000)),
            f"http, {http.IN_FLIGHT} in flight": (
                "http", {"url": url, "max_in_flight": http.IN_FLIGHT}, run.size(full=50_000, quick=10_000)),
        }
        speed = _speed(run, cluster, ways)
        delays = _delays(run, cluster)
    middle, high = latency.percentiles(delays, 50), latency.percentiles(delays, 99)
    measured = [f"{way}: worker {rates(speed[way, WORKER])}, relay {rates(speed[way, RELAY])}; relay to worker "
                f"{Ratio(speed[way, RELAY], speed[way, WORKER])}" for way in ways]
    measured += [latency.line(f"COMMIT to receipt, {who}", middle[who], high[who]) for who in delays]
    events = ", ".join(f"{count:,} events ({way})" for way, (_, _, count) in ways.items())
    return {"B2": Result(
        measured=measured,
        settings=f"synchronous_commit = on; {events}, {BATCH} in a batch, one shard, the relay on one connection over a Unix socket; "
                 f"COMMIT to receipt over HTTP, {latency.RATE} events a second",
        charts=[Bars("B2: events per second", "1/s", {f"retrysafe, {who}, {way}": values for (way, who), values in speed.items()}),
                Bars("B2: from COMMIT to receipt", "ms", {f"retrysafe, {who}, {percent}": values[who] for who in delays
                                                          for percent, values in (("p50", middle), ("p99", high))})])}


def _speed(run, cluster, ways):
    """{(way, who): events per second of the rounds}"""
    log = Destinations(KEYS)
    log.create(cluster)
    publishers = {WORKER: contextlib.nullcontext, RELAY: functools.partial(_relay, cluster, log.database, "counter")}
    speed = {(way, who): [] for way in ways for who in publishers}
    with cluster.connect(log.database) as connection:
        for number in run.rounds("B2, events per second"):
            for way, who in run.turn(list(speed), number):
                kind, options, count = ways[way]
                speed[way, who].append(count / log.seconds(
                    cluster, connection, count, kind, options, workers=who == WORKER, publisher=publishers[who]))
    return speed


def _delays(run, cluster):
    """{who: [milliseconds of each event] of each round}. Each has a database of its own; in the relay's the worker has
    nothing to publish."""
    with contextlib.ExitStack() as at_end:
        sessions = {}
        for who in (WORKER, RELAY):
            database = f"delay_{who}"
            subjects.RUN.create(cluster, database)
            receiver = Receiver()
            at_end.callback(receiver.kill)
            options = json.dumps({"url": f"http://127.0.0.1:{receiver.address[1]}/"})
            cluster.sql("SELECT retrysafe.outbox_create_destination('receiver', 'http', %s, workers => %s)",
                        (options, who == WORKER), database)
            carrier = contextlib.nullcontext if who == WORKER else functools.partial(_relay, cluster, database, "receiver")
            connection = at_end.enter_context(cluster.connect(database, autocommit=False))
            sessions[who] = latency.Session(latency.OURS, connection, receiver, carrier)
        for number in run.rounds("B2, from COMMIT to receipt"):
            for who in run.turn(list(sessions), number):
                sessions[who].round(run.size(full=500, quick=100))
        return {who: session.finish() for who, session in sessions.items()}


@contextlib.contextmanager
def _relay(cluster, database, destination):
    """The program, until the block ends. It finds its sinks where the server does."""
    libraries, = cluster.sql("SHOW dynamic_library_path")[0]
    process = subprocess.Popen([build.COPY / "retrysafe-relay", "--connection", cluster.dsn(database), "--library-path", libraries,
                                "--allowed-addresses", "127.0.0.1", "--log-level", "warning", destination])
    try:
        yield
        if process.poll() is not None:
            raise RuntimeError(f"the relay ended with {process.returncode}")
    finally:
        process.terminate()
        process.wait()
