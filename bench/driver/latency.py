"""L1, from COMMIT to a web server on an idle database; L2, on a busy one."""
import contextlib
import json
import time

from driver import relay, subjects
from driver.cluster import Cluster, execute
from driver.load import steady
from driver.numbers import median, percentile
from driver.receiver import Receiver, emit
from driver.results import Bars, Check, Result

RATE, BUSY_RATE, WARM_UP = 100, 2_000, 100
OURS, BY_HAND = "retrysafe", "(b) with NOTIFY, relay in Node.js"
PGQ = "(c) PgQ: delivers once per tick, so the period of its ticker is what would be measured"
_EMIT = {
    OURS: "SELECT retrysafe.outbox_emit(NULL, %s, 'measured', %s)",
    BY_HAND: "INSERT INTO handwritten.outbox (event_key, event_type, payload) VALUES (%s, 'measured', %s)",
}
_PENDING = {
    OURS: "SELECT sum(backlog) FROM retrysafe.outbox_status",
    BY_HAND: "SELECT count(*) FROM handwritten.outbox WHERE sent_at IS NULL",
}


def measure(run):
    results = {}
    with Cluster() as cluster:
        databases = {OURS: subjects.RUN.name}
        subjects.RUN.create(cluster)
        if relay.available():
            databases[BY_HAND] = subjects.HANDWRITTEN.name
            subjects.HANDWRITTEN.create(cluster)
            relay.install(cluster, subjects.HANDWRITTEN.name)
        if run.wants("L1"):
            results["L1"] = _idle(run, cluster, databases)
        if run.wants("L2"):
            subjects.RUN.create(cluster, "busy")
            results["L2"] = _busy(run, cluster, "busy")
    for result in results.values():
        result.settings = "synchronous_commit = on"
    return results


def _idle(run, cluster, databases):
    with _sessions(cluster, databases) as sessions:
        for number in run.rounds("L1"):
            for name in run.turn(list(sessions), number):
                sessions[name].round(run.size(full=1_000, quick=200))
        rounds = {name: session.finish() for name, session in sessions.items()}
    middle, high = _percentile(rounds, 50), _percentile(rounds, 99)
    return Result(
        measured=[_line(name, middle[name], high[name]) for name in rounds],
        checks=[Check(f"p50 {_range(middle[OURS])}", median(middle[OURS]) < 0.5),
                Check(f"p99 {_range(high[OURS])}", median(high[OURS]) < 1.5)],
        missing=[PGQ] + ([] if BY_HAND in databases else [relay.MISSING]),
        charts=[Bars("L1: from COMMIT to receipt", "ms", {f"{name}, {p}": values[name] for name in rounds
                                                          for p, values in (("p50", middle), ("p99", high))})])


def _busy(run, cluster, database):
    cluster.sql((subjects.SQL / "events/worker.sql").read_text(), database=database)
    # What the requests emit is published too, by the same worker.
    cluster.sql("SELECT retrysafe.outbox_create_destination('counter', 'null', '{\"parallel\": 1000}')", database=database)
    with _sessions(cluster, {OURS: database}) as sessions:
        session = sessions[OURS]
        with steady(cluster, database, subjects.RUN.request(subjects.NEW), clients=8, rate=BUSY_RATE, seed=run.seed()) as stop:
            for _ in run.rounds("L2"):
                session.round(run.size(full=1_000, quick=200))
            written = len(stop())
        rounds = {OURS: session.finish()}
    middle, high = _percentile(rounds, 50)[OURS], _percentile(rounds, 99)[OURS]
    return Result(
        measured=[_line(OURS, middle, high), f"{written:,} requests were written meanwhile"],
        checks=[Check(f"p99 {_range(high)}", median(high) < 10)],
        charts=[Bars("L2: from COMMIT to receipt, with 2,000 requests a second beside", "ms", {"p50": middle, "p99": high})])


class _Session:
    """Emits at a steady rate into one database, whose events go to a receiver of its own."""

    def __init__(self, name, connection, receiver):
        self._name, self._connection, self._receiver = name, connection, receiver
        self._times, self._rounds = {}, []

    def round(self, count):
        first = len(self._times)
        skipped = 0 if self._rounds else WARM_UP
        numbers = range(first, first + skipped + count)
        self._times |= emit(self._connection, _EMIT[self._name], numbers, RATE)
        self._rounds.append(numbers[skipped:])

    def finish(self):
        """[milliseconds from the answer to COMMIT until the event was there] of each round."""
        deadline = time.monotonic() + 60
        while execute(self._connection, _PENDING[self._name])[0][0] and time.monotonic() < deadline:
            self._connection.commit()
            time.sleep(0.05)
        self._connection.commit()
        arrived = self._receiver.finish()
        return [[(arrived[number] - self._times[number][1]) / 1e6 for number in numbers] for numbers in self._rounds]


@contextlib.contextmanager
def _sessions(cluster, databases):
    with contextlib.ExitStack() as at_end:
        sessions = {}
        for subject, database in databases.items():
            receiver = Receiver()
            at_end.callback(receiver.kill)
            url = f"http://127.0.0.1:{receiver.address[1]}/"
            if subject == OURS:
                cluster.sql("SELECT retrysafe.outbox_create_destination('receiver', 'http', %s, event_types => '{measured}')",
                            (json.dumps({"url": url}),), database)
            else:
                at_end.enter_context(relay.running(cluster, database, url, batch=100, in_flight=64))
            connection = at_end.enter_context(cluster.connect(database, autocommit=False))
            sessions[subject] = _Session(subject, connection, receiver)
        yield sessions


def _percentile(rounds, percent):
    return {name: [percentile(values, percent) for values in each] for name, each in rounds.items()}


def _range(values):
    return f"{median(values):.2f} ms ({min(values):.2f}–{max(values):.2f})"


def _line(name, middle, high):
    return f"{name}: p50 {median(middle):.2f} ms, p99 {median(high):.2f} ms"
