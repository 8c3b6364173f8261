"""M1: memory of a long session, time and memory of a long transaction."""
import time

from driver import subjects
from driver.cluster import Cluster, execute, private_memory
from driver.footprint import Footprint
from driver.numbers import Ratio, duration, median, size
from driver.results import Check, Result

_EMIT = """SELECT count(retrysafe.outbox_emit(NULL, 'many-' || %s || '-' || n, 'order.placed', '{"number": 1}', 'customer-' || n %% 10000))
             FROM generate_series(1, %s) AS n"""


def measure(run):
    transactions = run.size(full=200_000, quick=30_000)
    events = run.size(full=100_000, quick=20_000)
    with Cluster(synchronous_commit="off") as cluster:
        subjects.RUN.create(cluster)
        footprint = Footprint(cluster, [subjects.RUN])
        with cluster.connect(subjects.RUN.name) as session:
            run.say(f"M1: {transactions:,} transactions")
            grown = _long_session(session, transactions)
        with cluster.connect(subjects.RUN.name) as session:
            times = {part: [] for part in (1, 2, 4)}
            inside = _within_one_transaction(session, events)
            before = 0
            for turn, part in enumerate([*times] * 2):      # what the allocator keeps for the next time is no growth
                _emit(session, f"warm-up-{turn}", events // part)
                before = max(before, _memory(session))
            for number in run.rounds("M1"):
                for part in run.turn(list(times), number):
                    start = time.monotonic()
                    _emit(session, f"{number}-{part}", events // part)
                    times[part].append(time.monotonic() - start)
            grown_by_events = _memory(session) - before
        left_behind = footprint.table("M1: long sessions and transactions")
    linear = Ratio(times[1], [4 * seconds for seconds in times[4]])
    return {"M1": Result(
        measured=[f"{transactions:,} transactions: {size(grown)} more"]
        + [f"a transaction of {events // part:,} events: {duration(median(seconds))}" for part, seconds in times.items()]
        + [f"memory in the first such transaction: {size(inside)} more, caches included; after all later ones: "
           f"{size(grown_by_events)} more than after the first ones"],
        checks=[Check(f"session {size(grown)}", grown < 1 << 20),
                Check(f"long transactions {size(grown_by_events)}", grown_by_events < 1 << 20),
                Check(f"time of {events:,} events to 4 times that of {events // 4:,}: {linear}", linear.value < 1.25)],
        settings="synchronous_commit = off", footprint=left_behind)}


def _long_session(session, transactions):
    """Bytes that the session's process grows by."""
    with session.cursor() as cursor:
        cursor.execute("PREPARE request AS SELECT retrysafe.outbox_emit(NULL, 'one-' || $1, 'order.placed', '{}'),"
                       " retrysafe.idem_run('key-' || $1, jsonb_build_object('request', 'key-' || $1, 'customer', 'c', 'amount', 1,"
                       " 'items', ''), 'retrysafe_run.place_order(jsonb)')")
        for number in range(transactions):
            if number == 2_000:                                 # caches are filled
                before = _memory(session)
            cursor.execute("EXECUTE request (%s)", (number,))
    return _memory(session) - before


def _within_one_transaction(session, events):
    before = _memory(session)
    session.autocommit = False
    _emit(session, "first", events)
    used = _memory(session) - before
    session.commit()
    session.autocommit = True
    return used


def _emit(session, name, count):
    execute(session, _EMIT, (name, count))


def _memory(session):
    return private_memory(session.info.backend_pid)
