"""pgbench: one kind of statement, prepared, from several clients, a fixed number of times or at a steady rate."""
import contextlib
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
    with _command(cluster, database, script, clients, seed) as command:
        cpu, wal = cluster.cpu(), cluster.wal_position()
        done = subprocess.run([*command, "-t", str(each)], capture_output=True, text=True)
        cpu, wal = cluster.cpu() - cpu, cluster.wal_position() - wal
    count = clients * each
    if done.returncode or f"processed: {count}/{count}\n" not in done.stdout:
        raise RuntimeError(f"pgbench failed:\n{script}\n{done.stdout}\n{done.stderr}")
    per_second = float(re.search(r"^tps = ([\d.]+)", done.stdout, re.M)[1])
    return Run(count, count / per_second, cpu, wal)


@contextlib.contextmanager
def steady(cluster, database, script, *, clients, rate, seed):
    """`rate` times a second, until the block ends. Yields a function that ends it:
    [(time of day at its end, seconds it took)]."""
    with _command(cluster, database, script, clients, seed) as command, tempfile.TemporaryDirectory() as logs:
        process = subprocess.Popen([*command, "-T", "86400", "-R", str(rate), "-l", f"--log-prefix={logs}/log"],
                                   stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)

        def latencies():
            process.terminate()
            process.wait()
            lines = (line.split() for file in pathlib.Path(logs).iterdir() for line in file.read_text().splitlines())
            return [(int(fields[4]) + int(fields[5]) / 1e6, int(fields[2]) / 1e6) for fields in lines if len(fields) >= 6]

        try:
            yield latencies
            if process.poll() not in (None, -15):
                raise RuntimeError(f"pgbench failed:\n{script}\n{process.stderr.read()}")
        finally:
            process.terminate()
            process.wait()
            process.stderr.close()


@contextlib.contextmanager
def _command(cluster, database, script, clients, seed):
    with tempfile.TemporaryDirectory() as folder:
        file = pathlib.Path(folder) / "script.sql"
        file.write_text(script)
        yield [cluster.bindir() / "pgbench", "-n", "-M", "prepared", "-c", str(clients), "-j", "2", "-f", file,
               "-D", "next=0", f"--random-seed={seed}", cluster.dsn(database)]
