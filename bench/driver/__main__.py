"""Builds, measures what was asked for, and writes the report."""
import argparse
import pathlib
import random
import subprocess
import sys

from driver import build, cluster, drains, http, latency, memory, report, retention, start, wakeup, writes
from driver.goals import GOALS
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


def main():
    parser = argparse.ArgumentParser(prog="scripts/bench", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="small numbers, under 5 minutes")
    parser.add_argument("--only", metavar="GOALS", help="these goals, separated by commas: " + ", ".join(GOALS))
    parser.add_argument("--rounds", type=int, help="default: 5, with --quick 2")
    parser.add_argument("--seed", type=int, default=random.randrange(2 ** 31), help="of the random keys; default: random")
    parser.add_argument("--output", type=pathlib.Path, metavar="DIR",
                        help="default: docs/benchmarks, or build/bench with --quick or --only")
    arguments = parser.parse_args()
    goals = arguments.only.upper().split(",") if arguments.only else list(GOALS)
    unknown = [name for name in goals if name not in GOALS]
    if unknown:
        parser.error(f"unknown goals: {', '.join(unknown)}")

    run = Run(arguments.quick, goals, arguments.rounds, arguments.seed)
    run.say("building as users do")
    build.build()
    measured = {}
    for module, names in MODULES.items():
        if run.wants(*names):
            run.say(", ".join(name for name in names if run.wants(name)))
            measured.update(module.measure(run))
    results = {name: measured[name] for name in GOALS if run.wants(name)}

    partial = arguments.quick or arguments.only
    folder = arguments.output or build.TOP / ("build/bench" if partial else "docs/benchmarks")
    commit = subprocess.run(["git", "-C", build.TOP, "describe", "--always", "--dirty"], capture_output=True, text=True).stdout
    report.write(folder, results, report.machine(cluster.SETTINGS, f"{run.round_count} rounds", arguments.seed,
                                                 f"commit {commit.strip()}"), with_charts=not arguments.quick)
    report.print_table(results)
    print(f"\n{sum(r.mark == 'pass' for r in results.values())} of {len(results)} goals reached; {folder}/README.md")
    return 1 if any(result.mark == "not measured" for result in results.values()) else 0


sys.exit(main())
