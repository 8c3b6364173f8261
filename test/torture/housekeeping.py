"""Turns the rings all the time, and watches what grows."""
import collections
import json

import psycopg2

from conftest import run
from player import Player


class Housekeeper(Player):
    def __init__(self, site):
        super().__init__("housekeeper")
        self.site, self.db = site, site.db

    def play(self):
        while not self.stop.is_set():
            try:
                connection = self.db.server.connect(self.db.name)
                while not self.stop.wait(0.2):
                    for function in ("outbox_cleanup", "idem_cleanup") if not self.site.quiet.is_set() else ():
                        self.counts[function] += run(connection, f"SELECT retrysafe.{function}()")[0][0]
            except psycopg2.Error:
                self.stop.wait(0.1)


SIZE = """SELECT coalesce(sum(pg_total_relation_size(c.oid)), 0)::bigint
            FROM pg_class c WHERE relnamespace = 'retrysafe'::regnamespace AND relname LIKE 'outbox%' AND relkind = 'r'"""


# A worker that waits for a far side, or for nothing at all, with a transaction open. What it says it does is from one moment with
# its transaction, what it waits for is from a later one: by then it may be through with the step that the transaction is of.
IN_TRANSACTION = """
    SELECT pid, xact_start, query, wait_event_type || '/' || wait_event AS waits,
           query IN ('publishing', 'idle', 'waiting for the synchronous standby') AS between_steps
      FROM pg_stat_activity
     WHERE xact_start IS NOT NULL AND backend_type = 'retrysafe worker' AND wait_event_type = 'Extension'"""


class Watcher(Player):
    """Looks once a second, at a database that is up."""

    def __init__(self, db, path):
        super().__init__("watcher")
        self.db, self.path = db, path
        self.largest, self.attempts, self.in_transaction = 0, [], []
        self.met = collections.Counter()  # what workers were about

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
            waiting = run(connection, IN_TRANSACTION)
            for pid, since, query, waits, between_steps in waiting:
                self.met[f"{query}, {waits}"] += 1
                if between_steps:
                    self.in_transaction.append(f"process {pid}, {query}, {waits}: its transaction has been open since {since}")
            if waiting and not self.stop.wait(0.5):  # a step of a ring waits for milliseconds
                self.in_transaction += [f"process {pid} has been in one transaction for half a second, {query}, {waits}"
                                        for pid, _, query, waits, _ in set(waiting) & set(run(connection, IN_TRANSACTION))]
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
