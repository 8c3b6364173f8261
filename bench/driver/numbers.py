"""Medians, ratios with their spread, and how numbers are written."""
import math
import statistics


def median(values):
    return statistics.median(values)


def percentile(values, percent):
    """Nearest rank."""
    return sorted(values)[max(0, math.ceil(len(values) * percent / 100) - 1)]


class Ratio:
    """Of two things that were measured in the same rounds: the median of the rounds' ratios, and their range."""

    def __init__(self, ours, theirs):
        ratios = [a / b for a, b in zip(ours, theirs, strict=True)]
        self.value, self.low, self.high = median(ratios), min(ratios), max(ratios)

    def __str__(self):
        return f"{self.value:.2f} ({self.low:.2f}–{self.high:.2f})"


def rate(per_second):
    return f"{per_second / 1000:.1f} k/s" if per_second >= 10_000 else f"{per_second:,.0f}/s"


def rates(per_second):
    """Of rounds: the median, and the range."""
    return f"{rate(median(per_second))} ({rate(min(per_second))}–{rate(max(per_second))})"


def size(count):
    for unit, factor in (("GB", 1 << 30), ("MB", 1 << 20), ("kB", 1 << 10)):
        if abs(count) >= factor:
            return f"{count / factor:.1f} {unit}"
    return f"{count:.0f} B"


def duration(seconds):
    return f"{seconds:.2f} s" if seconds >= 1 else f"{seconds * 1000:.2f} ms"
