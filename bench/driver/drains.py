"""D1, how fast a backlog is drained; D2, whether that stays so while a snapshot is held."""
import contextlib
import time

from driver import queues, subjects
from driver.cluster import Cluster, execute
from driver.footprint import dead_rows
from driver.numbers import Ratio, median, rate
from driver.results import Bars, Check, Lines, Result

D1_BATCH, D1_TICK = 500, 10_000
D2_BATCH, D2_ROUND = 100, 10_000


def measure(run):
    results = {}
    if run.wants("D1"):
        results["D1"] = _backlog(run)
    if run.wants("D2"):
        results["D2"] = _held_snapshot(run)
    return results


@contextlib.contextmanager
def _prepared(queues_wanted, batch):
    """A cluster with those queues that can be had: yields ({queue: connection}, cluster, what is missing)."""
    with Cluster(synchronous_commit="off") as cluster, contextlib.ExitStack() as at_end:
        present, missing = subjects.create_all(cluster, queues_wanted)
        connections = {queue: at_end.enter_context(cluster.connect(queue.database)) for queue in present}
        for queue, connection in connections.items():
            queue.prepare_drain(connection, batch)
        yield connections, cluster, missing


def _backlog(run):
    pending = run.size(full=500_000, quick=50_000)
    with _prepared(queues.with_relay(), D1_BATCH) as (connections, cluster, missing):
        speed = {queue: [] for queue in connections}
        for round_number in run.rounds("D1"):
            for queue, connection in connections.items():
                queue.hold(connection)
                queue.emit(connection, pending, per_transaction=100, batch=D1_TICK)
                execute(connection, "ANALYZE")
            cluster.checkpoint()
            for queue in run.turn(list(connections), round_number):
                batch = D1_TICK if queue.subject == subjects.PGQ else D1_BATCH
                speed[queue].append(pending / queue.relay(cluster, connections[queue], pending, batch))
    by_label = {queue.label: values for queue, values in speed.items()}
    worker = by_label["retrysafe, worker"]
    over_b = Ratio(worker, by_label[subjects.HANDWRITTEN.label])
    checks = [Check(f"to (b) {over_b}", over_b.value >= 10)]
    if subjects.PGQ.label in by_label:
        over_c = Ratio(worker, by_label[subjects.PGQ.label])
        checks.append(Check(f"to (c) {over_c}", over_c.value >= 2))
    return Result(
        measured=[f"{label}: {rate(median(values))}" for label, values in by_label.items()],
        checks=checks, missing=missing,
        settings=f"synchronous_commit = off; {pending:,} events, {D1_BATCH} in a batch, {D1_TICK:,} between two ticks of PgQ",
        charts=[Bars("D1: events drained per second", "1/s", by_label)])


def _held_snapshot(run):
    rounds, budget = run.size(full=100, quick=10), run.size(full=300, quick=8)
    with _prepared(queues.every(), D2_BATCH) as (connections, cluster, missing), contextlib.ExitStack() as at_end:
        for queue in connections:
            holder = at_end.enter_context(cluster.connect(queue.database, autocommit=False))
            holder.set_session(isolation_level="REPEATABLE READ")
            execute(holder, "SELECT 1")
        times = {queue: [] for queue in connections}
        run.say(f"D2: {rounds} rounds")
        for round_number in range(rounds):
            for queue in run.turn(list(connections), round_number):
                ours = queue.extension == "retrysafe"
                if ours or sum(times[queue]) < budget:
                    start = time.monotonic()
                    queue.emit(connections[queue], D2_ROUND, per_transaction=D2_BATCH, batch=D2_BATCH)
                    queue.drain(connections[queue], D2_BATCH)
                    times[queue].append(time.monotonic() - start)
            if round_number % 10 == 9:
                for connection in connections.values():
                    execute(connection, "ANALYZE")
        dead = {queue: dead_rows(cluster, queue.database, queue.subject.name) for queue in connections}

    measured, checks = [], []
    hand = next(queue for queue in connections if queue.subject == subjects.HANDWRITTEN)
    for queue, seconds in times.items():
        few = max(1, min(10, len(seconds) // 3))
        first, last = D2_ROUND / median(seconds[:few]), D2_ROUND / median(seconds[-few:])
        dead_now = sum(dead[queue].values())
        measured.append(f"{queue.label}: {rate(first)} → {rate(last)} ({last / first:.2f}), after "
                        f"{len(seconds) * D2_ROUND:,} events {dead_now:,} dead rows")
        if queue.extension == "retrysafe":
            common = min(len(seconds), len(times[hand]))
            over_b = median(times[hand][common - few:common]) / median(seconds[common - few:common])
            checks += [Check(f"{queue.label}: last to first {last / first:.2f}", last / first >= 0.95),
                       Check(f"{queue.label}: {dead_now:,} dead rows", dead_now < 1_000),
                       Check(f"{queue.label}: {over_b:.1f} times (b) after {common * D2_ROUND:,} events", over_b >= 7)]
    return Result(
        measured=measured, checks=checks, missing=missing,
        settings=f"synchronous_commit = off; first and last: medians of up to 10 rounds; references stop after {budget} s",
        charts=[Lines("D2: rounds of 10,000 events while a snapshot is held", "events so far", "events per second",
                      {queue.label: [((number + 1) * D2_ROUND, D2_ROUND / s) for number, s in enumerate(seconds)]
                       for queue, seconds in times.items()})])
