"""W1 and W2, new requests; W3, requests that were answered before."""
from driver import subjects
from driver.cluster import Cluster
from driver.footprint import Footprint
from driver.load import pgbench
from driver.numbers import Ratio, median, rate
from driver.results import Bars, Check, Result

CLIENTS = 8
SYNC_OFF = "off"
_JUDGED = f"judged: {subjects.NUMBERED.label}, as the manual has it"


def new_requests(run):
    return _beside(run, _new_requests, (*subjects.OURS, *subjects.BY_HAND, subjects.BARE, subjects.PGQ))


def replays(run):
    return _beside(run, _replays, (*subjects.OURS, *subjects.BY_HAND, subjects.PGQ))


def _beside(run, measure, candidates):
    with Cluster(synchronous_commit=SYNC_OFF) as cluster:
        present, missing = subjects.create_all(cluster, candidates)
        results = measure(run, cluster, present)
    for result in results.values():
        result.settings = f"synchronous_commit = {SYNC_OFF}"
        result.missing = missing
    return results


def _new_requests(run, cluster, present):
    each = run.size(full=15_000, quick=3_000)
    runs = {subject: [] for subject in present}
    footprint = Footprint(cluster, present)

    def requests(subject, each):
        return pgbench(cluster, subject.name, subject.request(subjects.NEW), clients=CLIENTS, each=each, seed=run.seed())

    # Pages that exist get their full image in WAL here, once after the checkpoint, and not in the rounds.
    cluster.checkpoint()
    for subject in present:
        requests(subject, each // 2)
    for round_number in run.rounds("W1 W2"):
        _analyze(cluster, present)
        for subject in run.turn(present, round_number):
            runs[subject].append(requests(subject, each))

    speed = {s: [r.rate for r in runs[s]] for s in present}
    cpu = {s: [r.cpu / r.count * 1e6 for r in runs[s]] for s in present}
    wal = {s: [r.wal / r.count for r in runs[s]] for s in present}
    # What the manual tells people to write.
    faster, cheaper, less = (Ratio(one[subjects.NUMBERED], one[subjects.HANDWRITTEN]) for one in (speed, cpu, wal))
    plus = [Ratio(one[subjects.NUMBERED], one[subjects.HANDWRITTEN_PLUS]) for one in (speed, cpu, wal)]
    sample = run.size(full=1_000, quick=250)
    for subject in present:
        with footprint.stretch(subject, CLIENTS * sample):
            requests(subject, sample)
    left_behind = footprint.table("W1 and W2: new requests", "request")
    return {
        "W1": Result(
            measured=[f"{s.label}: {rate(median(speed[s]))}, {median(cpu[s]):.0f} µs" for s in present]
            + [_JUDGED, f"not judged: to (b+) requests {plus[0]}, CPU {plus[1]}"],
            checks=[Check(f"requests {faster}", faster.value >= 1.5), Check(f"CPU {cheaper}", cheaper.value <= 0.65)],
            charts=[Bars("W1: requests per second", "1/s", {s.label: speed[s] for s in present}),
                    Bars("W1: server CPU per request", "µs", {s.label: cpu[s] for s in present})],
            footprint=left_behind),
        "W2": Result(
            measured=[f"{s.label}: {median(wal[s]):,.0f} B" for s in present]
            + [_JUDGED, f"not judged: to (b+) {plus[2]}"],
            checks=[Check(str(less), less.value <= 0.7)],
            charts=[Bars("W2: WAL per request", "bytes", {s.label: wal[s] for s in present})],
            footprint=left_behind),
    }


def _replays(run, cluster, present):
    known = run.size(full=100_000, quick=8_000)
    each = run.size(full=15_000, quick=5_000)
    for subject in present:
        script = subject.request(subjects.in_turn(known // CLIENTS))
        pgbench(cluster, subject.name, script, clients=CLIENTS, each=known // CLIENTS, seed=run.seed())
    ways = [*present, subjects.ASKED_FIRST]
    speed = {way: [] for way in ways}
    footprint = Footprint(cluster, present)

    def requests(subject, each):
        script = subject.request(subjects.numbered(known), subject.replay)
        return pgbench(cluster, subject.name, script, clients=CLIENTS, each=each, seed=run.seed()).rate

    for round_number in run.rounds("W3"):
        _analyze(cluster, present)
        for way in run.turn(ways, round_number):
            speed[way].append(requests(way, each))
    sample = run.size(full=1_000, quick=250)
    for subject in present:
        with footprint.stretch(subject, CLIENTS * sample):
            requests(subject, sample)
    best = max((*subjects.OURS, subjects.ASKED_FIRST), key=lambda way: median(speed[way]))
    faster = Ratio(speed[best], speed[subjects.HANDWRITTEN])
    return {"W3": Result(
        measured=[f"{way.label}: {rate(median(speed[way]))}" for way in ways]
        + [f"judged: {best.label}, the fastest of ours"]
        + [f"not judged: to (b+) {Ratio(speed[best], speed[subjects.HANDWRITTEN_PLUS])}"],
        checks=[Check(str(faster), faster.value >= 1.5)],
        charts=[Bars("W3: replays per second", "1/s", {way.label: speed[way] for way in ways})],
        footprint=footprint.table("W3: replays", "request"))}


def _analyze(cluster, present):
    for subject in present:
        cluster.sql("ANALYZE", database=subject.name)
