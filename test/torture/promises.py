"""Each promise, checked from what writers and receivers wrote down. A finding is a line of text; none is good."""
import collections

from conftest import run
from ledger import COMMITTED, ROLLED_BACK, UNKNOWN
from writers import LIFETIME, short_lived


class Truth:
    """What was committed. Where a writer does not know, the server's table tells."""

    def __init__(self, db, ledger):
        self.transactions = ledger.read()
        self.done = {name for (name,) in db.sql("SELECT name FROM done")}
        self.counts = collections.Counter(t.end for t in self.transactions.values())
        self.contradictions = [f"{t.name} was told {t.end} and is{'' if t.name in self.done else ' not'} there"
                               for t in self.transactions.values()
                               if t.end != UNKNOWN and (t.end == COMMITTED) != (t.name in self.done) and (t.waits or t.end == ROLLED_BACK)]
        self.taken_by_crashes = sum(t.end == COMMITTED and t.name not in self.done for t in self.transactions.values())
        self.contradictions += [f"{name} is there and nobody tried it" for name in self.done - self.transactions.keys()]
        self.committed = [self.transactions[name] for name in self.done & self.transactions.keys()]
        self.events = {}  # committed ones, by key
        for t in self.committed:
            for key, *rest in t.events:
                self.events[key] = rest
        self.taken_back = {key for t in self.transactions.values() if t.end == ROLLED_BACK for key, *_ in t.events} - self.events.keys()


def one_effect(truth, db, clock_was_set=False):
    """P1. One effect for each key, and every answer is that one. A lifetime is one of the server's clock."""
    findings, effect_of = list(truth.contradictions), {}
    wanted = {(key, request_hash, effect, t.name) for t in truth.committed for key, request_hash, effect in t.effects}
    rows = db.sql("SELECT key, hash, id, name, begun, completed FROM effects ORDER BY begun")
    there = {row[:4] for row in rows}
    findings += [f"effect {e} is gone" for e in wanted - there] + [f"effect {e} was taken back, and is there" for e in there - wanted]
    short = collections.defaultdict(list)
    for key, request_hash, effect, name, *times in rows:
        if short_lived(key):
            short[key].append((request_hash, effect, name, *times))
        elif key in effect_of:
            findings.append(f"{key} has two effects: {effect_of[key]} and {(request_hash, effect, name)}")
        else:
            effect_of[key] = (request_hash, effect, name)
    for key, effects in [] if clock_was_set else short.items():
        for one, next_one in zip(effects, effects[1:]):
            # Its completion was noted a moment after the answer was.
            if (next_one[3] - one[4]).total_seconds() < LIFETIME - 0.2:
                findings.append(f"{key} has two effects in one lifetime: {one} and {next_one}")
    answers = 0
    # Others may see the answer of a transaction that did not wait before a crash takes it back: unless they commit.
    taken_back = {tuple(e) for t in truth.transactions.values() if not t.waits and t.name not in truth.done for e in t.effects}
    for t in truth.transactions.values():
        for key, request_hash, effect in t.replays:
            answers += 1
            known = [e[:2] for e in short[key]] if short_lived(key) else [effect_of.get(key, ())[:2]]
            if (request_hash, effect) not in known and (t.name in truth.done or (key, request_hash, effect) not in taken_back):
                findings.append(f"{t.name} got the answer {effect} for {key} {request_hash}, its effect is {effect_of.get(key)}")
    saved = {key: (request_hash, effect) for key, request_hash, effect in db.sql(
        "SELECT key, convert_from(request_hash, 'UTF8'), (response_json ->> 'effect')::bigint FROM idempotency_records")
             if not short_lived(key)}
    findings += [f"{key} has the saved answer {saved.get(key)}, its effect is {effect_of.get(key)}"
                 for key in effect_of.keys() | saved.keys() if saved.get(key) != effect_of.get(key, ())[:2]]
    return findings, f"{len(effect_of)} keys and {len(short)} of short life with {sum(map(len, short.values()))} effects, {answers} answers seen, {len(saved)} saved"


def conflicts(truth, db):
    """P2. A conflict is one, and the transaction that met it wrote nothing for that request and went on."""
    findings, count, went_on = [], 0, 0
    hash_of = dict(db.sql("SELECT key, hash FROM effects WHERE completed IS NULL"))
    for t in truth.transactions.values():
        for key, request_hash in t.conflicts:
            count += 1
            went_on += t.name in truth.done
            # The owner may be this transaction, and may have been taken back since.
            if hash_of.get(key) == request_hash and t.name in truth.done and [key, request_hash] not in [e[:2] for e in t.effects]:
                findings.append(f"{t.name}: conflict for {key} {request_hash}, which is the request that has the effect")
    wrote = [t.name for t in truth.committed for c in t.conflicts if c in [e[:2] for e in t.effects]]
    return findings + [f"{name}: wrote after a conflict" for name in wrote], f"{count} conflicts, {went_on} transactions committed after one"


def delivery(truth, far):
    """P3 for one destination."""
    arrived = collections.Counter()
    findings = []
    for a in far.record.read():
        arrived[a.key] += 1
        event = truth.events.get(a.key)
        if event is None:
            findings.append(f"{a.key} was not committed, and arrived")
        elif [a.type, a.ordering_key, a.n, a.digest] != event:
            findings.append(f"{a.key} arrived as {a[2:]}, and was {event}")
    if far.once:
        # An event key that is used again after retention is a new event, with the old id.
        findings += [f"{key} had {count} effects" for key, count in arrived.items() if count > 1 and not key.startswith("again")]
    if far.until < float("inf"):
        return findings, f"{len(arrived)} arrived until it was dropped"
    expected = {key for t in truth.committed if t.begun > far.since for key, event_type, *_ in t.events
                if (event_type in far.types or not far.types)
                # One that is emitted again is an event of the time of its first emit.
                and not (far.since and event_type == "again")}
    findings += [f"{key} is lost" for key in sorted(expected - arrived.keys())]
    return findings, f"{len(expected)} events, {len(arrived)} arrived, {sum(arrived.values()) - len(arrived)} copies"


def one_id(db, far_sides):
    """P4. The id of an event key is the same in every copy at every destination, and the one that can be computed."""
    ids, findings, copies = {}, [], 0
    for far in far_sides:
        for a in far.record.read():
            copies += 1
            if ids.setdefault(a.key, a.id) != a.id:
                findings.append(f"{a.key} has the ids {ids[a.key]} and {a.id}")
    if len(set(ids.values())) != len(ids):
        findings.append("two event keys have one id")
    connection = db.server.connect(db.name)
    keys = list(ids)
    for i in range(0, len(keys), 10000):
        some = keys[i:i + 10000]
        for key, computed in run(connection, "SELECT k, retrysafe.outbox_event_id(k)::text FROM unnest(%s) k", some):
            if computed != ids[key]:
                findings.append(f"{key} arrived as {ids[key]}, its id is {computed}")
    connection.close()
    return findings, f"{len(ids)} ids in {copies} copies"


def order(far):
    """P5. First copies of an ordering key come in the order of its numbers, without a gap."""
    last, findings, seen = {}, [], set()
    for a in far.record.read():
        if a.type != "ordered" or a.key in seen:
            continue
        seen.add(a.key)
        previous = last.get(a.ordering_key, a.n - 1 if far.since else 0)
        if a.n != previous + 1:
            findings.append(f"{a.ordering_key}: {a.n} came after {previous}")
        last[a.ordering_key] = a.n
    return findings, f"{len(seen)} numbers of {len(last)} keys"
