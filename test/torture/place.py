"""Two places for a server, and a standby in the one where the primary is not. A promotion makes them change.

Commits wait until the standby has them and shows them (`synchronous_commit = remote_apply`), so that a failover loses
nothing that a client knows of. There is one way around it: a session that is cancelled while it waits has committed on the
primary alone. So before a promotion the standby has to have all that was written until then, and from then on nobody
cancels anything. Nor may it lose what a receiver knows of. With `retrysafe.publish_after = synchronous_standby` that holds by
itself: so writers are in haste then, and for a while commit what the standby never gets. Without, it does not hold for
transactions that do not wait; so then none of them is under way in a promotion.

The database is in a tablespace of each place, a file system in memory that can be filled, where mounting is permitted.
"""
import contextlib
import os
import pathlib
import shutil
import signal
import socket
import subprocess
import threading
import time

import psycopg2

from clock import Clock
from conftest import Server, eventually, make_database, run
from gate import Gate

SPACE = "256m"
HASTE = 2.0  # seconds in which a primary goes on alone before it is lost


class Standby(Server):
    def __init__(self, primary, directory, port):
        self.directory, self.environment = directory, primary.environment
        directory.mkdir(exist_ok=True)
        if os.getuid() == 0:
            shutil.chown(directory, "postgres", "postgres")
        shutil.rmtree(directory / "data", ignore_errors=True)
        spaces = [f"--tablespace-mapping={space_of(primary.directory)}={space_of(directory)}"] if space_of(directory).exists() else []
        for entry in space_of(directory).glob("*"):
            shutil.rmtree(entry) if entry.is_dir() else entry.unlink()
        command = [self.bindir() / "pg_basebackup", "-h", primary.directory, "-p", primary.port, "-U", "postgres",
                   "-D", directory / "data", "-R", "--checkpoint=fast", "--no-sync", *spaces]
        if os.getuid() == 0:
            command = ["runuser", "-u", "postgres", "--", *command]
        subprocess.run(list(map(str, command)), check=True, cwd="/")
        with open(directory / "data/postgresql.conf", "a") as conf:
            conf.write(f"port = {port}\nunix_socket_directories = '{directory}'\n")
        self.pg_ctl("start")


def space_of(directory):
    return pathlib.Path(directory) / "space"


class Site:
    def __init__(self, folder, settings, say, publish_after, clock_jumps):
        self.places = [folder / "one", folder / "two"]
        self.say = say
        self.mounted = []
        self.standby = None
        self.publish_after = publish_after
        self.without_waiting = Gate()      # for transactions that do not wait
        self.haste = threading.Event()     # no transaction waits
        self.quiet = threading.Event()     # nobody begins anything
        self.primary = Server(self.places[0], *settings, "synchronous_commit = remote_apply", f"retrysafe.publish_after = {publish_after}")
        self.ports = {self.places[0]: self.primary.port, self.places[1]: free_port()}
        self.places[1].mkdir()
        self.db = self.clock = None
        if clock_jumps:
            self.clock = Clock(folder)
            self.primary.environment = self.clock.environment
            self.primary.pg_ctl("restart")

    def create_database(self):
        options = ""
        if self.mount():
            run_on(self.primary, f"CREATE TABLESPACE small LOCATION '{space_of(self.primary.directory)}'")
            options = "TABLESPACE small"
        self.db = make_database(self.primary, "torture", options)
        return self.db

    def mount(self):
        for place in self.places:
            space = space_of(place)
            space.mkdir()
            mounting = subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={SPACE},mode=700", "tmpfs", space], capture_output=True, text=True)
            if mounting.returncode:
                space.rmdir()
                self.say(f"skipped: filling the disk ({mounting.stderr.strip()})")
                return False
            self.mounted.append(space)
            shutil.chown(space, "postgres", "postgres")
        return True

    def add_standby(self):
        other = next(place for place in self.places if place != self.primary.directory)
        self.standby = Standby(self.primary, other, self.ports[other])
        self.primary.set("synchronous_standby_names", "*")
        eventually(self.in_step, timeout=60, message="the standby does not come into step")

    def wait_for_no_standby(self):
        self.primary.set("synchronous_standby_names", None)

    def in_step(self):
        """All that was written until now is on the standby, which is one that commits wait for."""
        try:
            connection = self.primary.connect()
            try:
                written = run(connection, "SELECT pg_current_wal_insert_lsn()")[0][0]
                return run(connection, "SELECT replay_lsn >= %s FROM pg_stat_replication WHERE sync_state = 'sync'", written) == [(True,)]
            finally:
                connection.close()
        except psycopg2.Error:
            return False

    def promote(self):
        old, new = self.primary, self.standby
        with self.going_alone():
            eventually(self.in_step, timeout=60, message="the standby does not come into step")
            # What is committed from now on the standby does not get.
            receiver = receiver_of(new)
            os.kill(receiver, signal.SIGSTOP)
            time.sleep(HASTE)
            old.pg_ctl("stop", "-m", "immediate")
            os.kill(receiver, signal.SIGTERM)  # what is in its socket goes with it
            os.kill(receiver, signal.SIGCONT)
        new.pg_ctl("promote")
        self.primary = self.db.server = new
        self.wait_for_no_standby()  # nobody would answer its commits before it has one
        self.add_standby()
        return f"{new.directory.name}"

    @contextlib.contextmanager
    def going_alone(self):
        if self.publish_after == "local_flush":
            with self.without_waiting.closed():
                yield
            return
        self.haste.set()
        try:
            yield
        finally:
            self.haste.clear()

    def dsn(self):
        """Of both, for programs that look for the one that takes writes."""
        hosts = ",".join(str(place) for place in self.places)
        ports = ",".join(str(self.ports[place]) for place in self.places)
        return f"host={hosts} port={ports} dbname={self.db.name} user=postgres"

    def logs(self):
        return [(place / "log").read_text(errors="replace") for place in self.places if (place / "log").exists()]

    def fill(self):
        """Leaves no block free."""
        with open(space_of(self.primary.directory) / "filler", "wb", buffering=0) as filler:
            try:
                while filler.write(b"\0" * (1 << 20)):
                    pass
            except OSError:
                pass
        return filler.name

    def stop(self):
        """Everything, though one server cannot be stopped: one that a run was interrupted in the middle of starting, say."""
        with contextlib.ExitStack() as at_end:
            for space in self.mounted:
                at_end.callback(subprocess.run, ["umount", "--lazy", space], check=False)
            for server in filter(None, (self.standby, self.primary)):
                at_end.callback(server.end)


def receiver_of(standby):
    """The process that receives WAL."""
    connection = standby.connect()
    try:
        return run(connection, "SELECT pid FROM pg_stat_wal_receiver")[0][0]
    finally:
        connection.close()


def run_on(server, query):
    connection = server.connect()
    run(connection, query)
    connection.close()


def free_port():
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]
