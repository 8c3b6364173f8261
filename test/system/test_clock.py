"""The server's clock is set, far ahead and far back: back-off, leases and order do not depend on it."""
import pytest

from clock import Clock
from conftest import cluster, eventually, run
from null_destination import UNREACHABLE, NullDestination, emit, worker_pids

HOUR = 3600


@pytest.fixture(scope="module")
def own():
    with cluster("retrysafe.poll_interval = 200ms") as server:
        server.clock = Clock(server.directory)
        server.environment = server.clock.environment
        server.pg_ctl("restart")
        yield server


@pytest.fixture
def clock(own):
    yield own.clock
    own.clock.set(0)


def terminate_worker(db):
    (before,) = worker_pids(db)
    db.sql("SELECT pg_terminate_backend(%s)", before)
    eventually(lambda: worker_pids(db) not in ([], [before]))


@pytest.mark.parametrize("worker", ["that lives", "that is new"])
@pytest.mark.parametrize("hours", [-24, 24])
def test_back_off_ends(own_db, clock, hours, worker):
    """However far the clock is set back, a destination is tried again in its time: by who has the shard, and by who comes."""
    d = NullDestination(own_db, backoff="interval '1 s'", backoff_max="interval '2 s'")
    d.tell("unreachable")
    emit(own_db, "a")
    eventually(lambda: len(d.attempts(UNREACHABLE)) >= 2)
    clock.set(hours * HOUR)
    if worker == "that is new":
        terminate_worker(own_db)
    d.tell("ok")
    eventually(lambda: d.delivered() == ["a"], timeout=15)
    eventually(lambda: (d.status()["state"], d.status()["retry_at"]) == ("idle", None))


@pytest.mark.parametrize("hours", [-24, 24])
def test_order_and_work_go_on(own_db, clock, hours):
    """Also of a shard whose worker dies: its lease is not what counts then."""
    d = NullDestination(own_db, shards=2, lease="interval '1 s'")
    keys = [f"e{i}" for i in range(40)]
    emit(own_db, *keys[:10], ordering_key="one")
    eventually(lambda: d.delivered() == keys[:10])
    clock.set(hours * HOUR)
    emit(own_db, *keys[10:20], ordering_key="one")
    eventually(lambda: d.delivered() == keys[:20], timeout=15)
    terminate_worker(own_db)
    emit(own_db, *keys[20:30], ordering_key="one")
    eventually(lambda: d.delivered() == keys[:30], timeout=15)
    clock.set(0)
    emit(own_db, *keys[30:], ordering_key="one")
    eventually(lambda: d.delivered() == keys, timeout=15)
    eventually(lambda: d.status()["state"] == "idle")


def test_the_lease_of_a_client_that_died_ends(own_db, clock):
    """A lease is for a day at most, and so is what the clock can add to it."""
    own_db.sql("SELECT outbox_create_destination('d', 'pull')")
    emit(own_db, "a")
    fetch = "SELECT event_key FROM outbox_fetch('d', lease => '1 minute')"
    clock.set(400 * 24 * HOUR)
    client = own_db.connect()
    assert run(client, fetch) == [("a",)]
    client.close()
    assert own_db.sql(fetch) == []
    clock.set(0)
    assert own_db.sql(fetch) == [("a",)]


def test_a_key_answers_as_it_did_last(own_db, clock):
    """Also when the clock goes back to where an earlier answer of it was alive: the one with a ttl, and the one without."""
    session = own_db.connect(autocommit=False)

    def pay(answer, ttl=None, between=lambda: None):
        assert run(session, "SELECT outcome FROM idem_begin('k', 'h', ttl => %s::interval)", ttl) == [("new",)]
        between()
        run(session, "SELECT idem_complete('k', %s)", answer)
        session.commit()

    def answer():
        return own_db.value("SELECT response FROM idem_begin('k', 'h')")

    run(session, "SET retrysafe.idem_retention = '10h'")
    session.commit()
    pay("1")
    clock.set(11 * HOUR)
    pay("2", ttl="20 hours")
    assert answer() == 2
    clock.set(5 * HOUR)
    assert answer() == 2
    clock.set(40 * HOUR)
    pay("3", between=lambda: clock.set(15 * HOUR))
    assert answer() == 3
    clock.set(20 * HOUR)
    assert answer() == 3
