"""Tests of the sink libraries as such, through their C interface, without a server."""
import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "system"))

from preload import sanitizer_stays_here  # noqa: E402, F401 (a fixture)
