"""Programs that publish through the pull API and are no better than other programs: they give events back, forget batches,
stop in the middle, find their far side away. Half of the batches they settle event by event, the others as a whole. What
nobody answered they ask again, in another session, whatever happened to the server since."""
import json
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
        self.unanswered = None  # how to settle, once more, a batch that may or may not be settled
        self.lease, self.durably = LEASES[number % 2], DURABLY[number % 2]

    def play(self):
        while not self.stop.is_set():
            connection = None
            try:
                connection = self.db.server.connect(self.db.name)
                run(connection, f"SET synchronous_commit = {self.durably}")
                if self.unanswered:
                    settle_again, *batch = self.unanswered
                    settle_again(connection, *batch)
                    self.counts["settled again"] += 1
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

    def batch(self, connection):
        rows = run(connection, """SELECT batch, id, event_id::text, event_key, event_type, ordering_key, payload
                                    FROM retrysafe.outbox_fetch(%s, %s, lease => %s)""",
                   self.destination, self.r.choice((1, 10, 100, 500)), self.lease)
        if not rows:
            return False
        batch, events = rows[0][0], [row[1:] for row in rows]
        self.takes_its_time()
        self.r.choice((self.event_by_event, self.as_a_whole))(connection, batch, events)
        return True

    def takes_its_time(self):
        """As far sides do, now and then, so that the server can die meanwhile."""
        if self.mischief and self.r.random() < 0.1:
            self.stop.wait(self.r.random() * 0.5)

    def luck(self):
        return self.r.random() / self.mischief if self.mischief else 1

    def deliver(self, event_id, key, event_type, ordering_key, payload):
        self.record.write(Arrival(event_id, key, event_type, ordering_key, payload.get("n"), digest(payload)))

    # Event by event: outbox_nack and outbox_ack

    def event_by_event(self, connection, batch, events):
        given_back, keys_given_back = [], set()
        for position, *event in events:
            event_id, ordering_key = event[0], event[3]
            luck = self.luck()
            if ordering_key in keys_given_back:
                continue
            if luck < 0.2:
                self.counts["given back"] += 1
                self.give_back(connection, batch, event_id)
                given_back.append(event_id)
                if ordering_key is not None:
                    keys_given_back.add(ordering_key)
                continue
            self.deliver(*event)
            if luck < 0.21:
                self.counts["stopped in the middle"] += 1
                run(connection, "SELECT retrysafe.outbox_ack(%s, %s)", batch, position)
                run(connection, "SELECT retrysafe.outbox_release(%s)", batch)
                return
            if luck < 0.22:
                self.forget()
                return
        self.acknowledge(connection, batch, given_back)
        self.counts["batches"] += 1

    def forget(self):
        self.counts["forgotten"] += 1
        self.stop.wait(self.r.random() * 3)

    @staticmethod
    def give_back(connection, batch, event_id):
        run(connection, "SELECT retrysafe.outbox_nack(%s, %s, 'no', '100 ms')", batch, event_id)

    def acknowledge(self, connection, batch, given_back):
        self.unanswered = self.acknowledge_again, batch, given_back
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

    # As a whole: outbox_record

    def as_a_whole(self, connection, batch, events):
        outcomes, held_keys, unreachable = {}, set(), None
        for _, *event in events:
            event_id, ordering_key = event[0], event[3]
            luck = self.luck()
            if luck < 0.005:
                unreachable = "away"
            if unreachable or ordering_key in held_keys:
                outcomes.setdefault(event_id, {"status": "not tried"})
            elif luck < 0.2:
                self.counts["refused"] += 1
                outcomes[event_id] = {"status": "retry", "reason": "no", "retry_after_ms": 100}
            elif event_id not in outcomes:  # an outcome is that of all events with its id
                self.deliver(*event)
                if luck < 0.21:
                    self.forget()
                    return
            if event_id in outcomes and ordering_key is not None:
                held_keys.add(ordering_key)
        self.record_batch(connection, batch, outcomes, unreachable)
        self.counts["recorded"] += 1
        self.counts["found it away"] += unreachable is not None

    def record_batch(self, connection, batch, outcomes, unreachable):
        self.unanswered = self.record_batch, batch, outcomes, unreachable
        run(connection, "SELECT retrysafe.outbox_record(%s, %s, %s, '100 ms')", batch, json.dumps(outcomes), unreachable)
        self.unanswered = None
