"""Builds retrysafe as users do, measures it beside what else is used for the same work, and writes a report."""
import argparse
import pathlib
import random
import subprocess
import sys
import traceback

import ending
from driver import (brokers, build, drains, http, latency, memory, micro, profile, publishers, report, retention, start, wakeup,
                    writes)
from driver.goals import GOALS
from driver.results import Result, Table, one_line
from driver.run import Run

# What is measured together. Each part has a server of its own, and one that fails costs the others nothing.
PARTS = (
    (("W1", "W2"), writes.new_requests),
    (("W3",), writes.replays),
    (("D1",), drains.backlog),
    (("D2",), drains.held_snapshot),
    (("D3",), start.measure),
    (("L1",), latency.idle),
    (("L2",), latency.busy),
    (("L3",), wakeup.measure),
    (("H1",), http.measure),
    (("R1",), retention.measure),
    (("M1",), memory.measure),
    (("B1",), brokers.measure),
    (("B2",), publishers.measure),
)

# What has no goal, and a table of its own.
TABLES = {
    "MICRO": (micro, "the C++ parts that know no server"),
    "PROFILE": (profile, "where the instructions of a new request go"),
}


def main():
    arguments, goals = _arguments()
    ending.by_signals()
    rounds = arguments.rounds or (5 if not arguments.quick else 2 if arguments.only else 1)
    run = Run(arguments.quick, goals, rounds, arguments.seed)
    run.say("building as users do")
    build.build()
    results = {name: Result() for name in GOALS if run.wants(name)}
    extra_tables = []
    partial = arguments.quick or arguments.only
    folder = arguments.output or build.TOP / ("build/bench" if partial else "docs/benchmarks")
    commit = subprocess.run(["git", "-C", build.TOP, "describe", "--always", "--dirty"], capture_output=True, text=True).stdout
    how = [f"commit {commit.strip()}; {rounds} rounds, seed {arguments.seed}" + (", small sizes (`--quick`)" if run.quick else "")]
    failed, exit_code = [], 0
    try:
        for names, measure in PARTS:
            if run.wants(*names):
                wanted = list(filter(run.wants, names))
                run.say(", ".join(wanted))
                try:
                    measured = measure(run)
                    results.update({name: measured[name] for name in wanted})
                except Exception as error:
                    traceback.print_exc()
                    results.update({name: Result(failure=one_line(error)) for name in wanted})
                report.write(folder, results, extra_tables, how)
        for name, (part, _) in TABLES.items():
            if run.wants(name):
                try:
                    extra_tables += part.measure(run)
                except Exception as error:
                    traceback.print_exc()
                    extra_tables.append(Table(part.TITLE, ["failed"], [[one_line(error)]]))
                    failed.append(name)
                report.write(folder, results, extra_tables, how)
    except ending.Ended as end:
        exit_code = end.exit_code
        results = {name: Result(failure=str(end)) if result.mark == "not measured" else result for name, result in results.items()}
    how.append(f"took {run.elapsed() / 60:.0f} minutes")
    report.write(folder, results, extra_tables, how)
    report.print_results(results, extra_tables)
    failed += [name for name, result in results.items() if result.mark == "failed"]
    judged = [result for name, result in results.items() if GOALS[name].goal]
    reached = sum(result.mark == "pass" for result in judged)
    print(f"\n{f'{reached} of {len(judged)} goals reached; ' if judged else ''}failed: {', '.join(failed) or 'none'}; {folder}/README.md")
    return exit_code or bool(failed)


def _arguments():
    """What the command line says, and the goals that it names."""
    parser = argparse.ArgumentParser(
        prog="scripts/bench", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, epilog="\n".join(
            ["goals:", *(f"  {name:<9}{goal.work}" for name, goal in GOALS.items()),
             *(f"  {name:<9}{what}" for name, (_, what) in TABLES.items()), "", "The exit code says whether everything ran, not how fast it was."]))
    parser.add_argument("--quick", action="store_true", help="small numbers, under 5 minutes")
    parser.add_argument("--only", metavar="GOAL", nargs="+", help="these goals and no others: --only W1 D2, or --only W1,D2")
    parser.add_argument("--rounds", type=int, help="default: 5; with --quick 1, or 2 of some goals")
    parser.add_argument("--seed", type=int, default=random.randrange(2 ** 31), help="of the random keys; default: random")
    parser.add_argument("--output", type=pathlib.Path, metavar="DIR",
                        help="default: docs/benchmarks, or build/bench with --quick or --only")
    arguments = parser.parse_args()
    if not arguments.only:
        return arguments, [*GOALS, *([] if arguments.quick else TABLES)]
    goals = [name for names in arguments.only for name in names.upper().split(",") if name]
    unknown = [name for name in goals if name not in (*GOALS, *TABLES)]
    if unknown or not goals:
        parser.error(f"unknown goals: {', '.join(unknown)}; there are {', '.join([*GOALS, *TABLES])}")
    return arguments, goals


try:
    sys.exit(main())
except ending.Ended as end:         # before there was anything to report
    sys.exit(end.exit_code)
