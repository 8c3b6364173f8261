"""Scripts that newcomers run: scripts/demo and scripts/measure-latency."""
import re
import subprocess

import pytest

from conftest import TOP


@pytest.mark.slow
def test_the_demo_shows_what_it_promises():
    done = subprocess.run([TOP / "scripts/demo", "--stop"], capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    for line in (r"1 × new, 19 × replay",
                 r"✓ 20 answers, all the same: \{\"order_id\": 1\}",
                 r"✓ in the database: 1 order, 1 saved answer, 1 event",
                 r"✓ conflict; still 1 order and 1 event",
                 r"✓ first new, then replay: 1 more order and 2 more events",
                 r"✓ what waited has arrived: 2 requests at the webhook, 1 row over there",
                 r"✓ 50 more orders one by one, each event once",
                 r"✓ worker \d+ got SIGKILL",
                 r"event (\S+) arrived\n *event \1 arrived again",
                 r"✓ inbox_accept said true, then false: 1 parcel",
                 r"Everything came out as promised\."):
        assert re.search(line, done.stdout), f"{line} is not in\n{done.stdout}"
    assert "✗" not in done.stdout
    assert "Stop it" not in done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("kind", [kind for kind in ("kafka", "nats", "rabbitmq", "redis")
                                  if (TOP / f"test/system/brokers/{kind}.py").exists()])
def test_the_demo_with_a_broker(kind):
    done = subprocess.run([TOP / "scripts/demo", "--with", kind, "--stop"], capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    for line in ("✓ the broker has acknowledged 20 events",
                 "✓ outbox_status: backing off, 20 events wait",
                 "✓ what waited has arrived: 40 events acknowledged",
                 r"[-0-9a-f]{36}  order-\d+ +order\.p\w+ +\{",
                 r"✓ 40 events, \d+ of them more than once, none missing",
                 r"Everything came out as promised\."):
        assert re.search(line, done.stdout), f"{line} is not in\n{done.stdout}"
    assert "✗" not in done.stdout


def test_help_of_the_demo():
    done = subprocess.run([TOP / "scripts/demo", "--help"], capture_output=True, text=True)
    assert done.returncode == 0 and "--stop" in done.stdout


@pytest.mark.slow
def test_every_measured_event_arrives():
    done = subprocess.run([TOP / "scripts/measure-latency", "--events", "200"], capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.startswith("200 events, 100/s")
    for name in ("COMMIT sent to receipt", "COMMIT answered to receipt", r"COMMIT itself \(with its fsync\)"):
        assert re.search(rf"^{name}( +-?\d+\.\d\d){{4}}$", done.stdout, re.M)
