"""Turns the rings all the time, and watches what grows."""
import json

import psycopg2

from conftest import run
from player import Player


class Housekeeper(Player):
    def __init__(self, db):
        super().__init__("housekeeper")
        self.db = db

    def play(self):
        while not self.stop.is_set():
            try:
                connection = self.db.server.connect(self.db.name)
                while not self.stop.wait(0.2):
                    for function in ("outbox_cleanup", "idem_cleanup"):
                        self.counts[function] += run(connection, f"SELECT retrysafe.{function}()")[0][0]
            except psycopg2.Error:
                self.stop.wait(0.1)


SIZE = """SELECT coalesce(sum(pg_total_relation_size(c.oid)), 0)::bigint
            FROM pg_class c WHERE relnamespace = 'retrysafe'::regnamespace AND relname LIKE 'outbox%' AND relkind = 'r'"""


# A worker that waits for a far side, or for nothing at all, with a transaction open.
WAITING_IN_TRANSACTION = """
    SELECT pid, backend_type, xact_start FROM pg_stat_activity
     WHERE xact_start IS NOT NULL AND backend_type = 'retrysafe worker' AND wait_event_type = 'Extension'"""


class Watcher(Player):
    """Looks once a second, at a database that is up."""

    def __init__(self, db, path):
        super().__init__("watcher")
        self.db, self.path = db, path
        self.largest, self.attempts, self.in_transaction = 0, [], []

    def play(self):
        with open(self.path, "w", buffering=1) as samples:
            while not self.stop.wait(1):
                try:
                    self.look(samples)
                except psycopg2.Error:
                    pass

    def look(self, samples):
        connection = self.db.server.connect(self.db.name)
        try:
            waiting = run(connection, WAITING_IN_TRANSACTION)
            if waiting and not self.stop.wait(0.5):  # it may be a step of a ring, which takes milliseconds
                self.in_transaction += map(str, set(waiting) & set(run(connection, WAITING_IN_TRANSACTION)))
            size = run(connection, SIZE)[0][0]
            self.largest = max(self.largest, size)
            status = run(connection, "SELECT name, backlog, parked_retry, parked_blocked, dead, state FROM retrysafe.outbox_status")
            samples.write(json.dumps({"bytes": size, "status": status}) + "\n")
            self.counts["looks"] += 1
            for name, _, *parked, _ in status:
                if name == "away" and any(parked):
                    self.attempts.append(f"away has parked events: {parked}")
        finally:
            connection.close()
