"""The micro-benchmarks of the core: bench/micro, with Google Benchmark."""
import json
import subprocess

from driver.build import TOP
from driver.results import Table

TITLE = "Micro-benchmarks of the core"


def measure(run):
    """A table, or none where Google Benchmark is not installed."""
    run.say("micro-benchmarks")
    subprocess.run(["cmake", "--preset", "bench"], cwd=TOP, check=True, stdout=subprocess.DEVNULL)
    if subprocess.run(["cmake", "--build", "--preset", "bench"], cwd=TOP, stdout=subprocess.DEVNULL).returncode:
        run.say("no micro-benchmarks: Google Benchmark is not installed")
        return []
    done = subprocess.run([TOP / "build/cmake-bench/micro", "--benchmark_format=json", f"--benchmark_repetitions={max(2, run.round_count)}",
                           "--benchmark_min_time=0.1",
                           "--benchmark_report_aggregates_only=true"], check=True, capture_output=True, text=True)
    rows = [[f"`{one['run_name']}`", f"{one['cpu_time']:,.1f} {one['time_unit']}",
             f"{one['items_per_second'] / 1e6:,.1f} million"]
            for one in json.loads(done.stdout)["benchmarks"] if one["aggregate_name"] == "median"]
    return [Table(TITLE, ["", "CPU", "items per second"], rows,
                 note="Medians. Sources: bench/micro. What is an item: an event, or one question.")]
