"""Builds, measures what was asked for, and writes the report."""
import argparse
import pathlib
import random
import subprocess
import sys
import traceback

from driver import build, drains, http, latency, memory, micro, report, retention, start, wakeup, writes
from driver.goals import GOALS
from driver.results import Result
from driver.run import Run

# Which module measures which goals; goals of one module share a server and what was loaded into it.
MODULES = {
    writes: ("W1", "W2", "W3"),
    drains: ("D1", "D2"),
    start: ("D3",),
    latency: ("L1", "L2"),
    wakeup: ("L3",),
    http: ("H1",),
    retention: ("R1",),
    memory: ("M1",),
}

MICRO = "MICRO"     # no goal: the micro-benchmarks


def main():
    parser = argparse.ArgumentParser(prog="scripts/bench", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="small numbers, under 5 minutes")
    parser.add_argument("--only", metavar="GOALS", help="these goals, separated by commas: " + ", ".join([*GOALS, MICRO]))
    parser.add_argument("--rounds", type=int, help="default: 5; with --quick 1, or 2 of some goals")
    parser.add_argument("--seed", type=int, default=random.randrange(2 ** 31), help="of the random keys; default: random")
    parser.add_argument("--output", type=pathlib.Path, metavar="DIR",
                        help="default: docs/benchmarks, or build/bench with --quick or --only")
    arguments = parser.parse_args()
    goals = arguments.only.upper().split(",") if arguments.only else [*GOALS] + ([] if arguments.quick else [MICRO])
    unknown = [name for name in goals if name not in (*GOALS, MICRO)]
    if unknown:
        parser.error(f"unknown goals: {', '.join(unknown)}")

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
    for module, names in MODULES.items():
        if run.wants(*names):
            run.say(", ".join(name for name in names if run.wants(name)))
            try:
                results.update({name: result for name, result in module.measure(run).items() if run.wants(name)})
            except Exception as error:          # the others are measured all the same
                traceback.print_exc()
                for name in filter(run.wants, names):
                    results[name].missing.append(str(error).partition("\n")[0])
            report.write(folder, results, extra_tables, how)
    if run.wants(MICRO):
        extra_tables += micro.measure(run)
        report.write(folder, results, extra_tables, how)
    report.print_results(results, extra_tables)
    unmeasured = [name for name, result in results.items() if result.mark == "not measured"]
    reached = sum(result.mark == "pass" for result in results.values())
    print(f"\n{reached} of {len(results)} goals reached, {len(unmeasured)} not measured; {folder}/README.md")
    return 1 if unmeasured else 0


sys.exit(main())
