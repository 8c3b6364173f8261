"""The inbox: of the copies of an event one is accepted."""
import itertools

from conftest import Pending, run
from payments import in_threads, shop  # noqa: F401 (the fixture shop)


def test_inbox_two_copies_at_once(shop):
    first = shop.connect(autocommit=False)
    assert run(first, "SELECT inbox_accept('billing', 'e1')") == [(True,)]
    second = Pending(shop, "BEGIN", "SELECT inbox_accept('billing', 'e1')")
    assert second.blocks()
    first.commit()
    assert second.result() == [(False,)]
    second.close()


def test_inbox_rolled_back_copy_counts_for_nothing(shop):
    first = shop.connect(autocommit=False)
    run(first, "SELECT inbox_accept('billing', 'e1')")
    second = Pending(shop, "BEGIN", "SELECT inbox_accept('billing', 'e1')")
    assert second.blocks()
    first.rollback()
    assert second.result() == [(True,)]
    second.close()


def test_inbox_bulk_consumers_do_not_deadlock(shop):
    ids = [f"e{i}" for i in range(300)]

    def consume(order):
        connection = shop.connect(autocommit=False)
        accepted = [row[0] for row in run(connection, "SELECT * FROM inbox_accept('billing', %s)", order)]
        connection.commit()
        return accepted

    results = in_threads([lambda: consume(ids), lambda: consume(ids[::-1]), lambda: consume(ids[150:] + ids[:150])])
    assert sorted(itertools.chain(*results)) == sorted(ids)
