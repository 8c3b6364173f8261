"""Destinations of any kind over one log of events, one at a time."""
import contextlib
import json

from driver.cluster import execute
from driver.queues import Worker

BATCH = 500             # events, the default


class Destinations(Worker):
    """Each measurement has a destination of its own, which is there for it alone."""

    def __init__(self, keys):
        super().__init__(BATCH)
        self._keys = keys

    def _emit(self, connection, first, last, per_transaction):
        execute(connection, "CALL emit_events(%s, %s, %s, %s)", (first, last, per_transaction, self._keys))

    def seconds(self, cluster, connection, count, kind, options, *, workers=True, publisher=contextlib.nullcontext):
        """That `count` events take, of which all wait when the first is published. `publisher()`: what runs meanwhile."""
        execute(connection, "SELECT retrysafe.outbox_drop_destination('counter')")
        execute(connection, "SELECT retrysafe.outbox_create_destination('counter', %s, %s, workers => %s)",
                (kind, json.dumps(options), workers))
        self.fill(connection, count)
        cluster.checkpoint()
        with publisher():
            return self.empty(cluster, connection)

    def is_drained(self, connection):
        backlog, dead, parked, error = execute(
            connection, "SELECT backlog, dead, parked_retry, last_error FROM retrysafe.outbox_status")[0]
        if dead or parked or error:
            raise RuntimeError(f"not every event was delivered at once: {error or f'{dead} dead letters, {parked} wait'}")
        return backlog == 0
