"""Scripts that newcomers run: scripts/demo and scripts/measure-latency."""
import contextlib
import os
import pathlib
import re
import signal
import subprocess
import time

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
                 r"What (kcat|a client in Python|pika|redis-cli) reads from the broker:",
                 r"[-0-9a-f]{36}  order-\d+ +order\.p\w+ +\{",
                 r"✓ 40 events, \d+ of them more than once, none missing",
                 r"Everything came out as promised\."):
        assert re.search(line, done.stdout), f"{line} is not in\n{done.stdout}"
    assert "✗" not in done.stdout


@pytest.mark.slow
def test_a_broker_that_does_not_start_is_told(tmp_path):
    server = tmp_path / "redis-server"
    server.write_text('#!/bin/sh\nwhile [ "$1" != --logfile ]; do shift; done\necho "no room" >"$2"\nexit 1\n')
    server.chmod(0o755)
    done = subprocess.run([TOP / "scripts/demo", "--with", "redis", "--stop"], capture_output=True, text=True, timeout=600,
                          env=os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}"})
    assert done.returncode == 1
    assert done.stderr.endswith("demo: no broker of kind redis: no room\n") and "Traceback" not in done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("command, line, seconds, times", [
    (["demo"], "^Building, and starting", 0, 1), (["demo"], "^Building, and starting", 1.5, 1), (["demo"], "^4", 0, 1),
    (["demo"], "^5", 0.3, 1), (["demo", "--with", "redis"], "Starting a broker", 0.2, 1), (["demo", "--with", "redis"], "^3", 0, 1),
    (["demo", "--with", "redis"], "^2", 0, 10), (["measure-latency"], None, 1, 1), (["measure-latency"], None, 8, 1)])
def test_control_c_ends_quietly_and_leaves_nothing(command, line, seconds, times):
    """The terminal sends the signal to the script and to all that it started. At which moment it comes is all the same, and so is
    how often it is pressed."""
    with subprocess.Popen(
            [TOP / "scripts" / command[0], *command[1:]], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            start_new_session=True, preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL)) as process:
        before = []
        try:
            while line and not (before and re.search(line, before[-1])):
                before.append(process.stdout.readline())
                assert before[-1], "".join(before)
            time.sleep(seconds)
            for _ in range(times):
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGINT)
                time.sleep(0.05 if times > 1 else 0)
            after, _ = process.communicate(timeout=60)
            assert process.returncode == 130
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
        assert not re.search("Traceback|[Ee]rror|FATAL|PANIC|initdb|make", after), after
        cluster = re.search(r"in (/\S+)", "".join(before))
        assert not cluster or not pathlib.Path(cluster[1]).exists()


@pytest.mark.parametrize("script", sorted(path.name for path in (TOP / "scripts").iterdir() if os.access(path, os.X_OK)
                                          and path.is_file()))
def test_every_script_tells_how_it_is_called(script):
    done = subprocess.run([TOP / "scripts" / script, "--help"], capture_output=True, text=True, timeout=20)
    assert done.returncode in (0, 2)
    assert re.search(rf"(scripts/|usage: ){script}\b", done.stdout)


def test_help_of_the_demo():
    done = subprocess.run([TOP / "scripts/demo", "--help"], capture_output=True, text=True)
    assert done.returncode == 0 and "--stop" in done.stdout


@pytest.mark.parametrize("script", ["demo", "setup"])
@pytest.mark.parametrize("kind", [[], ["carrier-pigeon"]])
def test_a_broker_that_is_not_there_is_refused(script, kind):
    done = subprocess.run([TOP / "scripts" / script, "--with", *kind], capture_output=True, text=True)
    assert done.returncode == 2
    assert re.fullmatch(r"\w+: --with takes one of:(,? (kafka|nats|rabbitmq|redis)){4}\n", done.stderr)


@pytest.mark.parametrize("named", ["", "/opt/postgresql/bin/pg_config"])
def test_setup_installs_a_server_unless_another_one_is_named(tmp_path, named):
    for program, text in {"dpkg-query": "exit 1", "apt-get": "true", "sudo": 'exec "$@"', "tee": "cat >/dev/null", "mkdir": "true"}.items():
        (tmp_path / program).write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / program).chmod(0o755)
    done = subprocess.run([TOP / "scripts/setup", "--build"], capture_output=True, text=True, check=True,
                          env={**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", "PG_CONFIG": named})
    assert "libcurl4-openssl-dev" in done.stderr and ("postgresql-server-dev-15" in done.stderr) == (not named)


@pytest.mark.slow
def test_every_measured_event_arrives():
    done = subprocess.run([TOP / "scripts/measure-latency", "--events", "200"], capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.startswith("200 events, 100/s")
    for name in ("COMMIT sent to receipt", "COMMIT answered to receipt", r"COMMIT itself \(with its fsync\)"):
        assert re.search(rf"^{name}( +-?\d+\.\d\d){{4}}$", done.stdout, re.M)
