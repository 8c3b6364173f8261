"""Where the instructions of a new request go: valgrind's callgrind, on a server of one process."""
import os
import re
import subprocess
import tempfile

from driver import subjects
from driver.cluster import Cluster
from driver.results import Table

TITLE = "Instructions of a new request"
ALL = "all"
FEW, MANY = 200, 1_200      # requests: what the second run takes more is theirs, and not that of starting

# By functions of the server, with all that they call; each column is apart from the others.
STEPS = {
    "index entries": ("btinsert",),
    "rows": ("heap_insert", "heap_update"),
    "look-ups": ("btgettuple",),
    "commit": ("CommitTransactionCommand",),
}
_SUBJECTS = (subjects.NUMBERED, subjects.CALLS, subjects.HANDWRITTEN, subjects.HANDWRITTEN_PLUS, subjects.BARE)


def measure(run):
    run.say("profile")
    rows = []
    with Cluster(synchronous_commit="off") as cluster:
        present, _ = subjects.create_all(cluster, _SUBJECTS)
        cluster.restart(while_down=lambda: rows.extend(_row(cluster, subject) for subject in present))
    return [Table(TITLE, ["", ALL, *STEPS, "the rest"], rows,
                  note=f"Thousands for each of {MANY - FEW:,} requests, each a transaction, in one process without a client. The rest is "
                       "PL/pgSQL, the executor, JSON, locks, and what is retrysafe's own.")]


def _row(cluster, subject):
    with tempfile.TemporaryDirectory(prefix="retrysafe-profile-", dir="/tmp") as folder:
        os.chmod(folder, 0o777)     # the server's user writes there
        few, many = (_instructions(cluster, subject, count, f"{folder}/{count}") for count in (FEW, MANY))
    each = {step: max(0, many[step] - few[step]) / (MANY - FEW) / 1000 for step in many}
    rest = 2 * each[ALL] - sum(each.values())
    return [subject.label, *(f"{value:,.1f}" for value in (*each.values(), rest))]


def _instructions(cluster, subject, count, output):
    """{step: instructions} of a run of `count` requests, all of them first."""
    as_user = ["runuser", "-u", "postgres", "--"] if os.getuid() == 0 else []
    subprocess.run([*as_user, "valgrind", "--tool=callgrind", f"--callgrind-out-file={output}", cluster.bindir() / "postgres", "--single",
                    "-D", cluster.directory / "data", subject.database],
                   input=_requests(subject, count), text=True, check=True, capture_output=True, cwd="/")
    found = subprocess.run(["callgrind_annotate", "--inclusive=yes", "--threshold=100", output],
                           check=True, capture_output=True, text=True).stdout
    total = re.search(r"^ *([\d,]+) \(100\.0%\)  PROGRAM TOTALS", found, re.M)[1]
    by_function = {}
    for number, function in re.findall(r"^ *([\d,]+) \([^)]*\)  [^:\n]*:([\w.]+)", found, re.M):
        by_function.setdefault(function, int(number.replace(",", "")))
    return {ALL: int(total.replace(",", "")),
            **{step: sum(by_function.get(function, 0) for function in functions) for step, functions in STEPS.items()}}


def _requests(subject, count):
    """The statement of a request in a loop, on one line as such a server wants it."""
    statement = subject.request(choose_key="").partition("\n")[2].strip()
    if statement.startswith("SELECT"):
        statement = "PERFORM" + statement.removeprefix("SELECT")
    else:
        statement = statement.removesuffix(";") + " INTO ignored;"
    statement = re.sub(r":(key|customer)\b", r"\1_of_it", statement)
    return (f"DO $$ DECLARE key_of_it bigint; customer_of_it bigint; ignored bigint; BEGIN FOR i IN 1..{count} LOOP "
            f"key_of_it := {subjects.FIRST_KEY} + (random() * 8e18)::bigint; customer_of_it := 10000 + key_of_it % 90000; "
            f"{statement} COMMIT; END LOOP; END $$").replace("\n", " ") + "\n"
