"""Destinations of kind `redis`: the real server, a real worker."""
import pytest

from brokers.contract import Contract
from brokers.redis import Redis


@pytest.fixture(scope="module")
def broker():
    with Redis() as one:
        yield one


class TestRedis(Contract):
    pass
