"""What holds for all tests in Python."""
import os

import pytest


@pytest.fixture(scope="session", autouse=True)
def sanitizer_stays_here():
    """It is in this process by now, and not to be in brokers and compilers that this one starts. Not sooner: pytest's own
    processes that tests run in need it as well."""
    if os.environ.get("RETRYSAFE_PRELOAD"):
        os.environ.pop("LD_PRELOAD", None)
