"""Libraries that are preloaded into processes under test, one C file each."""
import os
import pathlib
import subprocess


def build(name, folder):
    """The library of that name, compiled into the folder."""
    library = pathlib.Path(folder) / f"{name}.so"
    source = pathlib.Path(__file__).with_name(f"{name}.c")
    subprocess.run([os.environ.get("CC", "cc"), "-shared", "-fPIC", "-o", library, source, "-ldl"], check=True)
    return library
