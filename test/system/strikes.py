"""Ending servers and their processes in every way, and telling whether they are gone."""
import contextlib
import os
import subprocess

import psycopg2

from conftest import eventually, kill, run


def broken(connection):
    try:
        run(connection, "SELECT")
        return False
    except psycopg2.Error:
        return True


def kill_postmaster(server):
    """SIGKILL, and a new one."""
    children = children_of(server.pid)
    kill(server.pid)
    start_again(server, children)


def start_again(server, children):
    # The new one may only start when the last process of the old one has noticed, and nobody has its number any more.
    eventually(lambda: not any(alive(pid) for pid in children), timeout=10, message="a process outlived the postmaster")
    eventually(lambda: not os.path.exists(f"/proc/{server.pid}"), timeout=30, message="nobody asks how the postmaster ended")
    eventually(lambda: starts(server), timeout=10, message=server.log()[-2000:])


def lose_power(server, children):
    """All that is only in the server's memory is gone, WAL that was not written among it. It has to be quick, so somebody else
    has to know the children. One that was begun since may not stay: it could wait for ever for a lock of one that was killed."""
    kill_all([server.pid, *children])
    kill_all(processes_in(server.directory / "data"))


def kill_all(processes):
    for pid in processes:
        with contextlib.suppress(ProcessLookupError):
            kill(pid)


def processes_in(folder):
    """Whose working directory it is. All processes of a server stay in that of its data."""
    for entry in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError, PermissionError):
            if os.readlink(f"/proc/{entry}/cwd") == str(folder):
                yield int(entry)


def starts(server):
    try:
        server.pg_ctl("start")
        return True
    except subprocess.CalledProcessError:
        return False


def children_of(pid):
    found = []
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            try:
                with open(f"/proc/{entry}/stat") as stat:
                    if int(stat.read().rsplit(")", 1)[1].split()[1]) == pid:
                        found.append(int(entry))
            except (FileNotFoundError, ProcessLookupError):
                pass
    return found


def alive(pid):
    try:
        with open(f"/proc/{pid}/stat") as stat:
            return stat.read().rsplit(")", 1)[1].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False
