"""Physical copies of a server: standbys, base backups, recovery to a point in time."""
import contextlib
import os
import pathlib
import shutil
import socket
import subprocess
import tempfile

import pytest

from conftest import Server, folder_of_servers


@contextlib.contextmanager
def folder_for_copies():
    path = pathlib.Path(tempfile.mkdtemp(prefix="retrysafe-test-", dir=folder_of_servers()))
    os.chmod(path, 0o777)
    try:
        yield path
    finally:
        shutil.rmtree(path)


@pytest.fixture
def folder():
    with folder_for_copies() as path:
        yield path


def as_postgres(*command, stdin=None, cwd=None):
    if os.getuid() == 0:
        command = ("runuser", "-u", "postgres", "--", *command)
    done = subprocess.run([str(c) for c in command], capture_output=True, input=stdin, cwd=cwd)
    assert done.returncode == 0, (done.stdout[-5000:] + done.stderr).decode(errors="replace")
    return done.stdout


class Copy(Server):
    """A base backup of a server, and then a server of its own."""

    def __init__(self, original, directory):
        self.directory = directory
        directory.mkdir()
        if os.getuid() == 0:
            shutil.chown(directory, "postgres", "postgres")
        as_postgres(self.bindir() / "pg_basebackup", "-D", directory / "data", "-d", original.dsn(), "-c", "fast", "-X",
                    "stream")

    def start(self, *signals, **settings):
        with socket.socket() as s:
            s.bind(("127.0.0.1", 0))
            port = s.getsockname()[1]
        with open(self.directory / "data/postgresql.conf", "a") as conf:
            conf.write(f"port = {port}\nunix_socket_directories = '{self.directory}'\n")
            for name, value in settings.items():
                conf.write(f"{name.replace('__', '.')} = '{value}'\n")
        for signal in signals:
            (self.directory / "data" / signal).touch()
        self.pg_ctl("start")
        return self

    def stop(self):
        self.end()


def standby_of(server, directory, **settings):
    """It follows `server` under the application name `standby`."""
    conninfo = f"{server.dsn()} application_name=standby"
    return Copy(server, directory).start("standby.signal", primary_conninfo=conninfo, **settings)


@pytest.fixture
def copy_of(server, folder):
    copies = []

    def make(*signals, **settings):
        copies.append(Copy(server, folder / f"copy{len(copies)}"))
        return copies[-1].start(*signals, **settings)

    yield make
    for c in copies:
        c.stop()
