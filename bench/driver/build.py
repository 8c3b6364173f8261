"""The extension as users build it, with the test sink `null` beside it: in a copy of the project, since the project's
own folder holds builds for tests."""
import contextlib
import os
import pathlib
import signal
import subprocess

TOP = pathlib.Path(__file__).resolve().parents[2]
COPY = TOP / "build/bench/source"


def build():
    """Only what has changed since the last time."""
    _bash(TOP, f". scripts/lib.sh; copy_project '{COPY}'")
    _bash(COPY, ". scripts/lib.sh; build FAULT_POINTS= NULL_SINK=1")


def program(source):
    """A helper of the benchmarks, one file of C++; returns its path."""
    file = TOP / "bench" / source
    executable = COPY.parent / file.stem
    if not executable.exists() or executable.stat().st_mtime < file.stat().st_mtime:
        executable.parent.mkdir(parents=True, exist_ok=True)
        subprocess.run(["g++", "-std=c++20", "-O2", "-Wall", "-Wextra", "-o", executable, file], check=True)
    return executable


def node_driver():
    """Where Node.js finds its driver for PostgreSQL, or None."""
    with contextlib.suppress(subprocess.CalledProcessError):
        _bash(TOP, ". scripts/lib.sh; node_driver")
        return TOP / "build/node/node_modules"


def _bash(folder, script):
    environment = {name: value for name, value in os.environ.items() if name != "RETRYSAFE_BUILT"}  # that is the other build
    command = ["bash", "-euo", "pipefail", "-c", script]
    # A session of its own, so that all that it has started can be ended with it.
    with subprocess.Popen(command, cwd=folder, env=environment, start_new_session=True) as process:
        try:
            if process.wait():
                raise subprocess.CalledProcessError(process.returncode, command)
        except BaseException:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGTERM)
            raise
