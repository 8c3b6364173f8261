"""pgbench: one kind of statement, prepared, from several clients, a fixed number of times."""
import pathlib
import re
import subprocess
import tempfile
from dataclasses import dataclass


@dataclass
class Run:
    count: int
    seconds: float
    cpu: float          # of the server, in seconds
    wal: int            # bytes

    @property
    def rate(self):
        return self.count / self.seconds


def pgbench(cluster, database, script, *, clients, each, seed):
    """Each of `clients` runs `script` `each` times; its variable `next` is 0 at first."""
    with tempfile.TemporaryDirectory() as folder:
        file = pathlib.Path(folder) / "script.sql"
        file.write_text(script)
        cpu, wal = cluster.cpu(), cluster.wal_position()
        done = subprocess.run(
            [cluster.bindir() / "pgbench", "-n", "-M", "prepared", "-c", str(clients), "-j", "2", "-t", str(each), "-f", file,
             "-D", "next=0", f"--random-seed={seed}", cluster.dsn(database)], capture_output=True, text=True)
        cpu, wal = cluster.cpu() - cpu, cluster.wal_position() - wal
    count = clients * each
    if done.returncode or f"processed: {count}/{count}\n" not in done.stdout:
        raise RuntimeError(f"pgbench failed:\n{script}\n{done.stdout}\n{done.stderr}")
    per_second = float(re.search(r"^tps = ([\d.]+)", done.stdout, re.M)[1])
    return Run(count, count / per_second, cpu, wal)
