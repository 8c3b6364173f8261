"""Libraries that are preloaded into processes under test, one C file each."""
import os
import pathlib
import subprocess

import pytest

SANITIZER = os.environ.get("RETRYSAFE_PRELOAD", "")  # what libraries and programs under test are built for, if they are


@pytest.fixture(scope="session", autouse=True)
def sanitizer_stays_here():
    """It is in this process by now, and not to be in brokers and compilers that this one starts. Not sooner: pytest's own
    processes that tests run in need it as well."""
    if SANITIZER:
        os.environ.pop("LD_PRELOAD", None)


def behind_sanitizer(environment):
    """Of a process of ours, which a sanitizer has to be in before anything else is. Servers see to it themselves."""
    return {**environment, "LD_PRELOAD": ":".join(filter(None, [SANITIZER, environment.get("LD_PRELOAD")]))}


def build(name, folder):
    """The library of that name, compiled into the folder."""
    library = pathlib.Path(folder) / f"{name}.so"
    source = pathlib.Path(__file__).with_name(f"{name}.c")
    subprocess.run([os.environ.get("CC", "cc"), "-shared", "-fPIC", "-o", library, source, "-ldl"], check=True)
    return library
