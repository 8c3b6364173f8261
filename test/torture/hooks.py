"""Web receivers that misbehave. They take an event, or refuse it; and whichever they do, the answer may get lost."""
import collections
import random
import threading
from urllib.parse import unquote

from ledger import digest
from receiver import Answer, Close, Raw, Receiver, Reset
from records import Arrival

TIMEOUT = 1.0  # of the destinations
SOURCE = "retrysafe/torture"  # not a copy of the database

# What becomes of a request: whether it is taken, and the answer.
MISCHIEF = {
    "slow": (True, Answer(204, delay=0.3)),
    "late": (True, Answer(204, delay=TIMEOUT * 1.5)),
    "reset afterwards": (True, Reset),
    "rubbish afterwards": (True, Raw(b"SSH-2.0-nobody\r\n")),
    "failed": (False, Answer(500, body=b"no")),
    "overloaded": (False, Answer(503)),
    "reset": (False, Reset),
    "closed": (False, Close),
}


def arrival_of(request):
    def attribute(name):
        value = request.header(name)
        return unquote(value) if value is not None else None
    payload = request.json()
    return Arrival(request.id, attribute("ce-eventkey"), attribute("ce-type"), attribute("ce-partitionkey"),
                   payload.get("n"), digest(payload))


class Hook:
    """`usual`: the part of requests that something happens to at any time."""

    def __init__(self, name, record, seed, usual=0.01, kinds=tuple(MISCHIEF)):
        self.name, self.record, self.usual, self.kinds = name, record, usual, kinds
        self.mischief = usual
        self.counts = collections.Counter()
        self._r = random.Random(f"{seed}/hook/{name}")
        self.lock = threading.Lock()
        self.away, self.from_others = False, []
        self.receiver = Receiver()
        self.receiver.behave(self.answer)

    @property
    def url(self):
        return self.receiver.url

    def answer(self, request):
        self.receiver.clear()  # they are in the record
        with self.lock:
            kind = self._r.choice(self.kinds) if self._r.random() < self.mischief else None
            self.counts[kind or "as usual"] += 1
        taken, answer = MISCHIEF[kind] if kind else (True, 204)
        if request.header("ce-source") != SOURCE:
            self.from_others.append(f"{self.name}: from {request.header('ce-source')}")
        if taken:
            self.record.write(arrival_of(request))
        return answer

    # --- what the killer does ---

    def misbehave(self, share):
        self.mischief = share

    def behave(self):
        self.mischief = self.usual

    def refuse(self):
        self.receiver.stop()

    def come_back(self):
        self.receiver.start()
