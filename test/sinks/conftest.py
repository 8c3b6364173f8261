"""Tests of the sink libraries as such, through their C interface, without a server."""
import os
import pathlib
import sys

os.environ.pop("LD_PRELOAD", None)  # a sanitizer's, for this process alone: brokers and compilers run without

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "system"))
