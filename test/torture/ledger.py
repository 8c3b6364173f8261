"""What writers tried, and what they know of how it ended: files outside of the server.

A transaction has a line before its COMMIT is sent, with all that it did and did not take back, and another one when the
answer is there. One without a second line is unknown: at the end the table `done`, in which every transaction leaves its
name, tells. A transaction that never came to its COMMIT has a line only where it is told that it was rolled back.
"""
import hashlib
import json
import threading
import time
from dataclasses import asdict, dataclass, field

COMMITTED, ROLLED_BACK, UNKNOWN = "committed", "rolled back", "unknown"


def digest(payload):
    return hashlib.sha1(json.dumps(payload, sort_keys=True).encode()).hexdigest()[:12]


@dataclass
class Transaction:
    name: str
    begun: float                                   # time.monotonic()
    events: list = field(default_factory=list)     # [event key, type, ordering key, number, digest]
    effects: list = field(default_factory=list)    # [key, request hash, effect]: outcome `new`
    replays: list = field(default_factory=list)    # [key, request hash, effect]: what the answer said
    conflicts: list = field(default_factory=list)  # [key, request hash]
    end: str = UNKNOWN
    waits: bool = True                             # for the disk; else a crash may take back what was committed

    def mark(self):
        return [len(self.events), len(self.effects)]

    def back_to(self, mark):
        """What a savepoint takes back; answers that were seen stay seen."""
        del self.events[mark[0]:]
        del self.effects[mark[1]:]


class Ledger:
    def __init__(self, folder):
        self.folder = folder
        folder.mkdir()
        self._lock = threading.Lock()
        self._file = open(folder / "transactions.jsonl", "w", buffering=1)

    def asks(self, transaction):
        self._write(asdict(transaction))

    def told(self, transaction, end):
        self._write({"name": transaction.name, "end": end, "at": time.monotonic()})

    def _write(self, line):
        text = json.dumps(line) + "\n"
        with self._lock:
            self._file.write(text)

    def read(self):
        """All transactions, by name."""
        self._file.flush()
        transactions = {}
        with open(self.folder / "transactions.jsonl") as lines:
            for line in map(json.loads, lines):
                if "begun" in line:
                    transactions[line["name"]] = Transaction(**line)
                else:
                    transactions[line["name"]].end = line["end"]
        return transactions
