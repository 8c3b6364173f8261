"""Libraries that are preloaded into processes under test, one C file each."""
import os
import pathlib
import subprocess

SANITIZER = os.environ.get("RETRYSAFE_PRELOAD", "")  # what libraries and programs under test are built for, if they are


def behind_sanitizer(environment):
    """Of a process of ours, which a sanitizer has to be in before anything else is. Servers see to it themselves."""
    return {**environment, "LD_PRELOAD": ":".join(filter(None, [SANITIZER, environment.get("LD_PRELOAD")]))}


def build(name, folder):
    """The library of that name, compiled into the folder."""
    library = pathlib.Path(folder) / f"{name}.so"
    source = pathlib.Path(__file__).with_name(f"{name}.c")
    subprocess.run([os.environ.get("CC", "cc"), "-shared", "-fPIC", "-o", library, source, "-ldl"], check=True)
    return library
