"""The check after each case notices what it is there for."""
import signal

import pytest

import closing
import conftest
import preload
from conftest import cluster, eventually, kill, make_database
from null_destination import NullDestination, emit, worker_pids
from workers import can_connect


@pytest.fixture
def d(db):
    destination = NullDestination(db, max_attempts=1)
    destination.tell("final")
    emit(db, "dead")
    eventually(lambda: destination.status()["dead"] == 1)
    destination.tell("ok")
    emit(db, "a", "b")
    eventually(lambda: destination.status()["delivered"] == 2)
    return destination


def test_what_is_in_balance(db, d):
    closing.balance(db, "d", d.ids(), committed=["a", "b", "dead"], rolled_back=["c"])
    closing.balance(db, "all", closing.drain(db))
    db.sql("SELECT outbox_pause('d')")
    emit(db, "waits")
    db.sql("SELECT outbox_emit(NULL, 'delayed', 't', '1', deliver_after => '2100-01-01')")
    closing.balance(db, "d", d.ids(), pending=["waits", "delayed"])
    with pytest.raises(AssertionError, match="what waits"):
        closing.balance(db, "d", d.ids())


def test_a_lost_event(db, d):
    with pytest.raises(AssertionError, match="never arrived"):
        closing.balance(db, "d", d.ids()[1:])


def test_an_event_that_nobody_committed(db, d):
    with pytest.raises(AssertionError, match="not committed"):
        closing.balance(db, "d", [*d.ids(), "6fd6a4a1-0000-8000-8000-000000000000"])


def test_a_committed_event_that_is_gone(db, d):
    with pytest.raises(AssertionError, match="are gone"):
        closing.balance(db, "d", d.ids(), committed=["a", "b", "c"])


def test_an_event_that_was_rolled_back(db, d):
    with pytest.raises(AssertionError, match="rolled back"):
        closing.balance(db, "d", d.ids(), rolled_back=["b"])


@pytest.mark.skipif(bool(preload.SANITIZER), reason="a sanitizer answers SIGSEGV itself")
def test_crashes():
    with cluster() as server:
        db = make_database(server)
        NullDestination(db)
        for fatal in signal.SIGSEGV, signal.SIGKILL:
            pid = eventually(lambda: worker_pids(db))[0]
            kill(pid, fatal)
            eventually(lambda: f"(PID {pid}) was terminated by signal {fatal.value}" in server.log())
            server.assert_no_crash()  # the test did it
            conftest.killed.discard(pid)
            assert len(closing.crashes(server.log(), conftest.killed)) == 1
            conftest.killed.add(pid)
            eventually(lambda: can_connect(server))
