"""What the log of a server may have in a run like this: errors that clients and workers are told to expect. Anything else
is a fault, and so is the death of a process that nobody killed."""
import collections
import re

import closing
from conftest import killed

PREFIX = "log_line_prefix = '%m [%p] %e %b %q%u@%d '"  # with the SQLSTATE
LINE = re.compile(r"\[(\d+)\] (?P<code>[0-9A-Z]{5}) (?P<rest>.*?(?P<level>ERROR|FATAL|PANIC|WARNING):  .*)")

# A code, and a part of the line where the code alone would allow too much.
EXPECTED = [
    ("40001", ""), ("40P01", ""),                  # serialisation failures and deadlocks of the writers
    ("55P03", ""),                                 # their lock_timeout
    ("57014", ""),                                 # cancelled
    ("57P01", ""), ("57P02", ""), ("57P03", ""),   # terminated, crashed, starting up
    ("53100", ""), ("XX000", "could not write init file"),  # the disk is full
    ("42704", "prepared transaction"), ("55000", "is busy"),  # the writer comes too late, the resolver has it
    ("RS210", ""), ("RS211", ""),                  # a puller that forgot a batch, or stood still, beyond its lease
    ("08006", ""), ("08P01", "unexpected EOF"),
]


def expected(line):
    return any(line["code"] == code and part in line["rest"] for code, part in EXPECTED)


def look(logs):
    """How often each level and code came, the lines that nobody expects, and crashes."""
    counts, unexpected, crashes = collections.Counter(), [], []
    for text in logs:
        for match in LINE.finditer(text):
            counts[f"{match['level']} {match['code']}"] += 1
            if match["level"] != "WARNING" and not expected(match):
                unexpected.append(match[0])
        crashes += closing.crashes(text, killed)
    return counts, unexpected, crashes
