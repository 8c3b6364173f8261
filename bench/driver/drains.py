"""D1, how fast a backlog is drained; D2, whether that stays so while a snapshot is held."""
import contextlib
import functools
import time

from driver import queues, subjects
from driver.cluster import Cluster, execute
from driver.footprint import Footprint
from driver.numbers import Ratio, median, rate
from driver.results import Bars, Check, Lines, Result

SMALL, LARGE = 500, 10_000          # events in a batch of D1: the default of ours, and what lies between two ticks of PgQ
D2_BATCH, D2_ROUND = 100, 10_000


@contextlib.contextmanager
def _prepared(candidates):
    """A cluster with those queues that can be had: yields ({queue: connection}, cluster, what is missing)."""
    with Cluster(synchronous_commit="off") as cluster, contextlib.ExitStack() as at_end:
        present, missing = subjects.create_all(cluster, candidates)
        connections = {queue: at_end.enter_context(cluster.connect(queue.database)) for queue in present}
        for queue, connection in connections.items():
            queue.prepare_drain(connection)
        yield connections, cluster, missing


def _d1(kind, batch, how="", **options):
    """One way to drain, in a database of its own."""
    queue = kind(batch, **options)
    queue.label += f"{how}, {batch:,} in a batch"
    queue.database += f"_{'server' if queue.in_server else 'client'}_{batch}"
    return queue


def backlog(run):
    pending = run.size(full=500_000, quick=50_000)
    client, loop = ", by a client", ", by a loop in the server"
    ours, ours_large = _d1(queues.Worker, SMALL), _d1(queues.Worker, LARGE)
    by_hand, by_hand_large = _d1(queues.by_hand, SMALL, client), _d1(queues.by_hand, LARGE, client)
    by_hand_loop = _d1(queues.by_hand, SMALL, loop, in_server=True)
    plus = _d1(queues.by_hand, SMALL, client, subject=subjects.HANDWRITTEN_PLUS)
    pgq, pgq_loop = _d1(queues.pgq, LARGE, client), _d1(queues.pgq, LARGE, loop, in_server=True)
    with _prepared([ours, by_hand, ours_large, pgq, by_hand_loop, pgq_loop, by_hand_large, plus]) as (connections, cluster, missing):
        speed = {queue: [] for queue in connections}
        # How they are drained makes no difference to what is left.
        footprint = Footprint(cluster, [queue for queue in (ours, ours_large, by_hand, plus, pgq) if queue in connections])
        for round_number in run.rounds("D1"):
            turn = run.turn(list(connections), round_number)
            # Two at a time, so that the events of all are in shared buffers when they are drained.
            for pair in zip(turn[::2], [*turn[1::2], None]):
                pair = list(filter(None, pair))
                queues.in_parallel(*(functools.partial(queue.fill, connections[queue], pending) for queue in pair))
                cluster.checkpoint()
                for queue in pair:
                    speed[queue].append(pending / queue.empty(cluster, connections[queue]))
        for queue in footprint.owners:
            footprint.one_more_round(queue, connections[queue], 2 * LARGE)
        left_behind = footprint.table("D1: a backlog is drained", "event")

    return {"D1": Result(
        measured=[f"{queue.label}: {rate(median(values))}" for queue, values in speed.items()]
        + [f"not judged: {_ratio(speed, mine, reference)}"
           for mine, reference in ((ours, by_hand_loop), (ours_large, pgq_loop), (ours, plus), (ours_large, by_hand_large))
           if reference in speed],
        checks=[_judged(speed, ours, by_hand, 10), _judged(speed, ours_large, pgq, 2)],
        missing=missing,
        settings=f"synchronous_commit = off (workers record synchronously all the same); {pending:,} events; judged with as many "
                 "events in a batch on both sides, each of which reaches a program that counts it",
        charts=[Bars("D1: events drained per second", "1/s", {queue.label: values for queue, values in speed.items()})],
        footprint=left_behind)}


def _ratio(speed, ours, reference):
    return f"to {reference.label}: {Ratio(speed[ours], speed[reference])}"


def _judged(speed, ours, reference, goal):
    if reference not in speed:
        return Check(f"to {reference.label}: not measured", None)
    return Check(_ratio(speed, ours, reference), Ratio(speed[ours], speed[reference]).value >= goal)


def held_snapshot(run):
    rounds, budget = run.size(full=100, quick=10), run.size(full=60, quick=6)
    wanted = [
        queues.Worker(D2_BATCH, database="retrysafe_worker"),
        queues.Pull(subjects.RUN, "retrysafe", D2_BATCH, label="retrysafe, fetch and ack", database="retrysafe_pull", in_server=True),
        queues.by_hand(D2_BATCH), queues.by_hand(D2_BATCH, subject=subjects.HANDWRITTEN_PLUS), queues.pgq(D2_BATCH),
    ]
    with _prepared(wanted) as (connections, cluster, missing), contextlib.ExitStack() as at_end:
        for queue in connections:
            holder = at_end.enter_context(cluster.connect(queue.database, autocommit=False))
            holder.set_session(isolation_level="REPEATABLE READ")
            execute(holder, "SELECT 1")
        footprint = Footprint(cluster, connections)
        emits, drains = {queue: [] for queue in connections}, {queue: [] for queue in connections}
        run.say(f"D2: {rounds} rounds")
        for round_number in range(rounds):
            for queue in run.turn(list(connections), round_number):
                if queue.extension == "retrysafe" or sum(D2_ROUND / value for value in drains[queue]) < budget:
                    # The first round is the one that first touches the tables.
                    looked_at = footprint.stretch if round_number == 1 else _not_looked_at
                    queue.hold(connections[queue])
                    with looked_at(queue, D2_ROUND, "emitted"):
                        start = time.monotonic()
                        queue.emit(connections[queue], D2_ROUND, per_transaction=D2_BATCH)
                        emits[queue].append(D2_ROUND / (time.monotonic() - start))
                    with looked_at(queue, D2_ROUND, "drained"):
                        drains[queue].append(D2_ROUND / queue.drain(connections[queue]))
            if round_number % 10 == 9:
                for connection in connections.values():
                    execute(connection, "ANALYZE")
        dead = {queue: footprint.dead_rows(queue) for queue in connections}
        left_behind = footprint.table("D2: rounds while a snapshot is held", "event")

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
                       for queue, speed in drains.items()})],
        footprint=left_behind)}


def _not_looked_at(*_):
    return contextlib.nullcontext()
