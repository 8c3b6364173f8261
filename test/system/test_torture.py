"""The schedule of the torture: one seed is one schedule, and everything that can happen comes within ten minutes."""
import subprocess

import pytest

from conftest import TOP

ACTIONS = {
    "terminate worker", "kill worker", "terminate backend", "kill backend", "kill relay", "stop relay", "kill postmaster", "lose power",
    "stop immediately", "restart", "promote", "crash standby", "hold snapshot", "dump", "recreate destination", "fill disk",
    "set clock", "outage", "bad answers"}


def listed(seed):
    return subprocess.run([TOP / "scripts/torture", "--list", "--minutes", "10", "--seed", str(seed)], check=True, capture_output=True,
                          text=True).stdout.splitlines()


@pytest.mark.parametrize("seed", [1, 2])
def test_a_schedule_is_made_from_its_seed(seed):
    schedule = listed(seed)
    assert schedule == listed(seed) != listed(seed + 1)
    assert {line[10:].split("  ")[0] for line in schedule} >= ACTIONS
