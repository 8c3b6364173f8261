"""L1, from COMMIT to a web server on an idle database; L2, on a busy one."""
import contextlib
import dataclasses
import functools
import json

from driver import queues, relay, subjects
from driver.cluster import Cluster, execute
from driver.footprint import Footprint
from driver.load import steady
from driver.numbers import median, percentile
from driver.receiver import Receiver, emit
from driver.results import Bars, Check, Result

RATE, BUSY_RATE, WARM_UP = 100, 2_000, 100
SETTINGS = "synchronous_commit = on"
OURS, BY_HAND, PGQ = "retrysafe", "(b) with NOTIFY, relay in Node.js", "(c) PgQ, ten ticks a second"
_EMIT = {
    OURS: "SELECT retrysafe.outbox_emit(NULL, %(key)s, 'measured', %(payload)s)",
    BY_HAND: "INSERT INTO handwritten.outbox (event_key, event_type, payload) VALUES (%(key)s, 'measured', %(payload)s)",
    PGQ: "SELECT pgq.insert_event('orders', 'measured', %(payload)s, %(key)s, NULL, NULL, NULL)",
}
_PENDING = {
    OURS: "SELECT count(*) FROM retrysafe.outbox_events WHERE event_key = %(last)s AND sent_at IS NULL",
    BY_HAND: "SELECT count(*) FROM handwritten.outbox WHERE sent_at IS NULL",
    PGQ: "SELECT last_value - tick_event_seq FROM pgq.event_1_id_seq, pgq.subscription JOIN pgq.tick"
         " ON tick_queue = sub_queue AND tick_id = sub_last_tick",
}


def idle(run):
    with Cluster() as cluster:
        candidates = {OURS: subjects.RUN, PGQ: subjects.PGQ}
        if relay.available():
            candidates[BY_HAND] = subjects.HANDWRITTEN
        present, missing = subjects.create_all(cluster, candidates.values())
        databases = {name: subject.name for name, subject in candidates.items() if subject in present}
        if BY_HAND in databases:
            relay.install(cluster, databases[BY_HAND])
        else:
            missing.append(relay.MISSING)
        if PGQ in databases:
            cluster.sql("SELECT pgq.set_queue_config('orders', 'ticker_max_count', '1')", database=databases[PGQ])
        owners = {name: dataclasses.replace(candidates[name], label=name) for name in databases}
        footprint = Footprint(cluster, owners.values())
        with _sessions(cluster, databases) as sessions:
            for number in run.rounds("L1"):
                for name in run.turn(list(sessions), number):
                    # The references are not judged here; half as many tell enough.
                    count = run.size(full=1_000, quick=200) // (1 if name == OURS else 2)
                    with footprint.stretch(owners[name], WARM_UP + count):
                        sessions[name].round(count)
            rounds = {name: session.finish() for name, session in sessions.items()}
        left_behind = footprint.table("L1: one event at a time over HTTP", "event")
    middle, high = percentiles(rounds, 50), percentiles(rounds, 99)
    return {"L1": Result(
        measured=[line(name, middle[name], high[name]) for name in rounds],
        checks=[Check(f"p50 {_range(middle[OURS])}", median(middle[OURS]) < 0.5),
                Check(f"p99 {_range(high[OURS])}", median(high[OURS]) < 1.5)],
        missing=missing, settings=SETTINGS, footprint=left_behind,
        charts=[Bars("L1: from COMMIT to receipt", "ms", {f"{name}, {p}": values[name] for name in rounds
                                                          for p, values in (("p50", middle), ("p99", high))})])}


def busy(run):
    with Cluster() as cluster:
        subject, database = subjects.RUN, subjects.RUN.name
        subject.create(cluster)
        footprint = Footprint(cluster, [subject])
        cluster.sql((subjects.SQL / "events/worker.sql").read_text(), database=database)
        # What the requests emit is published too, by the same worker.
        cluster.sql("SELECT retrysafe.outbox_create_destination('counter', 'null', '{\"parallel\": 1000}')", database=database)
        with _sessions(cluster, {OURS: database}) as sessions:
            session = sessions[OURS]
            with steady(cluster, database, subject.request(subjects.NEW), clients=8, rate=BUSY_RATE, seed=run.seed()) as stop:
                for _ in run.rounds("L2"):
                    session.round(run.size(full=1_000, quick=200))
                written = len(stop())
            rounds = {OURS: session.finish()}
        left_behind = footprint.table("L2: events over HTTP beside requests")
    middle, high = percentiles(rounds, 50)[OURS], percentiles(rounds, 99)[OURS]
    return {"L2": Result(
        measured=[line(OURS, middle, high), f"{written:,} requests were written meanwhile"],
        checks=[Check(f"p99 {_range(high)}", median(high) < 10)], settings=SETTINGS, footprint=left_behind,
        charts=[Bars("L2: from COMMIT to receipt, with 2,000 requests a second beside", "ms", {"p50": middle, "p99": high})])}


class Session:
    """Emits at a steady rate into one database, whose events go to a receiver of its own. What carries them there runs only
    while it is measured: the others would be disturbed by it."""

    def __init__(self, name, connection, receiver, carrier):
        self._name, self._connection, self._receiver, self._carrier = name, connection, receiver, carrier
        self._times, self._rounds = {}, []

    def round(self, count):
        first = len(self._times)
        numbers = range(first, first + WARM_UP + count)
        with self._carrier():
            self._times |= emit(self._connection, _EMIT[self._name], numbers, RATE)
            queues.wait(self._is_drained, f"{self._name} to deliver", timeout=60, every=0.05)
        self._rounds.append(numbers[WARM_UP:])

    def _is_drained(self):
        left = execute(self._connection, _PENDING[self._name], {"last": f"e{len(self._times) - 1}"})[0][0]
        self._connection.commit()
        return not left

    def finish(self):
        """[milliseconds from the answer to COMMIT until the event was there] of each round."""
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
            carrier = {
                OURS: contextlib.nullcontext,           # the worker is there anyway
                BY_HAND: functools.partial(relay.running, cluster, database, url, batch=100, in_flight=64),
                PGQ: functools.partial(relay.pgq_running, cluster, database, url),
            }[subject]
            if subject == OURS:
                cluster.sql("SELECT retrysafe.outbox_create_destination('receiver', 'http', %s, event_types => '{measured}')",
                            (json.dumps({"url": url}),), database)
            connection = at_end.enter_context(cluster.connect(database, autocommit=False))
            sessions[subject] = Session(subject, connection, receiver, carrier)
        yield sessions


def percentiles(rounds, percent):
    return {name: [percentile(values, percent) for values in each] for name, each in rounds.items()}


def _range(values):
    return f"{median(values):.2f} ms ({min(values):.2f}–{max(values):.2f})"


def line(name, middle, high):
    return f"{name}: p50 {median(middle):.2f} ms, p99 {median(high):.2f} ms"
