"""A client library that looks at its sockets with select() writes past its memory when a descriptor is above 1023."""
import pathlib
import subprocess
import sys

import pytest

from sink import interpreter

SINKS = pathlib.Path(__file__).resolve().parent
TESTS = {"http": "test_http_sink.py::test_binary_mode", "kafka": "test_kafka_sink.py::test_binary_mode",
         "nats": "test_nats_sink.py::test_binary_mode", "rabbitmq": "test_rabbitmq_sink.py::test_binary_mode",
         "redis": "test_redis_sink.py::test_fields",
         "postgres": "../system/test_postgres_sink.py::test_fills_the_inbox"}


@pytest.mark.slow
@pytest.mark.parametrize("kind", TESTS)
def test_descriptors_above_1023(kind):
    """A test of the sink, in a process that has so many already."""
    run = subprocess.run([sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-c", SINKS.parent / "pytest.ini",
                          SINKS / TESTS[kind]], env=interpreter(RETRYSAFE_DESCRIPTORS="1100"), capture_output=True, text=True)
    if "skipped" in run.stdout:
        pytest.skip(run.stdout.splitlines()[-1])
    assert run.returncode == 0, run.stdout
