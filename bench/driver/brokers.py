"""B1: how many events a second one worker delivers to each kind of destination."""
import contextlib
import tempfile

from driver import servers
from driver.cluster import Cluster
from driver.destinations import BATCH, Destinations
from driver.numbers import rates
from driver.results import Bars, Result, one_line

KEYS = 1_000


def measure(run):
    count = run.size(full=50_000, quick=2_000)
    with Cluster() as cluster, contextlib.ExitStack() as at_end:
        log = Destinations(KEYS)
        log.create(cluster)
        connection = at_end.enter_context(cluster.connect(log.database))
        folder = at_end.enter_context(tempfile.TemporaryDirectory(prefix="retrysafe-bench-", dir="/tmp"))

        def deliver(server, events, more):
            """Returns events per second."""
            server.clear()
            seconds = log.seconds(cluster, connection, events, server.kind, server.options() | more)
            stored = server.stored()
            if stored not in (None, events):
                raise RuntimeError(f"{server.kind} has {stored} messages of {events} events")
            return events / seconds

        present, missing = [], []
        for kind in servers.ALL:
            run.say(f"B1: a server for {kind.kind}")
            try:
                server = kind(at_end, folder)
                deliver(server, 2 * BATCH, {})
                present.append(server)
            except Exception as error:
                missing.append(f"{kind.kind}: {one_line(error)}")
        bounds = dict(cluster.sql("""SELECT kind, "default"::int FROM retrysafe.outbox_kind_options
                                      WHERE option = 'max_in_flight'""", database=log.database))
        ways = {}                               # {label: (server, options beside what it needs)}
        for server in present:
            bound = bounds.get(server.kind)     # a kind without such an option has the whole batch under way
            ways[server.kind if bound is None else f"{server.kind}, {bound:,} in flight by default"] = (server, {})
            if bound is not None and bound < BATCH:
                ways[f"{server.kind}, {BATCH:,} in flight"] = (server, {"max_in_flight": BATCH})
        speed = {label: [] for label in ways}
        for number in run.rounds("B1"):
            for label in run.turn(list(ways), number):
                server, more = ways[label]
                speed[label].append(deliver(server, count, more))
    return {"B1": Result(
        measured=[f"{label}: {rates(values)}" for label, values in speed.items()],
        missing=missing,
        settings=f"synchronous_commit = on; {count:,} events, {KEYS:,} ordering keys, {BATCH} in a batch, one shard"
        + "".join(f"\n  * {server.kind}: {server.settings}" for server in present),
        charts=[Bars("B1: events per second to each kind of destination", "1/s",
                     {f"retrysafe, {label}": values for label, values in speed.items()})])}
