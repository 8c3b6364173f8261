"""Transaction ids go round: they are 32 bits in a row, and a busy server draws as many in some days. What is kept longer must not
go by them."""
from conftest import cluster, eventually, make_database, run
from copies import as_postgres
from rings import SETTINGS, bytes_of, fetch_all, fill, ring, settle, states, turn_until

ON_A_PAGE = 1 << 20  # of pg_xact, which need not be there then


def draw_transaction_ids(server, count):
    """As if so many had been used, with vacuum at its work meanwhile."""
    admin = server.connect()
    run(admin, "ALTER DATABASE template0 ALLOW_CONNECTIONS true")
    used = int(run(admin, "SELECT pg_current_xact_id()")[0][0])
    as_postgres(server.bindir() / "vacuumdb", "--all", "--freeze", "-q", "-h", server.directory, "-p", server.port)
    admin.close()
    server.pg_ctl("stop", "-m", "fast")
    following = (used + count) // ON_A_PAGE * ON_A_PAGE
    as_postgres(server.bindir() / "pg_resetwal", "-x", following % 2**32, "-e", following >> 32, "-D", server.directory / "data")
    server.pg_ctl("start")


def test_a_piece_that_was_retired_long_ago_is_emptied():
    with cluster(*SETTINGS) as server:
        db = make_database(server)
        db.sql("SELECT outbox_create_destination('d', 'pull')")
        def is_retired():
            return states(db, "progress")[0] == "retired"

        fill(db, 1)
        turn_until(db, "log", lambda: fetch_all(db, "d") == [] and is_retired())
        for _ in range(2):
            draw_transaction_ids(server, 3 << 29)
        assert ring(db, "progress")[0] == (1, "retired", ["readers"])
        settle(db)
        assert bytes_of(db, "progress", 1) == 0
        fill(db, 1, "f")
        assert fetch_all(db, "d") == ["f1"]


def test_what_was_there_long_ago_is_still_there():
    with cluster(*SETTINGS) as server:
        db = make_database(server)
        db.sql("CREATE FUNCTION public.handle(jsonb) RETURNS jsonb LANGUAGE sql AS 'SELECT $1'")
        request = "SELECT idem_run('k', '{}', 'public.handle(jsonb)')"
        db.sql(f"SET retrysafe.idem_retention = '1h'; {request}")
        db.sql("SELECT outbox_create_destination('d', 'pull', start_at => 'earliest')")
        fill(db, 4)
        batch, dead, _, last = db.sql("SELECT batch, event_id, id, max(id) OVER () FROM outbox_fetch('d', 2)")[0]
        db.sql("SELECT outbox_nack(%s, %s, dead => true); SELECT outbox_ack(%s)", batch, dead, batch)
        db.sql("SELECT outbox_emit(NULL, 'later', 't', '{}', deliver_after => clock_timestamp() + '100ms')")
        for _ in range(3):  # once round
            draw_transaction_ids(server, 3 << 29)
        session = db.connect(autocommit=False)
        session.set_session("REPEATABLE READ")
        assert run(session, request) == [({},)]
        assert run(session, "SELECT outbox_emit(NULL, 'e4', 't', '{}')") == [(last + 2,)]
        session.rollback()
        assert db.value("SELECT outbox_retry('d')") == 1
        eventually(lambda: db.sql("SELECT 1 FROM outbox_scheduled WHERE deliver_after < clock_timestamp()"))
        assert sorted(fetch_all(db, "d") + fetch_all(db, "d")) == ["e1", "e3", "e4", "later"]
        assert db.value("SELECT backlog FROM outbox_status") == 0
