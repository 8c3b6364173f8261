"""Who may see and turn the rings, and what administrators do to their pieces."""
import threading

import psycopg2
import pytest

from conftest import Pending, eventually, run
from rings import (  # noqa: F401 (the fixture server)
    begin, copies, emit, fetch_all, fill, rotate, save, server, settle, sqlstate_of, stopped_at)


# --- who may see and do what ---


def test_pieces_belong_to_nobody_but_the_owner(db):
    relations = db.sql("""SELECT c.oid::regclass::text FROM pg_class c JOIN pg_depend d ON d.objid = c.oid
                           WHERE d.classid = 'pg_class'::regclass AND d.deptype = 'e' AND c.relkind IN ('r', 'S')
                             AND c.relname ~ '_[123]$|^ring_|^outbox_log|^idem_records|^outbox_(windows|batches)'""")
    assert len(relations) > 16
    for access in ("nobody", "write", "consume", "monitor", "admin"):
        role = f"ring_{access}_{db.name}"
        db.sql(f"DROP ROLE IF EXISTS {role}")
        db.sql(f"CREATE ROLE {role} LOGIN")
        if access != "nobody":
            db.sql("SELECT retrysafe_grant(%s::regrole, %s)", role, access)
        readable = db.sql("""SELECT relation, privilege FROM unnest(%s) AS relation,
                               unnest('{SELECT,INSERT,UPDATE,DELETE,TRUNCATE,REFERENCES,TRIGGER}'::text[]) AS privilege
                              WHERE relation !~ '_seq$' AND has_table_privilege(%s, relation, privilege)""",
                          [r for r, in relations], role)
        assert readable == [], access
    fill(db, 1)
    rotate(db, "log")
    monitor = db.connect(user=f"ring_monitor_{db.name}")
    assert ("log", "active") in run(monitor, "SELECT ring, state FROM ring_status")
    run(monitor, "SELECT * FROM outbox_status")
    writer = db.connect(user=f"ring_write_{db.name}")
    assert run(writer, "SELECT outbox_emit(NULL, 'k', 't', '{}') > 0") == [(True,)]
    assert sqlstate_of(run, writer, "SELECT * FROM ring_status") == "42501"
    assert sqlstate_of(run, writer, "SELECT outbox_cleanup()") == "42501"
    for name in "nobody", "write":
        assert sqlstate_of(run, db.connect(user=f"ring_{name}_{db.name}", autocommit=False), "LOCK retrysafe.ring_pieces IN ACCESS SHARE MODE") == "42501"


def test_steps_run_as_the_owner_and_past_the_path_of_the_caller(db):
    """An administrator's path, with operators and functions of somebody else in front."""
    db.sql("CREATE ROLE " + (admin := f"ring_step_{db.name}") + " LOGIN")
    db.sql("SELECT retrysafe_grant(%s::regrole, 'admin')", admin)
    db.sql("CREATE SCHEMA trap; GRANT ALL ON SCHEMA trap TO PUBLIC")
    db.sql("""CREATE FUNCTION trap.clock_timestamp() RETURNS timestamptz LANGUAGE plpgsql AS 'BEGIN RAISE ''trap''; END';
              CREATE FUNCTION trap.nextval(regclass) RETURNS bigint LANGUAGE plpgsql AS 'BEGIN RAISE ''trap''; END';
              CREATE TABLE trap.outbox_log_1 (); CREATE TABLE trap.ring_pieces ();""")
    fill(db, 1)
    session = db.connect(user=admin)
    run(session, "SET search_path = trap, pg_catalog, retrysafe")
    for _ in range(8):
        run(session, "SELECT retrysafe.outbox_cleanup()")
    assert copies(db, "e1") == 0
    assert run(session, "SELECT current_user") == [(admin,)]


# --- what is done to a piece ---


@pytest.mark.parametrize("parent", ["outbox_log", "idem_records", "outbox_windows", "outbox_batches"])
def test_a_column_more(db, parent):
    db.sql(f"ALTER TABLE {parent} ADD COLUMN note text, ADD COLUMN payload2 jsonb NOT NULL DEFAULT '{{}}'"
           ", ADD COLUMN two integer GENERATED ALWAYS AS (1 + 1) STORED")
    db.sql("SELECT outbox_create_destination('d', 'pull')")
    session = begin(db)
    assert save(session, "k") == "new"
    assert save(session, "k") == "replay"
    for _ in range(4):
        fill(db, 3)
        fetch_all(db, "d")
        settle(db, "log")
    fill(db, 3, "last")
    assert fetch_all(db, "d") == ["last1", "last2", "last3"]
    assert db.sql(f"SELECT DISTINCT note, payload2, two FROM {parent}") == [(None, {}, 2)]


def test_moving_an_index_waits_for_writers(db, tmp_path):
    writer = begin(db)
    for n in range(3):
        emit(writer, f"a{n}")
        writer.commit()  # knows the indexes now
    emit(writer, "b")
    admin = db.connect()
    run(admin, "SET lock_timeout = '100ms'")
    for index in ("outbox_log_pkey_1", "outbox_log_event_key_1", "outbox_log_txid_1"):
        assert sqlstate_of(run, admin, f"ALTER INDEX {index} SET TABLESPACE pg_default") == "55P03", index
    writer.commit()


def test_indexes_of_an_administrator(db):
    db.sql("CREATE FUNCTION first_letter(text) RETURNS text IMMUTABLE LANGUAGE sql AS 'SELECT left($1, 1)'")
    writer = begin(db)
    emit(writer, "before")
    writer.commit()
    for piece in 1, 2, 3:
        db.sql(f"CREATE INDEX ON outbox_log_{piece} (first_letter(event_key)) WHERE event_type = 't'")
        db.sql(f"CREATE INDEX ON outbox_log_{piece} USING gin (payload)")
        db.sql(f"CREATE INDEX ON outbox_log_{piece} USING brin (created_at)")
        db.sql(f"CREATE INDEX ON outbox_log_{piece} USING hash (event_key)")
        connection = db.connect()
        run(connection, f"CREATE INDEX CONCURRENTLY ON outbox_log_{piece} (created_at DESC) WHERE payload IS NOT NULL")
    for n in range(3):
        for key in "xyz":
            emit(writer, f"{key}{n}", f'{{"n": {n}}}')
        run(writer, "SELECT outbox_emit(NULL, %s, 'other', '{}'), outbox_emit(NULL, %s, 'other', NULL)", f"other{n}", f"none{n}")
        writer.commit()
        rotate(db, "log")
        settle(db, "log")
    emit(writer, "x9", '{"n": 9}')
    writer.commit()
    session = db.connect()
    run(session, "SET enable_seqscan = off")
    by_index = run(session, "SELECT event_key FROM outbox_log WHERE first_letter(event_key) = 'x' AND event_type = 't'")
    by_gin = run(session, "SELECT event_key FROM outbox_log WHERE payload @> '{\"n\": 9}'")
    assert ("x9",) in by_index and by_gin == [("x9",)]
    run(session, "RESET enable_seqscan; SET enable_indexscan = off; SET enable_bitmapscan = off")
    assert sorted(run(session, "SELECT event_key FROM outbox_log WHERE left(event_key, 1) = 'x'")) == sorted(by_index)
    for index in run(session, "SELECT indexrelid::regclass FROM pg_index i JOIN pg_class c ON c.oid = i.indexrelid "
                              "JOIN pg_am a ON a.oid = c.relam WHERE indrelid::regclass::text LIKE %s AND amname = 'btree'",
                     "outbox_log%"):
        run(session, "CREATE EXTENSION IF NOT EXISTS amcheck SCHEMA public")
        run(session, "SELECT public.bt_index_check(%s::regclass, true)", index[0])


@pytest.mark.parametrize("index", ["outbox_log_event_key_1", "idem_records_pkey_1"])
def test_an_index_that_is_being_replaced(db, index):
    """There are two of it then, and what the one knows of, the other need not complain about."""
    session = begin(db)
    save(session, "k")
    run(session, "SELECT idem_begin('k1', 'h'), outbox_emit('k1', 'e', 't', '{}'), idem_complete('k1')")
    session.commit()
    old = begin(db, "REPEATABLE READ")
    run(old, "SELECT 1")
    reindex = Pending(db, f"REINDEX INDEX CONCURRENTLY {index}")
    assert reindex.blocks()
    eventually(lambda: db.value(f"SELECT indisready FROM pg_index WHERE indexrelid = '{index}_ccnew'::regclass"))
    eventually(lambda: save(session, "k", "2") == "new")  # expired
    run(session, "SELECT idem_begin('k2', 'h')")
    assert sqlstate_of(run, session, "SELECT outbox_emit('k2', 'e', 't', '{}')") == "RS102"
    session.rollback()
    old.rollback()
    reindex.result()
    reindex.close()


def test_an_index_that_is_replaced_while_a_session_looks_it_up(db):
    old = begin(db, "REPEATABLE READ")
    run(old, "SELECT 1")
    named = "SELECT 'ring_pieces_pkey'::regclass::oid"
    index = db.value(named)
    reindex = Pending(db, "REINDEX INDEX CONCURRENTLY ring_pieces_pkey")
    eventually(lambda: db.value("SELECT phase FROM pg_stat_progress_create_index") == "waiting for old snapshots")
    with stopped_at(db, "extension.before_index", [["SELECT retrysafe.idem_forget('k')"]]) as (first_call,):
        old.rollback()
        eventually(lambda: db.value(named) != index)
    assert first_call.result() == [(False,)]
    reindex.result()
    reindex.close()


def test_a_reader_that_waits_for_a_rewrite_misses_nothing(db):
    """A table that is written anew looks empty to snapshots from before; whoever waited for its lock must not have such a one."""
    db.sql("SELECT outbox_create_destination('d', 'pull')")
    fill(db, 3)
    admin = db.connect(autocommit=False)
    run(admin, "ALTER TABLE outbox_log ADD COLUMN mark uuid DEFAULT gen_random_uuid()")
    reader = Pending(db, "SELECT event_key FROM outbox_fetch('d')")
    assert reader.blocks()
    admin.commit()
    assert reader.result() == [("e1",), ("e2",), ("e3",)]
    reader.close()


def test_triggers_of_an_administrator(db):
    """By triggers pg_repack, for one, learns what changes in a table while it copies it. What they tell is what is there."""
    db.sql("CREATE TABLE public.told (place text, row jsonb, change integer)")
    db.sql("""CREATE FUNCTION public.tell() RETURNS trigger LANGUAGE plpgsql AS $$BEGIN
                IF TG_OP <> 'INSERT' THEN INSERT INTO public.told VALUES (TG_TABLE_NAME, to_jsonb(OLD), -1); END IF;
                IF TG_OP <> 'DELETE' THEN INSERT INTO public.told VALUES (TG_TABLE_NAME, to_jsonb(NEW), 1); END IF;
                RETURN NULL; END$$""")
    tables = [table for table, in db.sql("""SELECT c.relname FROM pg_class c JOIN pg_depend d ON d.objid = c.oid
                                             WHERE d.classid = 'pg_class'::regclass AND d.deptype = 'e' AND c.relkind = 'r'""")]
    assert len(tables) > 16
    for table in tables:
        db.sql(f"CREATE TRIGGER tell AFTER INSERT OR UPDATE OR DELETE ON {table} FOR EACH ROW EXECUTE FUNCTION public.tell()")
    db.sql("ALTER TABLE outbox_log ADD COLUMN twice bigint, ADD COLUMN gone text; ALTER TABLE outbox_log DROP COLUMN gone")
    db.sql("SELECT outbox_create_destination('d', 'pull', shards => 2)")
    writer, other = begin(db), begin(db)
    assert save(writer, "k") == "new"
    eventually(lambda: save(writer, "k", "2") == "new")  # expired, in the same piece
    emit(writer, "a", '{"n": 1}')
    late = Pending(db, "SELECT outbox_emit(NULL, 'a', 't', '{\"n\": 1}')")
    assert late.blocks()
    writer.commit()
    assert late.result() == [(1,)]
    # Tried first, since whoever has just become the owner of a key is not expected to come again.
    emitting = "SELECT idem_begin(%s, 'h'), outbox_emit(%s, 'b', 't', '{}'), idem_complete(%s)"
    run(writer, emitting, "k1", "k1", "k1")
    writer.rollback()
    run(writer, emitting, "k1", "k1", "k1")
    writer.commit()
    run(other, "SELECT idem_begin('k2', 'h')")
    assert sqlstate_of(run, other, "SELECT outbox_emit('k2', 'b', 't', '{}')") == "RS102"
    other.rollback()
    run(writer, "SELECT idem_begin('n', 'h'), outbox_emit('n', NULL, 't', '{}'), outbox_emit('n', NULL, 't', '{}'), idem_complete('n')")
    writer.commit()
    assert sorted(fetch_all(db, "d")) == ["a", "b", "n~1", "n~2"]

    def untold(table):
        return db.sql(f"""SELECT * FROM (SELECT to_jsonb(t) AS row, count(*) FROM ONLY {table} t GROUP BY 1) AS there FULL JOIN
                             (SELECT row, sum(change) AS count FROM public.told WHERE place = %s GROUP BY row
                              HAVING sum(change) <> 0) AS told USING (row) WHERE there.count IS DISTINCT FROM told.count""", table)
    assert {table: untold(table) for table in tables if untold(table)} == {}
    assert db.value("SELECT count(*) FROM public.told WHERE place ~ '^(idem_records|outbox_(log|windows|batches))_1'") > 12
    for n in range(4):
        fill(db, 3, f"n{n}-")
        assert len(fetch_all(db, "d")) == 3
        settle(db)


@pytest.mark.parametrize("when", ["BEFORE", "AFTER"])
def test_a_trigger_of_an_administrator_for_each_statement(db, when):
    db.sql("CREATE TABLE public.told (operation text)")
    db.sql("""CREATE FUNCTION public.tell() RETURNS trigger LANGUAGE plpgsql AS $$BEGIN
                INSERT INTO public.told VALUES (TG_OP); RETURN NULL; END$$""")
    db.sql(f"CREATE TRIGGER tell {when} INSERT ON outbox_log_1 FOR EACH STATEMENT EXECUTE FUNCTION public.tell()")
    session = begin(db)
    emit(session, "a")
    emit(session, "b")
    session.commit()
    assert db.sql("SELECT * FROM public.told") == [("INSERT",)] * 2


@pytest.mark.parametrize("when, rule", [("BEFORE", ""), ("AFTER", "CREATE RULE refuse AS ON INSERT TO outbox_log_1 DO INSTEAD NOTHING")])
def test_a_trigger_or_rule_that_lets_no_event_pass(db, when, rule):
    db.sql("CREATE FUNCTION public.refuse() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN RETURN NULL; END'")
    db.sql(f"CREATE TRIGGER refuse {when} INSERT ON outbox_log_1 FOR EACH ROW EXECUTE FUNCTION public.refuse(); {rule}")
    session = begin(db)
    run(session, "SET statement_timeout = '10s'")
    assert sqlstate_of(emit, session, "a") == "RS109"
    session.rollback()
    numbered = "SELECT idem_begin('k', 'h'), outbox_emit('k', NULL, 't', '{}')"
    assert sqlstate_of(run, session, numbered) == "RS109"
    session.rollback()
    db.sql("DROP TRIGGER refuse ON outbox_log_1")
    assert emit(session, "a") > 1


@pytest.mark.parametrize("table, deed, statement", [
    ("outbox_scheduled", "INSERT", "SELECT outbox_emit(NULL, 'later', 't', '{{}}', deliver_after => now() + '1 day')"),
    ("outbox_shards", "INSERT", "SELECT outbox_create_destination('other', 'pull')"),
    ("outbox_shards", "UPDATE", "SELECT outbox_fetch('free')"),
    ("outbox_batches_1", "INSERT", "SELECT outbox_ack('{batch}')"),
    ("outbox_windows_1", "INSERT", "SELECT outbox_fetch('free')"),
    ("outbox_parked", "INSERT", "SELECT outbox_nack('{batch}', '{event}')")])
def test_what_is_refused_is_an_error(db, table, deed, statement):
    """And neither success, nor tried for ever, nor a crash."""
    db.sql("SELECT outbox_create_destination(n, 'pull') FROM unnest(ARRAY['d', 'free']) AS n")
    fill(db, 2)
    holder = db.connect()
    batch, event = run(holder, "SELECT batch, event_id FROM outbox_fetch('d')")[0]
    db.sql("CREATE FUNCTION public.refuse() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN RETURN NULL; END'")
    db.sql(f"CREATE TRIGGER refuse BEFORE {deed} ON {table} FOR EACH ROW EXECUTE FUNCTION public.refuse()")
    session = db.connect()
    run(session, "SET statement_timeout = '10s'")
    assert sqlstate_of(run, session, statement.format(batch=batch, event=event)) == "RS109"
    db.sql(f"DROP TRIGGER refuse ON {table}")
    assert run(holder, "SELECT outbox_ack(%s)", batch) == [(2,)]


@pytest.mark.parametrize("deed, call", [("INSERT", "SELECT outbox_create_destination('gone', 'pull')"),
                                        ("UPDATE", "SELECT outbox_alter_destination('gone', on_exhausted => 'block')"),
                                        ("UPDATE", "SELECT outbox_pause('gone')")])
def test_a_trigger_that_drops_the_destination(db, deed, call):
    if deed == "UPDATE":
        db.sql("SELECT outbox_create_destination('gone', 'pull')")
    db.sql("""CREATE FUNCTION public.drop_it() RETURNS trigger LANGUAGE plpgsql AS
                'BEGIN PERFORM retrysafe.outbox_drop_destination(NEW.name); RETURN NULL; END'""")
    db.sql(f"CREATE TRIGGER drop_it AFTER {deed} ON outbox_destinations FOR EACH ROW EXECUTE FUNCTION public.drop_it()")
    assert sqlstate_of(db.sql, call) == ("RS109" if deed == "INSERT" else None)
    assert emit(db.connect(), "still there") > 0


def test_a_trigger_that_changes_a_table_and_calls_again(db):
    """Statements are planned anew then, while the one that fired the trigger still runs."""
    db.sql("""CREATE FUNCTION public.again() RETURNS trigger LANGUAGE plpgsql AS $$BEGIN
                IF NEW.name ~ '^outer' THEN
                  ALTER TABLE retrysafe.idem_records_1 SET (fillfactor = 90);
                  PERFORM retrysafe.outbox_create_destination('inner-' || NEW.name, 'pull');
                  FOR i IN 1..20 LOOP EXECUTE format('SELECT %s, repeat(''y'', 300)', i); END LOOP;
                END IF;
                RETURN NULL; END$$""")
    db.sql("CREATE TRIGGER again AFTER INSERT ON outbox_destinations FOR EACH ROW EXECUTE FUNCTION public.again()")
    db.sql("SELECT outbox_create_destination('outer' || i, 'pull') FROM generate_series(1, 50) AS i")
    assert db.value("SELECT count(*) FROM outbox_destinations") == 100


@pytest.mark.parametrize("deed", ["VACUUM FULL outbox_log_1", "VACUUM (TRUNCATE) outbox_log_1", "TRUNCATE outbox_log_2", "ANALYZE outbox_log_1",
                                  "CLUSTER outbox_log_1 USING outbox_log_pkey_1", "REINDEX TABLE outbox_log_1",
                                  "REINDEX TABLE CONCURRENTLY outbox_log_1", "TRUNCATE outbox_log",
                                  "ALTER TABLE outbox_log_1 SET (fillfactor = 90)", "ALTER TABLE outbox_log_1 CLUSTER ON outbox_log_txid_1",
                                  "CREATE TABLE public.child () INHERITS (outbox_log)",
                                  "CREATE STATISTICS public.s ON event_type, ordering_key FROM outbox_log_1"])
def test_deeds_of_an_owner_on_a_piece(db, deed):
    writer = begin(db)
    emit(writer, "a")
    writer.commit()
    db.sql("SELECT outbox_create_destination('d', 'pull', start_at => 'earliest')")
    connection = db.connect()
    run(connection, deed)
    emit(writer, "b")
    emit(writer, "c")
    writer.commit()
    got = fetch_all(db, "d")
    assert got == (["b", "c"] if deed == "TRUNCATE outbox_log" else ["a", "b", "c"])
    for n in range(4):
        fill(db, 1, f"n{n}-")
        settle(db, "log")
        assert fetch_all(db, "d") == [f"n{n}-1"]
    for piece in 1, 2, 3:
        connection = db.connect()
        run(connection, "SET enable_seqscan = off")
        by_index = run(connection, f"SELECT count(*) FROM outbox_log_{piece} WHERE id > 0")
        run(connection, "SET enable_seqscan = on; SET enable_indexscan = off; SET enable_bitmapscan = off; SET enable_indexonlyscan = off")
        assert run(connection, f"SELECT count(*) FROM outbox_log_{piece} WHERE id > 0") == by_index


def test_a_publication_of_the_log_passes_what_is_inserted(server, db):
    """Logical decoding sees rows that were inserted without the executor, and those that were taken back as nothing."""
    if db.value("SHOW wal_level") != "logical":
        pytest.skip("needs wal_level = logical")
    db.sql(f"SELECT pg_create_logical_replication_slot('s_{db.name}', 'test_decoding')")
    try:
        db.sql("CREATE PUBLICATION p FOR TABLE outbox_log")
        session = begin(db)
        save(session, "k")
        emit(session, "a")
        session.commit()
        rotate(db, "log")
        fill(db, 1, "b")
        changes = [data for data, in db.sql(f"SELECT data FROM pg_logical_slot_get_changes('s_{db.name}', NULL, NULL)")]
        inserted = [c for c in changes if "INSERT" in c and "outbox_log_" in c]
        assert len(inserted) == 2 and "'a'" in inserted[0] and "'b1'" in inserted[1]
    finally:
        db.sql(f"SELECT pg_drop_replication_slot('s_{db.name}')")


def test_an_index_that_is_not_valid_yet_is_none(db):
    """Rows are missing from it; a reader that went by it would pass over them."""
    db.sql("SELECT outbox_create_destination('d', 'pull')")
    fill(db, 2)
    holder, writer = begin(db), begin(db)
    db.sql("ALTER TABLE outbox_log_1 DROP CONSTRAINT outbox_log_pkey_1")
    run(holder, "LOCK outbox_log_1 IN ROW EXCLUSIVE MODE")
    build = Pending(db, "CREATE UNIQUE INDEX CONCURRENTLY outbox_log_pkey_1 ON retrysafe.outbox_log_1 (id)")
    assert build.blocks()
    with pytest.raises(psycopg2.Error) as error:
        emit(writer, "refused")
    assert error.value.pgcode == "RS301" and "outbox_log_pkey_1" in error.value.diag.message_primary
    writer.rollback()
    holder.rollback()
    build.result()
    emit(writer, "a")
    writer.commit()
    assert fetch_all(db, "d") == ["e1", "e2", "a"]


def test_more_indexes_than_are_remembered(db):
    db.sql("SELECT outbox_create_destination('d', 'pull')")
    for table in "outbox_log_1", "idem_records_1":
        for _ in range(9):
            db.sql(f"CREATE INDEX ON {table} (txid)")
    writer = begin(db)
    assert save(writer, "k") == "new"
    emit(writer, "a")
    assert emit(writer, "a") == 1
    writer.commit()
    assert fetch_all(db, "d") == ["a"]
    assert db.value("SELECT count(*) FROM idempotency_records WHERE key = 'k'") == 1


def test_an_extension_that_was_made_anew_in_the_same_transaction(db):
    """Its positions begin again, and its destinations have what is written from then on."""
    fill(db, 5, "old")
    session = begin(db)
    emit(session, "old")
    run(session, "DROP EXTENSION retrysafe; CREATE EXTENSION retrysafe SCHEMA retrysafe")
    emit(session, "new")
    run(session, "SELECT outbox_create_destination('d', 'pull')")
    session.commit()
    assert fetch_all(db, "d") == ["new"]


def test_a_batch_of_an_extension_that_was_dropped(db):
    """Everything in its name comes again in the new one, but for the ids of its events."""
    def fetch():
        db.sql("SELECT outbox_create_destination('d', 'pull')")
        fill(db)
        return run(holder, "SELECT batch FROM outbox_fetch('d')")[0][0]
    holder = db.connect()
    old = fetch()
    db.sql("DROP EXTENSION retrysafe; CREATE EXTENSION retrysafe SCHEMA retrysafe")
    new = fetch()
    assert old.split(".")[3:6] == new.split(".")[3:6]
    assert sqlstate_of(run, holder, "SELECT outbox_ack(%s)", old) == "RS210"
    assert run(holder, "SELECT outbox_ack(%s)", new) == [(1,)]


def test_a_batch_of_parked_events_of_an_extension_that_was_dropped(db):
    """And it does not take the lease away from who has it."""
    def fetch():
        db.sql("SELECT outbox_create_destination('d', 'pull')")
        fill(db)
        ((batch, event),) = run(holder, "SELECT batch, event_id FROM outbox_fetch('d')")
        run(holder, "SELECT outbox_nack(%s, %s, 'later', '0 s')", batch, event)
        run(holder, "SELECT outbox_ack(%s)", batch)
        return run(holder, "SELECT batch, event_id FROM outbox_fetch('d')")[0]
    holder = db.connect()
    old, event = fetch()
    db.sql("DROP EXTENSION retrysafe; CREATE EXTENSION retrysafe SCHEMA retrysafe")
    new, other = fetch()
    assert event != other
    for call in ("outbox_ack(%s)", "outbox_record(%s)", "outbox_renew(%s)", "outbox_release(%s)"):
        assert sqlstate_of(db.sql, f"SELECT {call}", old) == "RS210"
    assert sqlstate_of(db.sql, "SELECT outbox_nack(%s, %s)", old, other) == "RS210"
    assert run(holder, "SELECT outbox_ack(%s)", new) == [(1,)]


def test_the_extension_goes_while_a_ring_turns(db):
    """Whoever turns, inserts or reads then fails, or works in the new one; nobody crashes."""
    fill(db, 1)
    stop = threading.Event()
    states_seen = set()

    def busy(statement):
        connection = db.connect()
        while not stop.is_set():
            try:
                run(connection, statement)
                states_seen.add("done")
            except psycopg2.Error as error:
                states_seen.add(error.pgcode)

    threads = [threading.Thread(target=busy, args=(statement,)) for statement in (
        "SELECT retrysafe.outbox_cleanup()", "SELECT retrysafe.idem_cleanup()",
        "SELECT retrysafe.outbox_emit(NULL, gen_random_uuid()::text, 't', '{}')", "SELECT * FROM retrysafe.ring_status",
        "SELECT retrysafe.idem_run(gen_random_uuid()::text, '{}', 'public.handler(jsonb)')")]
    db.sql("CREATE FUNCTION public.handler(jsonb) RETURNS jsonb LANGUAGE sql AS 'SELECT $1'")
    for thread in threads:
        thread.start()
    try:
        for _ in range(4):
            done = sqlstate_of(db.sql, "DROP EXTENSION retrysafe")
            assert done in (None, "40P01")
            if not done:
                db.sql("CREATE EXTENSION retrysafe SCHEMA retrysafe")
            fill(db, 1)
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    # 42883 and 42P01: it was not there; XX000: it went away under a statement that had begun.
    assert states_seen <= {"done", "RS301", "42883", "42P01", "40P01", "XX000", "42704", "3F000"}, states_seen
    fill(db, 1, "after")
    db.sql("SELECT outbox_create_destination('d', 'pull')")
    fill(db, 1, "last")
    assert fetch_all(db, "d") == ["last1"]
