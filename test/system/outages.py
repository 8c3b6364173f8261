"""One of two destinations has an outage while events come at a steady rate (case 23).

An hour is 12 s here, and the longest back-off is in proportion: 10 minutes become 2 s. Under 100 attempts and under 200
lines in the log become under 25 and under 50. RETRYSAFE_LOAD=300 makes it a real hour.
"""
import collections
import threading
import time

import closing
from conftest import eventually, load_factor, run

HOUR = 12 * max(1, load_factor())
BACKOFF_MAX = f"{HOUR / 6:g} s"
BACKOFF = f"backoff => '100 ms', backoff_max => '{BACKOFF_MAX}'"

Outage = collections.namedtuple("Outage", "began ended attempts last_error")


class Traffic:
    """Events at a steady rate, over ten ordering keys, until it is stopped."""

    def __init__(self, db, rate=200):
        self.count = 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(db.connect(), rate))
        self._thread.start()

    def _run(self, connection, rate):
        start = time.monotonic()
        while not self._stop.is_set():
            run(connection, "SELECT outbox_emit(NULL, %s, 'tick', to_jsonb(clock_timestamp()), %s)",
                f"tick-{self.count}", f"key-{self.count % 10}")
            self.count += 1
            self._stop.wait(max(0, start + self.count / rate - time.monotonic()))

    def stop(self):
        self._stop.set()
        self._thread.join()


def latencies(db, requests):
    """Seconds from the emit to the arrival, by the clock of this machine, of the first copies."""
    offset = time.time() - time.monotonic()
    first = {}
    for request in requests:
        first.setdefault(request.id, request.at + offset)
    emitted = dict(db.sql("SELECT event_id::text, extract(epoch FROM created_at)::float8 FROM outbox_events"))
    return sorted(at - emitted[event_id] for event_id, at in first.items())


def as_usual(usual, during):
    """The tail is the machine's, so the median and the 95 %."""
    def best(every, share):
        return min(times[int(len(times) * share)] for times in every)
    return all(best(during, share) <= best(usual, share) * 1.5 + 0.05 for share in (0.5, 0.95))


def status(db, name):
    columns = ("backlog", "delivered", "parked_retry", "parked_blocked", "dead", "failures", "last_error")
    return dict(zip(columns, db.sql(f"SELECT {', '.join(columns)} FROM outbox_status WHERE name = %s", name)[0]))


def bear(server, db, healthy, arrivals, begin, end):
    """Of the destinations "healthy" and "broken" the one has the receiver `healthy`; `arrivals` gives id and event key of
    what came to the other, in order; `begin` and `end` make its outage. What that costs "healthy" is compared with how it
    is just before. Where that shows a cost it is done again, up to three times, and the best of each counts: what else the
    machine does comes and goes, what an outage costs is there each time."""
    logged = len(server.log())
    traffic = Traffic(db)
    usual, during = [], []
    try:
        while len(usual) < 3 and not (usual and as_usual(usual, during)):
            calm = time.monotonic()
            eventually(lambda: time.monotonic() > calm + 4 and len(arrivals()) > 100)
            began = time.monotonic()
            begin()
            eventually(lambda: status(db, "broken")["failures"] > 0)
            eventually(lambda: time.monotonic() > began + HOUR, timeout=HOUR + 60)
            requests, ended = healthy.requests, time.monotonic()
            during_it = status(db, "broken")
            assert status(db, "healthy")["failures"] == 0
            assert 2 < during_it["failures"] < 25
            assert during_it["last_error"]
            end()
            usual.append(latencies(db, [r for r in requests if calm <= r.at < began]))
            during.append(latencies(db, [r for r in requests if began <= r.at < ended]))
            assert len(during[-1]) / HOUR > len(usual[-1]) / 4 * 0.8, "as many as usual"
            eventually(lambda: status(db, "broken")["backlog"] < 200, timeout=60 + HOUR)
    finally:
        traffic.stop()
    assert as_usual(usual, during), [[(times[len(times) // 2], times[int(len(times) * 0.95)]) for times in every]
                                     for every in (usual, during)]
    for name in "healthy", "broken":
        every = {"backlog": 0, "delivered": traffic.count, "parked_retry": 0, "parked_blocked": 0, "dead": 0}
        eventually(lambda: every.items() <= status(db, name).items(), timeout=60 + HOUR,
                   message=f"{name}: {traffic.count} events, {status(db, name)}")
    lines = [line for line in server.log()[logged:].splitlines() if db.name in line or "retrysafe" in line]
    assert len(lines) < 50 * len(usual), lines[:60]
    order = collections.defaultdict(dict)
    for _, key in arrivals():
        number = int(key.removeprefix("tick-"))
        order[number % 10].setdefault(number)
    assert all(list(numbers) == sorted(numbers) for numbers in order.values()), "each key in order"
    keys = [f"tick-{i}" for i in range(traffic.count)]
    closing.balance(db, "healthy", healthy.ids, committed=keys)
    closing.balance(db, "broken", [event_id for event_id, _ in arrivals()], committed=keys)
    return Outage(began, ended, during_it["failures"], during_it["last_error"])
