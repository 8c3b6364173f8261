"""What is measured, and what it is to reach; the order of the report."""
from dataclasses import dataclass


@dataclass(frozen=True)
class Goal:
    work: str
    goal: str = ""          # none: it is measured, and nothing is judged


GOALS = {
    "W1": Goal("idempotent request in one statement, 8 clients, prepared, `synchronous_commit = off`",
               "at least 1.5 times the requests per second of (b), at most 0.65 of its server CPU"),
    "W2": Goal("the same, WAL bytes per request", "at most 0.7 of (b)"),
    "W3": Goal("replay of a stored answer", "at least 1.5 times (b)"),
    "D1": Goal("drain 500,000 pending events to a sink that only counts, one worker",
               "at least 10 times (b) and 2 times (c)"),
    "D2": Goal("emit and drain in rounds of 10,000, batch 100, while a REPEATABLE READ snapshot is held, one million events",
               "last round at least 0.95 of the first, dead rows of ours under 1,000, also through `outbox_fetch` and "
               "`outbox_ack`; at least 7 times (b)"),
    "D3": Goal("start with 5 million pending, of which 4 million not due",
               "first delivery within 2 s, memory of the worker under 64 MB above idle, `outbox_status` in under 50 ms"),
    "L1": Goal("commit to receipt over loopback HTTP, 100 events a second", "p50 below 0.5 ms, p99 below 1.5 ms"),
    "L2": Goal("the same while 2,000 requests a second are written", "p99 below 10 ms"),
    "L3": Goal("write rate with a waiting worker against no worker at all, same run", "at least 0.97"),
    "H1": Goal("HTTP deliveries a second, one worker, 64 in flight, a minimal local HTTP server, `synchronous_commit = on`",
               "at least 20,000, and 1.5 times a hand-written Node relay in the same run"),
    "R1": Goal("remove 1 million records and 1 million events by retention",
               "under 0.5 s and under 1 MB of WAL; emit p99 unchanged meanwhile, also while `pg_dump` holds its locks"),
    "M1": Goal("a session of 200,000 transactions; a transaction of 100,000 events", "no growth above 1 MB; linear time"),
    "B1": Goal("events a second that one worker delivers to each kind of destination, acknowledged, `synchronous_commit = on`"),
    "B2": Goal("one relay beside one worker: events a second, and commit to receipt at 100 events a second"),
}
