"""A throw-away server of the built extension, and what can be read of it from outside."""
import contextlib
import os
import pathlib
import re
import subprocess
import tempfile

import psycopg2

import ending
from driver import build

# Beside the server's defaults. No checkpoint falls into a measurement (each begins with one), and WAL is written as in
# production: fsync and full_page_writes on. Autovacuum is that of a default server.
SETTINGS = {
    "shared_buffers": "1GB",
    "max_wal_size": "40GB",
    "checkpoint_timeout": "1h",
    "fsync": "on",
}
_TICKS = os.sysconf("SC_CLK_TCK")


class Cluster:
    def __init__(self, **settings):
        self.settings = {**SETTINGS, **settings}
        self._folder = tempfile.TemporaryDirectory(prefix="retrysafe-bench-", dir="/tmp")
        os.chmod(self._folder.name, 0o755)      # the server's user must reach it
        self.directory = pathlib.Path(self._folder.name) / "cluster"

    def __enter__(self):
        try:
            self._script("start", *(f"{name} = {value}" for name, value in self.settings.items()))
            self._read_address()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_):
        with ending.deferred():
            if self.directory.exists():
                self._script("stop")
            self._folder.cleanup()

    def _script(self, command, *arguments):
        # A session of its own: Ctrl-C in the terminal is for this program, which stops the server itself.
        with ending.deferred():
            subprocess.run([build.COPY / "scripts/cluster", command, self.directory, *arguments], check=True, cwd="/",
                           env={**os.environ, "RETRYSAFE_BUILT": "1"}, start_new_session=True)

    def restart(self, while_down=lambda: None):
        """`while_down`: called between the end of the old server and the start of the new one."""
        self._pg_ctl("stop")
        while_down()
        self._pg_ctl("start")
        self._read_address()

    def _pg_ctl(self, command):
        as_user = ["runuser", "-u", "postgres", "--"] if os.getuid() == 0 else []
        with ending.deferred():
            subprocess.run([*as_user, self.bindir() / "pg_ctl", "-D", self.directory / "data", "-l", self.directory / "log", "-w",
                            command], check=True, stdout=subprocess.DEVNULL, cwd="/", start_new_session=True)

    def _read_address(self):
        lines = (self.directory / "data/postmaster.pid").read_text().splitlines()
        self.pid, self.port = int(lines[0]), int(lines[3])

    @staticmethod
    def bindir():
        config = os.environ.get("PG_CONFIG", "/usr/lib/postgresql/15/bin/pg_config")
        return pathlib.Path(subprocess.run([config, "--bindir"], check=True, capture_output=True, text=True).stdout.strip())

    def dsn(self, database="postgres"):
        return f"host={self.directory} port={self.port} dbname={database} user=postgres"

    @contextlib.contextmanager
    def connect(self, database="postgres", autocommit=True):
        connection = psycopg2.connect(self.dsn(database))
        connection.autocommit = autocommit
        ending.connections.add(connection)
        try:
            yield connection
        finally:
            ending.connections.discard(connection)
            connection.close()

    def sql(self, query, parameters=None, database="postgres"):
        """One statement, or several, in a session of its own; returns the rows of the last one."""
        with self.connect(database) as connection:
            return execute(connection, query, parameters)

    def checkpoint(self):
        self.sql("CHECKPOINT")

    def wal_position(self):
        """Bytes of WAL so far."""
        return int(self.sql("SELECT pg_current_wal_insert_lsn() - '0/0'")[0][0])

    def cpu(self):
        """Seconds of CPU that the server and everything it started has used, what has ended included."""
        ticks = 0
        for entry in os.scandir("/proc"):
            if entry.name.isdigit():
                with contextlib.suppress(OSError):          # it ended meanwhile
                    fields = pathlib.Path(entry.path, "stat").read_text().rpartition(")")[2].split()
                    if int(entry.name) == self.pid:
                        ticks += sum(map(int, fields[11:15]))   # its own, and those of children that ended
                    elif int(fields[1]) == self.pid:
                        ticks += sum(map(int, fields[11:13]))
        return ticks / _TICKS


def private_memory(pid):
    """Bytes of memory that are the process's alone: what it has allocated, without shared buffers and files."""
    status = pathlib.Path(f"/proc/{pid}/status").read_text()
    return int(re.search(r"^RssAnon:\s*(\d+) kB", status, re.M)[1]) * 1024


def execute(connection, query, parameters=None):
    with connection.cursor() as cursor:
        cursor.execute(query, parameters)
        return cursor.fetchall() if cursor.description else None
