"""The destinations, each with a far side that keeps its own record."""
import json

from conftest import run
from hooks import TIMEOUT, Hook
from puller import Puller
from records import Record

FAST = "backoff => '100 ms', backoff_max => '1 s', lease => '2 s', max_attempts => 1000000"


class Destinations:
    def __init__(self, db, folder, seed):
        self.db, self.folder, self.seed = db, folder, seed
        folder.mkdir()
        self.records = {}
        self.hooks = {}
        self.pullers = []

    def record(self, name):
        return self.records.setdefault(name, Record(self.folder / f"{name}.jsonl"))

    def create(self):
        self.hook("hook")
        self.hook("sharded", "shards => 4")
        self.pull("pull")

    def hook(self, name, extra="shards => 1", **behaviour):
        hook = self.hooks[name] = Hook(name, self.record(name), self.seed, **behaviour)
        self.db.sql(f"SELECT outbox_create_destination(%s, 'http', %s, {FAST}, {extra})", name,
                    json.dumps({"url": hook.url, "timeout": f"{int(TIMEOUT * 1000)}ms", "connect_timeout": "1s"}))

    def pull(self, name):
        self.db.sql(f"SELECT outbox_create_destination(%s, 'pull', shards => 3, {FAST})", name)
        for number in range(2):
            self.pullers.append(Puller(self.db, name, self.record(name), self.seed, number))

    def start(self):
        for puller in self.pullers:
            puller.start()

    def calm(self):
        """From now on everything is taken, and answered."""
        for hook in self.hooks.values():
            hook.usual = hook.mischief = 0
        for puller in self.pullers:
            puller.mischief = 0

    def stop(self):
        for puller in self.pullers:
            puller.stop.set()
        for puller in self.pullers:
            if puller.is_alive():
                puller.join()
        for hook in self.hooks.values():
            hook.receiver.__exit__()

    def unsettled(self):
        """What keeps the destinations from having had everything."""
        connection = self.db.server.connect(self.db.name)
        try:
            left = run(connection, """SELECT name, backlog, parked_retry, parked_blocked, state, last_error FROM retrysafe.outbox_status
                                       WHERE backlog > 0 OR parked_retry > 0 OR parked_blocked > 0""")
            return left + run(connection, "SELECT 'scheduled', count(*) FROM retrysafe.outbox_scheduled_events HAVING count(*) > 0")
        finally:
            connection.close()
