"""The destinations, each with a far side that keeps its own record."""
import itertools
import json
import time
from dataclasses import dataclass

from alarm import Alarm
from conftest import Server, eventually, in_spite_of_crashes, make_database, run
from far_sides import INBOX, Stream, Taken, redis_is_here
from hooks import MISCHIEF, TIMEOUT, Hook
from keepers import RedisKeeper, RelayKeeper
from puller import Puller
from records import Record

FAST = "backoff => '100 ms', backoff_max => '1 s'"
PATIENT = f"{FAST}, max_attempts => 1000000"
SHORT, LONG = "lease => '2 s'", "lease => '20 s'"


@dataclass
class FarSide:
    """What is expected of one destination's record."""
    record: object
    since: float = 0.0            # only of transactions that began after it (time.monotonic())
    until: float = float("inf")   # dropped: nothing has to arrive
    types: tuple = ()             # empty: all
    ordered: bool = True
    once: bool = False            # effects come once, whatever happens


class Destinations:
    def __init__(self, site, folder, seed):
        self.site, self.db, self.folder, self.seed = site, site.db, folder, seed
        folder.mkdir()
        self.far_sides, self.hooks, self.pullers, self.keepers = {}, {}, [], []
        self.far = self.redis = None
        self.alarm = Alarm()
        self.hooks_ever = []
        self._numbers = itertools.count(1)

    def create(self, at_end, say):
        self.hook("hook")
        self.hook("sharded", "shards => 4")
        self.hook("away", usual=0, kinds=())
        self.hook("picky", "event_types => '{ordered,plain}'", patience=f"{FAST}, max_attempts => 3", usual=0.2, kinds=("failed",),
                  types=("ordered", "plain"), ordered=False)
        self.hook("relayed", "shards => 2, workers => false")
        self.hook("shared", "shards => 4", lease=SHORT)
        self.keepers += [RelayKeeper(self.site, "relay 1", "relayed", "shared"), RelayKeeper(self.site, "relay 2", "relayed", "shared")]
        self.brief()
        self.pull("pull")
        self.far_sides["function"] = FarSide(Taken(self.db), once=True)
        self.db.sql(f"SELECT outbox_create_destination('function', 'function', '{{\"function\": \"public.take\"}}', {PATIENT}, {SHORT})")
        self.create_far(at_end)
        if redis_is_here():
            self.redis = RedisKeeper()
            self.keepers.append(self.redis)
            self.far_sides["redis"] = FarSide(Stream(self.redis.redis))
            self.db.sql(f"SELECT outbox_create_destination('redis', 'redis', %s, {PATIENT}, {SHORT})",
                        json.dumps(self.redis.redis.options(timeout="2s", connect_timeout="1s")))
        else:
            say("skipped: there is no redis-server")
        self.look()

    def hook(self, name, extra="shards => 1", patience=PATIENT, lease=LONG, usual=0.01, kinds=tuple(MISCHIEF), **expected):
        record = Record(self.folder / f"{name}.jsonl", self.alarm)
        hook = self.hooks[name] = Hook(name, record, self.seed, usual, kinds)
        self.hooks_ever.append(hook)
        self.far_sides[name] = FarSide(record, **expected)
        self.db.sql(f"SELECT outbox_create_destination(%s, 'http', %s, {patience}, {lease}, {extra})", name, options_of(hook))

    def pull(self, name):
        record = Record(self.folder / f"{name}.jsonl", self.alarm)
        self.far_sides[name] = FarSide(record)
        self.db.sql(f"SELECT outbox_create_destination(%s, 'pull', shards => 3, {PATIENT}, {SHORT})", name)
        for number in range(2):
            self.pullers.append(Puller(self.db, name, record, self.seed, number))

    def create_far(self, at_end):
        """A server of its own, without the extension."""
        self.far = Server(self.folder.parent / "far")
        at_end.callback(self.far.stop)
        database = make_database(self.far, "far")
        database.sql(INBOX)
        self.far_sides["postgres"] = FarSide(Taken(database), once=True)
        self.db.sql(f"SELECT outbox_create_destination('postgres', 'postgres', %s, shards => 2, {PATIENT}, {LONG})",
                    json.dumps({"host": "127.0.0.1", "port": self.far.port, "dbname": "far", "user": "postgres",
                                "function": "public.take", "connect_timeout": "1s"}))

    def brief(self):
        """Drops the destination `brief`, and makes it again, with another receiver. As a far side it has a number."""
        number = next(self._numbers)
        name = f"brief-{number}"
        record = Record(self.folder / f"{name}.jsonl", self.alarm)
        hook = Hook(name, record, self.seed)
        old, old_hook = self.far_sides.get(f"brief-{number - 1}"), self.hooks.pop(f"brief-{number - 1}", None)
        if old:
            old.until = time.monotonic()
        eventually(lambda: in_spite_of_crashes(lambda: self.db.sql(f"""
            SELECT retrysafe.outbox_drop_destination('brief');
            SELECT retrysafe.outbox_create_destination('brief', 'http', %s, {PATIENT}, {LONG}, shards => 2)""", options_of(hook))), timeout=60,
            message="a destination cannot be made")
        self.far_sides[name] = FarSide(record, since=time.monotonic())
        self.hooks[name] = hook
        self.hooks_ever.append(hook)
        if old_hook and not old_hook.away:
            old_hook.receiver.stop()
        return name

    def quiet_ones(self):
        """Names of those whose far sides tell the alarm, and whose publishers seldom renew a lease, which goes to the disk."""
        return ["pull", *(name.split("-")[0] for name in self.hooks if name != "shared")]

    def look(self):
        """In the main thread, often: starts again what has died."""
        for keeper in self.keepers:
            keeper.look()

    def start(self):
        for puller in self.pullers:
            puller.start()

    def calm(self):
        """From now on everything is taken, and answered."""
        for hook in self.hooks.values():
            hook.usual = hook.mischief = 0
        for puller in self.pullers:
            puller.mischief = 0
        for keeper in self.keepers:
            keeper.away_until = 0

    def stop(self):
        for puller in self.pullers:
            puller.stop.set()
        for puller in self.pullers:
            if puller.is_alive():
                puller.join()
        for keeper in self.keepers:
            keeper.stop()
        for hook in self.hooks.values():
            hook.receiver.__exit__()

    def unsettled(self):
        """What keeps the destinations from having had everything. Dead letters are sent again."""
        connection = self.db.server.connect(self.db.name)
        try:
            run(connection, "SELECT retrysafe.outbox_retry(name) FROM retrysafe.outbox_status WHERE dead > 0")
            left = run(connection, """SELECT name, backlog, parked_retry, parked_blocked, dead, state, last_error
                                        FROM retrysafe.outbox_status
                                       WHERE backlog > 0 OR parked_retry > 0 OR parked_blocked > 0 OR dead > 0""")
            return left + run(connection, "SELECT 'scheduled', count(*) FROM retrysafe.outbox_scheduled_events HAVING count(*) > 0")
        finally:
            connection.close()


def options_of(hook):
    return json.dumps({"url": hook.url, "timeout": f"{int(TIMEOUT * 1000)}ms", "connect_timeout": "1s"})
