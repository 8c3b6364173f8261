"""Destinations of kind nats: a real server with JetStream, read back over its text protocol."""
import pytest

from brokers.contract import Contract
from brokers.nats import Nats

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def broker():
    with Nats() as one:
        yield one


class TestNats(Contract):
    pass
