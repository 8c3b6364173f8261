"""What holds after every case, whatever the case was about:

* committed events = delivered at least once + pending + dead-lettered;
* nothing that was rolled back was delivered;
* the log of the server shows no crash.

The last one needs no call: every `Server` is looked at after each test (fixture `no_crash` of conftest.py) and when it
stops, also one that a test starts for itself. Kill with `conftest.kill` or by a fault point: any other death by a signal
is a crash.

For the first two a case says at its end what arrived at the far side of each destination, copies included:

    closing.balance(db, "hook", receiver.ids)
    closing.balance(db, "d", null_destination.ids())
    closing.balance(db, "p", closing.drain(db, "p"))     # kind pull
    closing.balance(db, "all", closing.drain(db))        # where a case has no destination of its own

and, as far as it knows, which event keys it committed, which were rolled back, and which still wait. Without that the log
says what was committed, and nothing waits:

    closing.balance(db, "d", d.ids(), committed=emitter.committed, rolled_back=["lost"], pending=["held up"])
"""
import re

CRASH = re.compile(r"\(PID (?P<pid>\d+)\) was terminated by signal|PANIC:|TRAP:|terminate called")
FAULT_POINT = re.compile(r"\[(\d+)\] .*killed at fault point")


def crashes(log, killed=(), since=0):
    """The lines of a server log that tell of a crash; not of processes that a test or a fault point killed."""
    killed = {str(pid) for pid in killed} | set(FAULT_POINT.findall(log))
    return [line for line in log[since:].splitlines() if (crash := CRASH.search(line)) and crash["pid"] not in killed]


def balance(db, destination, delivered, committed=None, rolled_back=(), pending=()):
    """`delivered` are event ids, the others event keys, each used once in this database."""
    # What the destination has recorded as delivered, and what it has not; what it does not want is neither.
    key_of, recorded, open_ = {}, set(), set()
    for event_id, key, fate in db.sql("""
            SELECT e.event_id::text, coalesce(e.event_key, e.idempotency_key || '~' || e.event_number),
                   CASE WHEN isfinite(r.at) THEN 'recorded' WHEN r.at IS NOT NULL THEN 'open' END
              FROM retrysafe.outbox_destinations d
             CROSS JOIN retrysafe.outbox_events e
             CROSS JOIN LATERAL retrysafe.outbox_recorded_at(d.destination, d.shards, d.event_types, e.id, e.txid,
                                                             e.event_type, e.ordering_key) AS r (at)
             WHERE d.name = %s
             UNION ALL
            SELECT event_id::text, event_key, 'open' FROM retrysafe.outbox_scheduled_events""", destination):
        key_of[event_id] = key
        if fate:
            (recorded if fate == "recorded" else open_).add(event_id)
    dead = {i for (i,) in db.sql("SELECT event_id::text FROM retrysafe.outbox_dead_letters WHERE destination = %s", destination)}
    arrived = set(delivered)

    def keys(ids):
        return sorted(key_of[i] for i in ids)

    assert arrived <= key_of.keys(), f"delivered, but not committed: {sorted(arrived - key_of.keys())}"
    assert keys(recorded - arrived - dead) == [], "recorded as delivered, but it never arrived"
    assert keys(open_ - arrived - dead) == sorted(pending), "what waits"
    if committed is not None:
        assert set(committed) <= set(key_of.values()), "committed events are gone"
    assert set(rolled_back).isdisjoint(key_of.values()), "what was rolled back is there"


def drain(db, destination="all"):
    """Ids of all that a pull client gets; where there is no such destination it is made, and gets every event."""
    db.sql("""SELECT retrysafe.outbox_create_destination(%(name)s, 'pull', start_at => 'earliest')
               WHERE NOT EXISTS (SELECT FROM retrysafe.outbox_destinations WHERE name = %(name)s)""" % {"name": f"'{destination}'"})
    ids = []
    while rows := db.sql("SELECT batch, event_id::text FROM retrysafe.outbox_fetch(%s, 10000)", destination):
        ids += [event_id for _, event_id in rows]
        db.sql("SELECT retrysafe.outbox_ack(%s)", rows[0][0])
    return ids
