"""Programs that publish through the pull API and are no better than other programs: they give events back, forget batches,
stop in the middle. What nobody answered they ask again, in another session, whatever happened to the server since."""
import random

import psycopg2

from conftest import run
from ledger import digest
from player import Player
from records import Arrival

# Some renew their leases all the time and wait for the disk, others do neither.
LEASES = ("2 seconds", "20 seconds")
DURABLY = ("on", "off")
EXPECTED = {"RS210", "RS211", "RS217"}  # the lease has ended meanwhile


class Puller(Player):
    def __init__(self, db, destination, record, seed, number):
        super().__init__(f"puller {number}")
        self.db, self.destination, self.record = db, destination, record
        self.r = random.Random(f"{seed}/puller/{number}")
        self.mischief = 0.1
        self.unanswered = None  # a batch that may or may not be acknowledged, and what of it was given back
        self.lease, self.durably = LEASES[number % 2], DURABLY[number % 2]

    def play(self):
        while not self.stop.is_set():
            connection = None
            try:
                connection = self.db.server.connect(self.db.name)
                run(connection, f"SET synchronous_commit = {self.durably}")
                if self.unanswered:
                    self.acknowledge_again(connection, *self.unanswered)
                    self.counts["acknowledged again"] += 1
                while not self.stop.is_set():
                    if not self.batch(connection):
                        self.stop.wait(0.2)
            except psycopg2.Error as error:
                self.counts[error.pgcode or "connection lost"] += 1
                if error.pgcode in EXPECTED:
                    self.unanswered = None
                if error.pgcode and error.pgcode not in EXPECTED and error.pgcode[:2] not in ("40", "53", "57"):
                    self.unexpected.append(f"{self.name}: {error.pgcode} {error}")
                self.stop.wait(0.1)
            finally:
                if connection is not None:
                    connection.close()

    def acknowledge(self, connection, batch, given_back):
        self.unanswered = batch, given_back
        run(connection, "SELECT retrysafe.outbox_ack(%s)", batch)
        self.unanswered = None

    def acknowledge_again(self, connection, batch, given_back):
        """A promotion may have lost what was given back."""
        for event_id in given_back:
            try:
                self.give_back(connection, batch, event_id)
            except psycopg2.Error as error:
                if error.pgcode != "RS211":  # it was not lost
                    raise
        self.acknowledge(connection, batch, given_back)

    @staticmethod
    def give_back(connection, batch, event_id):
        run(connection, "SELECT retrysafe.outbox_nack(%s, %s, 'no', '100 ms')", batch, event_id)

    def batch(self, connection):
        rows = run(connection, """SELECT batch, id, event_id::text, event_key, event_type, ordering_key, payload
                                    FROM retrysafe.outbox_fetch(%s, %s, lease => %s)""",
                   self.destination, self.r.choice((1, 10, 100, 500)), self.lease)
        if not rows:
            return False
        given_back, keys_given_back, last = [], set(), None
        for batch, position, event_id, key, event_type, ordering_key, payload in rows:
            choice = self.r.random() / self.mischief if self.mischief else 1
            if ordering_key in keys_given_back:
                continue
            if choice < 0.2:
                self.counts["given back"] += 1
                self.give_back(connection, batch, event_id)
                given_back.append(event_id)
                if ordering_key is not None:
                    keys_given_back.add(ordering_key)
                continue
            self.record.write(Arrival(event_id, key, event_type, ordering_key, payload.get("n"), digest(payload)))
            last = position
            if choice < 0.21:
                self.counts["stopped in the middle"] += 1
                run(connection, "SELECT retrysafe.outbox_ack(%s, %s)", batch, last)
                run(connection, "SELECT retrysafe.outbox_release(%s)", batch)
                return True
            if choice < 0.22:
                self.counts["forgotten"] += 1
                self.stop.wait(self.r.random() * 3)
                return True
        self.acknowledge(connection, rows[0][0], given_back)
        self.counts["batches"] += 1
        return True
