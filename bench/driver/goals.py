"""What is measured, and what it is to reach; the order of the report."""
from dataclasses import dataclass


@dataclass(frozen=True)
class Goal:
    work: str
    goal: str


GOALS = {
    "W1": Goal("idempotent request in one statement, 8 clients, prepared, `synchronous_commit = off`",
               "at least 1.5 times the requests per second of (b), at most 0.65 of its server CPU"),
    "W2": Goal("the same, WAL bytes per request", "at most 0.7 of (b)"),
    "W3": Goal("replay of a stored answer", "at least 1.5 times (b)"),
}
