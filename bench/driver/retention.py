"""R1: what retention costs, and what those who emit meanwhile notice of it."""
import contextlib
import functools
import time

from driver import queues, subjects
from driver.cluster import Cluster, execute
from driver.footprint import Footprint
from driver.load import steady
from driver.numbers import Ratio, duration, median, percentile, size
from driver.queues import Queue
from driver.results import Bars, Check, Result
from driver.subjects import SQL

OURS, BY_HAND = "retrysafe", "(b) DELETE and VACUUM"
EMITS = 1_000               # a second, beside the clean-up
WINDOW = 3.0                # seconds that are compared
# pg_dump locks every table like this, for as long as it runs.
_DUMP = """DO $$ DECLARE one regclass; BEGIN
  FOR one IN SELECT c.oid FROM pg_class c JOIN pg_depend d ON d.classid = 'pg_class'::regclass AND d.objid = c.oid
               JOIN pg_extension e ON d.refclassid = 'pg_extension'::regclass AND e.oid = d.refobjid
              WHERE e.extname = 'retrysafe' AND c.relkind = 'r' LOOP
    EXECUTE format('LOCK TABLE %s IN ACCESS SHARE MODE', one);
  END LOOP; END $$"""
_EMIT = ("\\set key random(1, 9223372036854775807)\n"
         "SELECT retrysafe.outbox_emit(NULL, 'live-' || :key, 'order.placed', '{\"number\": 1}', 'customer-1');\n")


class _ByHand(Queue):
    def remove(self, connection):
        for statement in ("DELETE FROM handwritten.idempotency_keys", "DELETE FROM handwritten.outbox",
                          "VACUUM handwritten.idempotency_keys", "VACUUM handwritten.outbox"):
            execute(connection, statement)


class _Ring(Queue):
    def remove(self, connection):
        self.remove_up_to(connection, self.newest(connection))

    @staticmethod
    def newest(connection):
        """{ring: the table that takes new rows now}"""
        return dict(execute(connection, "SELECT ring, max(generation) FROM retrysafe.ring_status"
                                        " WHERE ring IN ('records', 'log') GROUP BY ring"))

    @staticmethod
    def remove_up_to(connection, full):
        """The steps that workers take by themselves, until these are empty."""
        deadline = time.monotonic() + 60
        while _left(connection, full):
            for clean_up in ("idem_cleanup", "outbox_cleanup"):
                while execute(connection, f"SELECT retrysafe.{clean_up}()")[0][0]:
                    pass
            if time.monotonic() > deadline:
                held = execute(connection, "SELECT ring, piece, state, held_by FROM retrysafe.ring_status")
                raise RuntimeError(f"what retention does not keep is still there after 60 s: {held}")


def measure(run):
    rows = run.size(full=1_000_000, quick=50_000)
    with _prepared() as (cluster, connections):
        footprint = Footprint(cluster, connections)
        seconds, wal = {queue: [] for queue in connections}, {queue: [] for queue in connections}
        for number in run.rounds("R1"):
            queues.in_parallel(*(functools.partial(_fill, queue, connection, rows) for queue, connection in connections.items()))
            cluster.checkpoint()
            for queue in run.turn(list(connections), number):
                _let_go(cluster, queue)
                start, position = time.monotonic(), cluster.wal_position()
                queue.remove(connections[queue])
                seconds[queue].append(time.monotonic() - start)
                wal[queue].append(cluster.wal_position() - position)
                _keep(cluster, queue)
        ours = next(queue for queue in connections if queue.label == OURS)
        sample = run.size(full=50_000, quick=5_000)
        for queue, connection in connections.items():
            _fill(queue, connection, sample)
            _let_go(cluster, queue)
            with footprint.stretch(queue, sample, "removed"):
                queue.remove(connection)
            _keep(cluster, queue)
        noticed = {False: [], True: []}
        for number in run.rounds("R1, beside emits"):
            for held in run.turn(list(noticed), number):
                noticed[held].append(_beside_emits(run, cluster, ours, connections[ours], rows, held))
        left_behind = footprint.table("R1: retention", "record and event")
    took, written = median(seconds[ours]), median(wal[ours])
    checks = [Check(f"{duration(took)} ({duration(min(seconds[ours]))}–{duration(max(seconds[ours]))})", took < 0.5),
              Check(f"WAL {size(written)}", written < 1 << 20)]
    measured = [f"{queue.label}: {duration(median(seconds[queue]))}, WAL {size(median(wal[queue]))}" for queue in connections]
    for held, pairs in noticed.items():
        name = "emit p99 while a dump holds its locks" if held else "emit p99 meanwhile"
        before, meanwhile, still = ([pair[i] for pair in pairs] for i in range(3))
        measured.append(f"{name}: {duration(median(meanwhile))}, before {duration(median(before))}; "
                        f"of two windows before, one to the other {Ratio(before, still)}")
        ratio = Ratio(meanwhile, before)
        # Of a few thousand emits a handful decide: one and a half times is within what two equal windows differ by.
        checks.append(Check(f"{name} {ratio} times that before", ratio.value < 1.5))
    return {"R1": Result(
        measured=measured, checks=checks,
        settings=f"synchronous_commit = off; {rows:,} records and {rows:,} events; idem_cleanup and outbox_cleanup called by "
                 f"hand, no worker; {EMITS:,} emits a second beside, windows of {WINDOW:g} s",
        footprint=left_behind,
        charts=[Bars("R1: time to remove", "s", {queue.label: values for queue, values in seconds.items()}),
                Bars("R1: WAL to remove", "MB", {q.label: [v / 2 ** 20 for v in values] for q, values in wal.items()})])}


@contextlib.contextmanager
def _prepared():
    # Workers would take the steps before they can be measured.
    with Cluster(synchronous_commit="off", **{"retrysafe.workers_per_database": "0"}) as cluster, contextlib.ExitStack() as end:
        connections = {}
        for queue in (_Ring(subjects.RUN, "retrysafe", 100, label=OURS),
                      _ByHand(subjects.HANDWRITTEN, "handwritten", 100, label=BY_HAND)):
            queue.create(cluster)
            cluster.sql((SQL / "answers" / f"{queue.file}.sql").read_text(), database=queue.database)
            connections[queue] = end.enter_context(cluster.connect(queue.database))
        yield cluster, connections


def _fill(queue, connection, rows):
    first = queue.emitted + 1
    queue.emit(connection, rows, per_transaction=100)
    execute(connection, "CALL save_answers(%s, %s, 100)", (first, queue.emitted))
    execute(connection, "ANALYZE")


_SETTINGS = {"retrysafe.outbox_retention": "0", "retrysafe.idem_rotation_age": "1s", "retrysafe.outbox_rotation_age": "1s"}


def _let_go(cluster, queue):
    """Retention is over for all that is there."""
    if queue.label == OURS:
        time.sleep(1.5)                 # the age at which a table takes no more, and the answers' ttl
        _set(cluster, queue, _SETTINGS)


def _keep(cluster, queue):
    if queue.label == OURS:
        _set(cluster, queue, dict.fromkeys(_SETTINGS))


def _set(cluster, queue, settings):
    with cluster.connect(queue.database) as session:
        for name, value in settings.items():
            execute(session, f"ALTER SYSTEM RESET {name}" if value is None else f"ALTER SYSTEM SET {name} = '{value}'")
        execute(session, "SELECT pg_reload_conf()")
        # Sessions take a reload before their next statement; this one shows that the signal has gone out.
        name, value = next(iter(settings.items()))
        queues.wait(lambda: (execute(session, f"SHOW {name}")[0][0] == "0") == (value is not None), "the reload")


def _beside_emits(run, cluster, queue, connection, rows, held_by_dump):
    """p99 of an emit before and during the clean-up, and earlier: what two equal windows differ by."""
    _fill(queue, connection, rows)
    full = queue.newest(connection)
    cluster.checkpoint()
    with contextlib.ExitStack() as at_end:
        emits = at_end.enter_context(steady(cluster, queue.database, _EMIT, clients=4, rate=EMITS, seed=run.seed()))
        dump = at_end.enter_context(cluster.connect(queue.database, autocommit=False))
        if held_by_dump:
            dump.set_session(isolation_level="REPEATABLE READ", readonly=False)
            execute(dump, _DUMP)
        time.sleep(1 + 2 * WINDOW)
        _let_go(cluster, queue)
        start = time.time()
        if held_by_dump:
            while time.time() < start + WINDOW:
                for clean_up in ("idem_cleanup", "outbox_cleanup"):
                    execute(connection, f"SELECT retrysafe.{clean_up}()")
                time.sleep(0.01)
        else:
            queue.remove_up_to(connection, full)
            time.sleep(max(0.0, start + WINDOW - time.time()))
        latencies = emits()
    settled = start - 1.5           # when retention was told to let go
    if held_by_dump:
        queue.remove_up_to(connection, full)      # what the dump held goes after it
    _keep(cluster, queue)
    return [percentile([seconds for at, seconds in latencies if begin < at <= begin + WINDOW], 99)
            for begin in (settled - WINDOW, start, settled - 2 * WINDOW)]


def _left(connection, full):
    return any(execute(connection, "SELECT EXISTS (SELECT FROM retrysafe.ring_status WHERE ring = %s AND generation <= %s)",
                       (ring, generation))[0][0] for ring, generation in full.items())
