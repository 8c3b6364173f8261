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


@contextlib.contextmanager
def _prepared(queues_wanted, batch):
    """A cluster with those queues that can be had: yields ({queue: connection}, cluster, what is missing)."""
    with Cluster(synchronous_commit="off") as cluster, contextlib.ExitStack() as at_end:
        present, missing = subjects.create_all(cluster, queues_wanted)
        connections = {queue: at_end.enter_context(cluster.connect(queue.database)) for queue in present}
        for queue, connection in connections.items():
            queue.prepare_drain(connection, batch)
        yield connections, cluster, missing


def backlog(run):
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
    else:
        checks.append(Check("to (c): not measured", None))
    return {"D1": Result(
        measured=[f"{label}: {rate(median(values))}" for label, values in by_label.items()],
        checks=checks, missing=missing,
        settings=f"synchronous_commit = off (workers record synchronously all the same); {pending:,} events, {D1_BATCH} in a batch, {D1_TICK:,} between two ticks of PgQ",
        charts=[Bars("D1: events drained per second", "1/s", by_label)])}


def held_snapshot(run):
    rounds, budget = run.size(full=100, quick=10), run.size(full=200, quick=8)
    with _prepared(queues.every(), D2_BATCH) as (connections, cluster, missing), contextlib.ExitStack() as at_end:
        for queue in connections:
            holder = at_end.enter_context(cluster.connect(queue.database, autocommit=False))
            holder.set_session(isolation_level="REPEATABLE READ")
            execute(holder, "SELECT 1")
        emits, drains = {queue: [] for queue in connections}, {queue: [] for queue in connections}
        run.say(f"D2: {rounds} rounds")
        for round_number in range(rounds):
            for queue in run.turn(list(connections), round_number):
                if queue.extension == "retrysafe" or sum(D2_ROUND / value for value in drains[queue]) < budget:
                    queue.hold(connections[queue])
                    start = time.monotonic()
                    queue.emit(connections[queue], D2_ROUND, per_transaction=D2_BATCH, batch=D2_BATCH)
                    emits[queue].append(D2_ROUND / (time.monotonic() - start))
                    drains[queue].append(D2_ROUND / queue.drain(connections[queue], D2_BATCH))
            if round_number % 10 == 9:
                for connection in connections.values():
                    execute(connection, "ANALYZE")
        dead = {queue: sum(dead_rows(cluster, queue.database, queue.subject.name).values()) for queue in connections}

    measured, checks = [], []
    by_hand = next(speed for queue, speed in drains.items() if queue.subject == subjects.HANDWRITTEN)
    for queue, speed in drains.items():
        few = max(1, min(10, len(speed) // 3))
        first, last = median(speed[:few]), median(speed[-few:])
        emit_first, emit_last = median(emits[queue][:few]), median(emits[queue][-few:])
        measured.append(f"{queue.label}: drain {rate(first)} → {rate(last)} ({last / first:.2f}), emit {rate(emit_first)} → "
                        f"{rate(emit_last)} ({emit_last / emit_first:.2f}), {dead[queue]:,} dead rows after "
                        f"{len(speed) * D2_ROUND:,} events")
        if queue.extension == "retrysafe":
            common = min(len(speed), len(by_hand))
            over_b = median(speed[common - few:common]) / median(by_hand[common - few:common])
            checks += [Check(f"{queue.label}: last to first {last / first:.2f}", last / first >= 0.95),
                       Check(f"{queue.label}: {dead[queue]:,} dead rows", dead[queue] < 1_000),
                       Check(f"{queue.label}: {over_b:.1f} times (b) after {common * D2_ROUND:,} events", over_b >= 7)]
    return {"D2": Result(
        measured=measured, checks=checks, missing=missing,
        settings=f"synchronous_commit = off (workers record synchronously all the same); draining is judged; first and last: medians of up to 10 rounds; references stop "
                 f"after {budget} s of draining; the worker is paused while events are emitted",
        charts=[Lines("D2: draining rounds of 10,000 events while a snapshot is held", "events so far", "events per second",
                      {queue.label: [((number + 1) * D2_ROUND, value) for number, value in enumerate(speed)]
                       for queue, speed in drains.items()})])}
