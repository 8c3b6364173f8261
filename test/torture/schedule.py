"""What happens when: made from the seed alone, so that the same seed is the same schedule."""
import random
from dataclasses import dataclass

# How often each action is in the deck, which is shuffled again each time that it is used up: so each of them comes.
DECK = {
    "terminate worker": 3, "kill worker": 2, "cancel worker": 1, "pause worker": 1,
    "terminate backend": 3, "kill backend": 2, "cancel backend": 2,
    "kill server process": 1, "kill postmaster": 2, "lose power": 4, "stop immediately": 2, "restart": 2,
    "outage": 4, "bad answers": 4,
    "kill relay": 2, "stop relay": 1, "pause relay": 1,
    "kill redis": 1, "crash far server": 1,
    "recreate destination": 2, "pause destination": 1, "change destination": 1, "retry dead letters": 1,
    "promote": 2, "crash standby": 1, "fill disk": 2, "set clock": 2,
    "change settings": 2, "hold snapshot": 2, "dump": 1,
}
PAUSE = 4.0  # seconds between two actions, on average
CALM = 5.0   # so long nothing happens in the beginning


@dataclass(frozen=True)
class Action:
    at: float        # seconds after the writers began
    name: str
    pick: float      # 0 to 1: which one of those that are there
    duration: float  # of what lasts

    def __str__(self):
        return f"{self.at:8.1f}  {self.name:<22} pick {self.pick:.3f}  {self.duration:.1f} s"


def schedule(seed, minutes, only=None, without=()):
    """What is left out leaves the times of the others as they are."""
    r = random.Random(f"{seed}/schedule")
    actions, at, deck = [], CALM, []
    while True:
        at += r.expovariate(1 / PAUSE)
        if at > minutes * 60:
            return [a for a in actions if (only is None or a.name in only) and a.name not in without]
        if not deck:
            deck = [name for name, count in DECK.items() for _ in range(count)]
            r.shuffle(deck)
        actions.append(Action(at, deck.pop(), r.random(), r.uniform(1, 6)))
