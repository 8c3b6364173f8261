"""The hand-written relay of (b): LISTEN, claim, post, mark, in Node.js."""
import contextlib
import os
import shutil
import subprocess

from driver import build
from driver.subjects import SQL

MISSING = "(b) with NOTIFY and a relay in Node.js: node, or its module pg, is not installed"


def available():
    return bool(shutil.which("node") and build.node_driver())


def install(cluster, database):
    cluster.sql((SQL / "handwritten/notify.sql").read_text(), database=database)


@contextlib.contextmanager
def running(cluster, database, url, *, batch, in_flight):
    """Until the block ends."""
    process = subprocess.Popen(
        ["node", build.TOP / "bench/relay/relay.js", url, str(batch), str(in_flight)],
        env={**os.environ, "NODE_PATH": str(build.node_driver()), "PGHOST": str(cluster.directory),
             "PGPORT": str(cluster.port), "PGUSER": "postgres", "PGDATABASE": database, "PGAPPNAME": "relay"})
    try:
        yield
        if process.poll() is not None:
            raise RuntimeError(f"the relay ended with {process.returncode}")
    finally:
        process.terminate()
        process.wait()
