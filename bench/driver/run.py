"""What the command line asked for, as the benchmarks see it."""
import random
import sys
import time


class Run:
    def __init__(self, quick, goals, rounds, seed):
        self.quick, self.goals, self.round_count = quick, goals, rounds
        self._random = random.Random(seed)
        self._start = time.monotonic()

    def wants(self, *names):
        return any(name in self.goals for name in names)

    def size(self, *, full, quick):
        return quick if self.quick else full

    def seed(self):
        """A new one each time: the same keys again would be replays."""
        return self._random.randrange(2 ** 31)

    def rounds(self, what):
        for number in range(self.round_count):
            self.say(f"{what}: round {number + 1} of {self.round_count}")
            yield number

    @staticmethod
    def turn(subjects, round_number):
        """Another one begins in each round."""
        first = round_number % len(subjects)
        return [*subjects[first:], *subjects[:first]]

    def elapsed(self):
        return time.monotonic() - self._start

    def say(self, text):
        print(f"[{self.elapsed():5.0f} s] {text}", file=sys.stderr, flush=True)
