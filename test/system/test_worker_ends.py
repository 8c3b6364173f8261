"""Workers that die, or cannot begin: whatever the reason and the moment, they come back, neither at once for ever nor too late."""
import datetime
import pathlib
import re
import signal
import time

import psycopg2
import pytest

from conftest import database_on, eventually, in_spite_of_crashes, kill, run
from copies import as_postgres
from null_destination import NullDestination, emit, worker_pids
from strikes import alive, kill_postmaster
from workers import own, said, slow_destination  # noqa: F401 (the fixture own)


def terminate_worker(db):
    (pid,) = eventually(lambda: worker_pids(db))
    db.sql("SELECT pg_terminate_backend(%s)", pid)
    return pid


def starting_worker(server, before):
    """The next worker, as soon as there is a process."""
    children = pathlib.Path(f"/proc/{server.pid}/task/{server.pid}/children")
    until = time.monotonic() + 30
    while time.monotonic() < until:
        for pid in map(int, children.read_text().split()):
            try:
                if pid != before and "retrysafe worker" in pathlib.Path(f"/proc/{pid}/cmdline").read_text():
                    return pid
            except (FileNotFoundError, ProcessLookupError):
                pass
    raise AssertionError("no worker starts")


@pytest.mark.slow
@pytest.mark.parametrize("signal_number", [signal.SIGTERM, signal.SIGKILL])
def test_it_dies_as_it_starts(own, signal_number):
    for milliseconds in (0, 1, 3, 10, 30):
        with database_on(own) as db:
            d = NullDestination(db)
            pid = starting_worker(own, terminate_worker(db))
            time.sleep(milliseconds / 1000)  # so far it gets
            kill(pid, signal_number)
            eventually(lambda: not alive(pid))
            eventually(lambda: in_spite_of_crashes(lambda: emit(db, "a") or True))
            eventually(lambda: d.delivered() == ["a"], timeout=30)


@pytest.mark.parametrize("kind", ["request that hangs", "function"])
def test_it_does_not_outlive_the_postmaster(own_db, kind):
    """Whatever it waits for."""
    with slow_destination(own_db, kind) as got:
        emit(own_db, *(f"e{i}" for i in range(50)))
        eventually(got)
        kill_postmaster(own_db.server)  # and with it, within seconds, all its processes


@pytest.mark.alone
def test_no_process_can_be_made(own_db):
    """The machine has no room for one more: it is tried again, each time later, and the postmaster's line for each try is all
    that the log gets. Nobody holds the destination's shards, nothing is said to be starting, and who starts a worker by hand
    is told."""
    server = own_db.server
    d = NullDestination(own_db)
    eventually(lambda: worker_pids(own_db))
    session = own_db.connect()
    log_before = len(server.log())
    limit = ("prlimit", "--pid", server.pid)
    usual = as_postgres(*limit, "--nproc", "--output=SOFT", "--noheadings").decode().strip()
    as_postgres(*limit, "--nproc=1:")
    try:
        run(session, "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE backend_type = 'retrysafe worker'")
        run(session, "SELECT outbox_emit(NULL, 'a', 't', '1')")

        def attempts():
            times = re.findall(r"^(\S+ \S+) \S+ \[.*could not fork (?:background )?worker process", server.log()[log_before:], re.M)
            return [datetime.datetime.fromisoformat(t) for t in times]
        eventually(lambda: len(attempts()) == 4)
        pauses = [(b - a).total_seconds() for a, b in zip(attempts(), attempts()[1:])]
        assert all(pause > least for pause, least in zip(pauses, (0.9, 1.9, 3.9))), pauses
        with pytest.raises(psycopg2.Error) as caught:
            run(session, "SELECT outbox_run_worker()")
        assert caught.value.pgcode == "RS303"
        assert run(session, "SELECT state, holders FROM outbox_status") == [("unclaimed", None)]
        assert run(session, "SELECT process, state FROM outbox_workers") == [("launcher", "running")]
    finally:
        as_postgres(*limit, f"--nproc={usual}:")
    eventually(lambda: d.delivered() == ["a"])
    lines = [line for line in said(server.log()[log_before:]) if not line.startswith("could not fork")]
    assert lines == ["could not start a worker"], "by hand"
    assert len(attempts()) < 7


def test_none_starts_in_an_upgrade(own_db):
    """As pg_upgrade starts a server."""
    d = NullDestination(own_db)
    eventually(lambda: worker_pids(own_db))
    server = own_db.server
    server.pg_ctl("stop")
    server.pg_ctl("start", "-o", "-b")
    emit(own_db, "a")
    assert own_db.sql("SELECT backend_type FROM pg_stat_activity WHERE backend_type LIKE 'retrysafe%%'") == []
    assert own_db.sql("SELECT * FROM outbox_workers") == []
    server.pg_ctl("stop")
    server.pg_ctl("start")
    eventually(lambda: d.delivered() == ["a"])
