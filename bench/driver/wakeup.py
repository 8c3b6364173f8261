"""L3: what being woken up costs those who write."""
from driver import relay, subjects
from driver.cluster import Cluster, execute
from driver.footprint import Footprint
from driver.load import pgbench
from driver.numbers import Ratio, median, rate
from driver.queues import wait
from driver.results import Bars, Check, Result

CLIENTS = 8
WORKER, NO_WORKER = "retrysafe, a waiting worker", "retrysafe, no worker"
NOTIFY, NO_NOTIFY = "(b) with NOTIFY, a waiting listener", "(b) without NOTIFY"
_SUBJECT = {WORKER: subjects.RUN, NO_WORKER: subjects.RUN, NOTIFY: subjects.HANDWRITTEN, NO_NOTIFY: subjects.HANDWRITTEN}


def measure(run):
    checks, measured, bars = [], [], {}

    def requests(subject, each):
        return pgbench(cluster, subject.name, subject.request(subjects.NEW), clients=CLIENTS, each=each, seed=run.seed()).rate

    with Cluster() as cluster:
        for subject in (subjects.RUN, subjects.HANDWRITTEN):
            subject.create(cluster)
        relay.install(cluster, subjects.HANDWRITTEN.name)
        cluster.sql((subjects.SQL / "events/worker.sql").read_text(), database=subjects.RUN.name)
        footprint = Footprint(cluster, [subjects.RUN, subjects.HANDWRITTEN])
        with cluster.connect(subjects.HANDWRITTEN.name) as listener:
            for sync in ("off", "on"):
                execute(listener, f"ALTER SYSTEM SET synchronous_commit = {sync}")
                execute(listener, "SELECT pg_reload_conf()")
                speed = {what: [] for what in _SUBJECT}
                each = run.size(full=20_000, quick=2_000) if sync == "off" else run.size(full=4_000, quick=400)
                for number in run.rounds(f"L3, synchronous_commit = {sync}"):
                    for what in run.turn(list(_SUBJECT), number):
                        _switch(cluster, listener, what)
                        # Those by hand are not judged, and NOTIFY is slow: fewer tell enough.
                        speed[what].append(requests(_SUBJECT[what], each if what in (WORKER, NO_WORKER) else each // 4))
                ours, by_hand = Ratio(speed[WORKER], speed[NO_WORKER]), Ratio(speed[NOTIFY], speed[NO_NOTIFY])
                checks.append(Check(f"synchronous_commit {sync}: {ours}", ours.value >= 0.97))
                measured += [f"{what}, synchronous_commit {sync}: {rate(median(values))}" for what, values in speed.items()]
                measured.append(f"(b), synchronous_commit {sync}: {by_hand}")
                bars |= {f"{what}, {sync}": values for what, values in speed.items()}
            sample = run.size(full=1_000, quick=100)
            for what in (WORKER, NOTIFY):
                _switch(cluster, listener, what)
                with footprint.stretch(_SUBJECT[what], CLIENTS * sample):
                    requests(_SUBJECT[what], sample)
        left_behind = footprint.table("L3: new requests beside a waiting worker, and beside a listener", "request")
    return {"L3": Result(measured=measured, checks=checks, settings="synchronous_commit = off and on",
                         footprint=left_behind,
                         charts=[Bars("L3: requests per second with and without somebody to wake up", "1/s", bars)])}


def _switch(cluster, listener, what):
    """The worker is there, or the listener listens, only where this is what is measured."""
    execute(listener, "LISTEN outbox" if what == NOTIFY else "UNLISTEN *")
    trigger = "ENABLE" if what == NOTIFY else "DISABLE"
    execute(listener, f"ALTER TABLE handwritten.outbox {trigger} TRIGGER notify_relay")
    execute(listener, f"ALTER SYSTEM SET retrysafe.workers_per_database = {int(what == WORKER)}")
    execute(listener, "SELECT pg_reload_conf()")
    workers = "SELECT count(*) FROM pg_stat_activity WHERE backend_type = 'retrysafe worker' AND datname = current_database()"
    with cluster.connect(subjects.RUN.name) as session:
        # The worker looks at what it is woken up for, and none of it is for this destination. A new one each time, which
        # has nothing to catch up on.
        execute(session, "SELECT retrysafe.outbox_drop_destination('other')")
        wait(lambda: execute(session, workers)[0][0] == int(what == WORKER), "workers to follow the setting")
        if what == WORKER:
            execute(session, "SELECT retrysafe.outbox_create_destination('other', 'null', event_types => '{something.else}')")
            wait(lambda: execute(session, "SELECT holders FROM retrysafe.outbox_status")[0][0], "a worker to claim")
