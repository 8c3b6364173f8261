"""Programs that post events to a URL: the hand-written relay of (b), in Node.js, and a consumer of PgQ."""
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


def running(cluster, database, url, *, batch, in_flight):
    """The relay in Node.js, until the block ends."""
    return _process(cluster, database, ["node", build.TOP / "bench/relay/relay.js", url, str(batch), str(in_flight)])


def pgq_running(cluster, database, url):
    return _process(cluster, database, [build.TOP / "bench/relay/pgq.py", url, "orders", "relay"])


@contextlib.contextmanager
def _process(cluster, database, command):
    process = subprocess.Popen(
        command, env={**os.environ, "NODE_PATH": str(build.node_driver()), "PGHOST": str(cluster.directory),
                      "PGPORT": str(cluster.port), "PGUSER": "postgres", "PGDATABASE": database, "PGAPPNAME": "relay"})
    try:
        yield
        if process.poll() is not None:
            raise RuntimeError(f"the relay ended with {process.returncode}")
    finally:
        process.terminate()
        process.wait()
