"""What a benchmark hands over to the report."""
from dataclasses import dataclass, field


def one_line(error):
    """What a table says of an exception."""
    line = (str(error) or type(error).__name__).partition("\n")[0]
    return line.replace("|", "\\|")


@dataclass
class Check:
    """One condition of a goal: what was measured, and whether it is enough; None: it could not be measured."""
    text: str
    met: bool | None


@dataclass
class Bars:
    """A chart: one bar for each label, from the lowest to the highest round, at the median."""
    title: str
    unit: str
    series: dict                                    # label: values of the rounds


@dataclass
class Lines:
    """A chart of something that goes on over rounds."""
    title: str
    x: str
    y: str
    series: dict                                    # label: [(x, y)]


@dataclass
class Table:
    title: str
    header: list
    rows: list
    note: str = ""


@dataclass
class Result:
    measured: list = field(default_factory=list)    # lines of text
    checks: list = field(default_factory=list)      # none where there is no goal
    missing: list = field(default_factory=list)     # references that could not be measured, and why
    failure: str = ""                               # why there is nothing else here
    settings: str = ""                              # of the server, beside those of every cluster
    charts: list = field(default_factory=list)
    footprint: Table | None = None                  # what the benchmark leaves behind

    @property
    def mark(self):
        if self.failure:
            return "failed"
        if not self.checks:
            return "measured" if self.measured else "not measured"
        if any(check.met is False for check in self.checks):
            return "short"
        return "pass" if all(check.met for check in self.checks) else "incomplete"
