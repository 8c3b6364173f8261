"""Kind kafka end to end: a real worker, a real broker."""
import pytest

from brokers.contract import Contract
from brokers.kafka import Kafka


@pytest.fixture(scope="module")
def broker():
    with Kafka() as one:
        yield one


class TestKafka(Contract):
    pass
