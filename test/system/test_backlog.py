"""Many events that wait cost no more than a few: neither the next batch, nor memory, nor the time until the first arrives."""
import pytest

from conftest import cluster, eventually, load_factor, make_database, run
from null_destination import NullDestination, worker_pids
from resident import memory

FEW, MANY = 1000, 300_000
MEGABYTE = 1 << 20


def emit(session, first, last):
    run(session, """SELECT count(outbox_emit(NULL, 'e' || i, 't', to_jsonb(repeat('x', 100)), 'o' || i %% 100))
                      FROM generate_series(%s::int, %s) i""", first, last)


def pages_of_a_fetch(session):
    """That a client reads for ten events, and gives back."""
    ((plan,),) = run(session, "EXPLAIN (ANALYZE, BUFFERS, FORMAT JSON) SELECT outbox_release(min(batch)) FROM outbox_fetch('p', 10)")
    return plan[0]["Plan"]["Shared Hit Blocks"] + plan[0]["Plan"]["Shared Read Blocks"]


@pytest.mark.slow
@pytest.mark.alone
def test_many_events_that_wait():
    many = int(MANY * load_factor())
    with cluster() as server:
        db = make_database(server)
        session = db.connect()
        run(session, "SELECT outbox_create_destination('p', 'pull')")
        idle = memory(eventually(lambda: worker_pids(db))[0])
        emit(session, 1, FEW)
        pages_of_a_fetch(session)  # catalogs and plans
        few = pages_of_a_fetch(session)
        emit(session, FEW + 1, many)
        pages_of_a_fetch(session)
        assert pages_of_a_fetch(session) <= few + 20

        d = NullDestination(db, start_at="'earliest'")
        eventually(d.delivered, timeout=5)
        most = 0

        def all_there():
            nonlocal most
            most = max(most, memory(worker_pids(db)[0]))
            return d.status()["delivered"] == many
        eventually(all_there, timeout=120)
        assert most < idle + 16 * MEGABYTE  # a batch has 4 at most
        assert len(d.delivered()) == len(set(d.delivered())) == many
