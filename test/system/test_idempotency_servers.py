"""Idempotent writes where the server is what matters: prepared transactions and restarts, read-only transactions, a standby."""
import os
import shutil
import subprocess

import pytest

from conftest import Database, Server, cluster, eventually, make_database, run
from payments import (  # noqa: F401 (the fixture shop)
    announce_orders, assert_orders_in_balance, begin, begin_pending, complete, error_of, insert_order, make_orders, orders,
    pay_in_new_session, shop)


@pytest.fixture
def own_server():
    with cluster() as own:
        yield own


@pytest.mark.parametrize("end", ["COMMIT PREPARED", "ROLLBACK PREPARED"])
def test_case_12_prepared_owner_survives_a_restart(own_server, end):
    db = make_database(own_server)
    make_orders(db)
    announce_orders(db)
    owner = db.connect()
    run(owner, "BEGIN")
    begin(owner, "k")
    complete(owner, "k", insert_order(owner, "k"))
    run(owner, "PREPARE TRANSACTION 'p'")
    assert run(owner, "SELECT outcome FROM idem_peek('k', 'a')") == [("in_progress",)]
    db.close()
    own_server.pg_ctl("restart", "-m", "immediate")

    other = db.connect(autocommit=False)
    run(other, "SET LOCAL lock_timeout = '200ms'")
    assert error_of(begin, other, "k") == "55P03"
    other.rollback()
    assert begin(other, "k", function="idem_try_begin")[0] == "in_progress"
    other.rollback()
    waiter = begin_pending(db, "k")
    assert waiter.blocks()
    db.sql(f"{end} 'p'")
    assert waiter.result() == [("replay" if end == "COMMIT PREPARED" else "new",)]
    assert orders(db) == (1 if end == "COMMIT PREPARED" else 0)
    assert_orders_in_balance(db)
    waiter.close()
    db.close()


def test_case_12_prepare_without_complete(shop):
    connection = shop.connect()
    run(connection, "BEGIN")
    begin(connection, "k")
    assert error_of(run, connection, "PREPARE TRANSACTION 'p'") == "RS008"
    assert shop.value("SELECT count(*) FROM pg_prepared_xacts") == 0
    assert shop.value("SELECT outcome FROM idem_peek('k', 'a')") == "unknown"


def test_case_13_read_only_transaction(shop):
    order = pay_in_new_session(shop, "k")[1]
    connection = shop.connect(autocommit=False)
    connection.set_session(readonly=True)
    assert begin(connection, "k") == ("replay", {"id": order}, "completed")
    assert begin(connection, "k", "b") == ("conflict", None, None)
    assert run(connection, "SELECT * FROM idem_peek('unknown', 'a')") == [("unknown", None, None)]
    assert run(connection, "SELECT * FROM idem_peek('k', 'a')") == [("replay", {"id": order}, "completed")]
    for function in ("idem_begin", "idem_try_begin"):
        run(connection, "SAVEPOINT s")
        assert error_of(begin, connection, "unknown", "a", function) == "RS010"
        run(connection, "ROLLBACK TO s")


class Standby(Server):
    """A hot standby of another server, in the folder next to it."""

    def __init__(self, primary):
        self.directory = primary.directory.with_name("standby")
        self.directory.mkdir()
        if os.getuid() == 0:
            shutil.chown(self.directory, "postgres")
        self._as_user(self.bindir() / "pg_basebackup", "-D", self.directory / "data", "-R", "-c", "fast",
                      "-d", primary.dsn())
        with open(self.directory / "data/postgresql.auto.conf", "a") as conf:
            conf.write(f"unix_socket_directories = '{self.directory}'\nport = {primary.port}\nlisten_addresses = ''\n")
        self.pg_ctl("start")

    @staticmethod
    def _as_user(*command):
        prefix = ["runuser", "-u", "postgres", "--"] if os.getuid() == 0 else []
        subprocess.run(prefix + [str(c) for c in command], check=True)

    def stop(self):
        self.end()


def test_case_13_standby(own_server):
    db = make_database(own_server)
    make_orders(db)
    announce_orders(db)
    order = pay_in_new_session(db, "k")[1]
    standby = Standby(own_server)
    try:
        there = Database(standby, db.name)
        connection = there.connect(autocommit=False)
        assert begin(connection, "k") == ("replay", {"id": order}, "completed")
        assert begin(connection, "k", "b")[0] == "conflict"
        assert run(connection, "SELECT * FROM idem_peek('unknown', 'a')") == [("unknown", None, None)]
        assert run(connection, "SELECT * FROM idem_peek('k', 'a')") == [("replay", {"id": order}, "completed")]
        for function in ("idem_begin", "idem_try_begin"):
            run(connection, "SAVEPOINT s")
            assert error_of(begin, connection, "unknown", "a", function) == "RS010"
            run(connection, "ROLLBACK TO s")
        connection.rollback()

        # What the primary commits later is seen too; what it is still doing is not.
        owner = db.connect(autocommit=False)
        begin(owner, "later")
        assert run(connection, "SELECT outcome FROM idem_peek('later', 'a')") == [("unknown",)]
        complete(owner, "later", 1)
        owner.commit()
        eventually(lambda: run(connection, "SELECT outcome FROM idem_peek('later', 'a')") == [("replay",)])
        there.close()
        assert_orders_in_balance(db)
    finally:
        standby.stop()
        db.close()
