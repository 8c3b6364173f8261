"""Workers as processes: without a free slot, terminated, started by hand, of another version, with settings of a role."""
import pathlib
import signal

import psycopg2
import pytest

from conftest import cluster, eventually, kill, make_database, run
from null_destination import NullDestination, emit, worker_pids
from workers import own, time_to_come_back  # noqa: F401 (the fixture own)


def test_no_free_slot_backs_off_and_shows():
    with cluster("max_worker_processes = 3") as server:  # one is for logical replication
        first = make_database(server)
        d = NullDestination(first)
        emit(first, "e1")
        eventually(d.delivered)
        second = make_database(server)
        eventually(lambda: second.value("SELECT state FROM outbox_workers WHERE process = 'launcher'")
                   == "no worker slot is free")
        with pytest.raises(psycopg2.Error) as caught:
            second.sql("SELECT outbox_run_worker()")
        assert caught.value.pgcode == "RS303"
        assert second.value("SELECT count(*) FROM outbox_workers WHERE state = 'starting'") == 0
        admin = server.connect()
        run(admin, f"DROP DATABASE {first.name}")
        admin.close()
        eventually(lambda: worker_pids(second), timeout=40)
        assert server.log().count("no background worker slot is free for") == 1
        assert second.value("SELECT state FROM outbox_workers WHERE process = 'launcher'") == "running"


def test_terminated_processes_come_back(own_db):
    d = NullDestination(own_db)
    eventually(lambda: worker_pids(own_db))
    before = worker_pids(own_db)
    for process in ("retrysafe worker", "retrysafe launcher"):
        own_db.sql("SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE backend_type = %s", process)
    eventually(lambda: worker_pids(own_db) not in ([], before))
    eventually(lambda: own_db.value("SELECT count(*) FROM outbox_workers WHERE process = 'launcher'") == 1)
    emit(own_db, "e1")
    eventually(d.delivered)
    pid = worker_pids(own_db)[0]
    own_db.sql("SELECT pg_cancel_backend(%s)", pid)
    emit(own_db, "e2")
    eventually(lambda: d.delivered() == ["e1", "e2"])
    assert worker_pids(own_db) == [pid]


def test_a_cancellation_during_a_commit_ends_no_worker():
    """While a commit waits for the disk there is nothing left to cancel."""
    with cluster("fsync = on", "commit_delay = 100000", "commit_siblings = 0") as server:
        db = make_database(server)
        d = NullDestination(db)
        session = db.connect()
        pid, = eventually(lambda: worker_pids(db))
        for event in ("a", "b", "c"):
            emit(db, event)
            eventually(lambda: run(session, """SELECT pg_cancel_backend(pid) FROM pg_stat_activity
                                                WHERE pid = %s AND state = 'active' AND query LIKE 'recording %%'""", pid))
            eventually(lambda: d.status()["backlog"] == 0)
            assert worker_pids(db) == [pid]


def test_a_worker_by_hand_without_preload():
    with cluster("shared_preload_libraries = ''", "retrysafe.poll_interval = 100ms") as server:
        db = make_database(server)
        d = NullDestination(db)
        emit(db, "e1")
        assert worker_pids(db) == []
        pid = db.value("SELECT outbox_run_worker()")
        eventually(lambda: d.delivered() == ["e1"])
        assert worker_pids(db) == [pid]
        emit(db, "e2")
        eventually(lambda: d.delivered() == ["e1", "e2"])
        assert db.sql("SELECT * FROM outbox_workers") == []
        kill(pid, signal.SIGTERM)
        eventually(lambda: worker_pids(db) == [])


def test_another_version_is_said_once_and_left_alone(own_db):
    d = NullDestination(own_db)
    eventually(lambda: worker_pids(own_db))
    before = own_db.server.log().count("is not of version")
    own_db.sql("UPDATE pg_extension SET extversion = '0.0.1' WHERE extname = 'retrysafe'")
    with time_to_come_back(own_db.server):
        emit(own_db, "e1")
        eventually(lambda: worker_pids(own_db) == [])
    assert d.delivered() == []
    assert own_db.server.log().count("is not of version") == before + 1
    own_db.sql("UPDATE pg_extension SET extversion = %s WHERE extname = 'retrysafe'", version())
    own_db.sql("CREATE EXTENSION IF NOT EXISTS pgcrypto")
    eventually(lambda: d.delivered() == ["e1"])


def version():
    control = (pathlib.Path(__file__).resolve().parents[2] / "retrysafe.control").read_text()
    return control.split("default_version = '")[1].split("'")[0]


def test_settings_of_database_and_role_do_not_reach_the_work(own):
    db = make_database(own)
    admin = own.connect()
    leaks = {"default_transaction_read_only": "on", "default_transaction_isolation": "serializable",
             "statement_timeout": "1", "lock_timeout": "1", "idle_in_transaction_session_timeout": "1",
             "DateStyle": "'German, DMY'", "TimeZone": "'Asia/Kathmandu'", "row_security": "off",
             "IntervalStyle": "sql_standard", "session_replication_role": "replica", "bytea_output": "escape"}
    for name, value in leaks.items():
        run(admin, f"ALTER DATABASE {db.name} SET {name} = {value}")
    run(admin, f"ALTER DATABASE {db.name} SET search_path = nowhere")
    options = psycopg2.connect(own.dsn(db.name), options="-c search_path=retrysafe -c statement_timeout=0 "
                               "-c default_transaction_read_only=off -c lock_timeout=0 "
                               "-c idle_in_transaction_session_timeout=0")
    options.autocommit = True
    run(admin, f"SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE backend_type = 'retrysafe worker' "
               f"AND datname = '{db.name}'")
    directory = own.directory / "leaks"
    from null_destination import OPTIONS
    run(options, f"SELECT outbox_register_kind('null', 'retrysafe_null', '{OPTIONS}')")
    run(options, f"SELECT outbox_create_destination('d', 'null', '{{\"file\": \"{directory}\"}}')")
    run(options, "SELECT outbox_emit(NULL, 'e1', 't', '1')")
    eventually(directory.exists)
    eventually(lambda: run(options, "SELECT sent_at IS NOT NULL FROM outbox_events") == [(True,)])
    options.close()
    run(admin, f"DROP DATABASE {db.name}")
    admin.close()
