"""Copies of a database do not publish by themselves, and consent loses nothing and repeats nothing."""
import contextlib
import json
import subprocess

import psycopg2
import pytest

from conftest import Database, Pending, Server, eventually, make_database, run
from copies import Copy, as_postgres, copy_of, folder  # noqa: F401 (fixtures)
from receiver import Receiver
from relay_process import Relay
from workers import let_look


def emit(db, *keys, type="t", ordering_key=None):
    for key in keys:
        db.sql("SELECT outbox_emit(NULL, %s, %s, '{}', %s)", key, type, ordering_key)


def ids(db):
    return dict(db.sql("SELECT event_key, outbox_event_id(event_key, scope) FROM outbox_log"))


def drain(db, destination="d", max_events=100, batches=1000):
    """Event keys and ids in order of delivery."""
    delivered = []
    for _ in range(batches):
        rows = db.sql("SELECT batch, event_key, event_id FROM outbox_fetch(%s, %s)", destination, max_events)
        if not rows:
            break
        delivered += [row[1:] for row in rows]
        db.sql("SELECT outbox_ack(%s)", rows[0][0])
    return delivered


def keys(delivered):
    return [key for key, _ in delivered]


def reason(db):
    return db.value("SELECT outbox_suspended_reason()")


def refused(db, sqlstate, query, *parameters):
    with pytest.raises(psycopg2.Error) as error:
        db.sql(query, *parameters)
    assert error.value.pgcode == sqlstate
    return error.value


@pytest.fixture
def clone(server, db):
    """Makes CREATE DATABASE … TEMPLATE clones of `db`."""
    made = []

    def make():
        name = f"{db.name}_clone{len(made)}"
        admin = server.connect()
        run(admin, f'CREATE DATABASE "{name}" TEMPLATE "{db.name}"')
        run(admin, f'ALTER DATABASE "{name}" SET search_path = retrysafe, public')
        admin.close()
        made.append(Database(server, name))
        return made[-1]

    yield make
    admin = server.connect()
    for database in made:
        run(admin, f'DROP DATABASE "{database.name}" WITH (FORCE)')
    admin.close()


def test_a_clone_is_suspended_until_consent(db, clone):
    db.sql("SELECT outbox_create_destination('d', 'pull')")
    emit(db, "a")
    copy = clone()
    assert reason(db) is None
    assert "clone" in reason(copy)
    refused(copy, "RS213", "SELECT outbox_create_destination('e', 'pull')")
    copy.sql("SELECT outbox_consent('same')")
    assert reason(copy) is None
    assert ids(copy) == ids(db)
    refused(copy, "RS215", "SELECT outbox_consent('same')")


def test_a_fork_gives_new_ids(db, clone):
    db.sql("SELECT outbox_create_destination('d', 'pull')")
    emit(db, "a")
    copy = clone()
    copy.sql("SELECT outbox_consent('fork')")
    assert reason(copy) is None
    assert ids(copy).keys() == ids(db).keys() and ids(copy) != ids(db)
    # A file-system copy cannot be told from its original; the operator forks it nevertheless.
    before = ids(db)
    db.sql("SELECT outbox_consent('fork')")
    assert ids(db) != before
    # PL/pgSQL keeps a function's state from one statement to the next.
    db.sql("""DO $$DECLARE one uuid; two uuid; BEGIN
                FOR i IN 1..2 LOOP
                  one := two; two := outbox_event_id('a', '');
                  PERFORM outbox_consent('fork');
                END LOOP;
                ASSERT one <> two; END$$""")


class History:
    """A log in all states that a copy can find it in: delivered, half a window, parked, dead, delayed, committed out of
    order, rolled back. Beside it answers, and what a consumer has seen."""

    def __init__(self, db):
        db.sql("SELECT outbox_create_destination('d', 'pull', start_at => 'earliest')")
        db.sql("SELECT outbox_create_destination('sharded', 'pull', shards => 3)")
        db.sql("CREATE FUNCTION public.handle(jsonb) RETURNS jsonb LANGUAGE sql AS 'SELECT $1'")
        db.sql("SELECT idem_run('request', '{\"n\": 1}', 'public.handle(jsonb)')")
        db.sql("SELECT inbox_accept('consumer', 'seen')")
        emit(db, "dead", "retry", ordering_key="parked")
        for key, arguments in (("dead", "dead => true"), ("retry", "retry_after => '0'")):
            batch, event_id = db.sql("SELECT batch, event_id FROM outbox_fetch('d', 1)")[0]
            db.sql(f"SELECT outbox_nack(%s, %s, reason => 'no', {arguments})", batch, event_id)
            db.sql("SELECT outbox_ack(%s)", batch)
        late = db.connect(autocommit=False)
        run(late, "SELECT outbox_emit(NULL, 'late', 't', '{}')")
        emit(db, *(f"done{i}" for i in range(5)), ordering_key="k")
        rolled_back = db.connect(autocommit=False)
        run(rolled_back, "SELECT outbox_emit(NULL, 'rolled back', 't', '{}')")
        self.done = drain(db, max_events=2, batches=4) + drain(db, max_events=100, batches=1)
        late.commit()
        emit(db, *(f"half{i}" for i in range(6)))
        self.done += drain(db, max_events=2, batches=2)
        emit(db, "fresh")
        rolled_back.rollback()
        db.close()  # a template must have no sessions
        db.sql("SELECT outbox_emit(NULL, 'delayed', 't', '{}', deliver_after => now() + '1 day')")
        self.all = {"retry", "late", "fresh"} | {f"done{i}" for i in range(5)} | {f"half{i}" for i in range(6)}
        self.ids = ids(db)

    def check(self, copy, consent, *originals):
        """The copy delivers what is due, once, and nothing that was done."""
        for database in (copy, *originals):
            assert database.sql("SELECT outcome, response FROM idem_begin('request', idem_hash('{\"n\": 1}'))") == [("replay", {"n": 1})]
            assert database.value("SELECT inbox_accept('consumer', 'seen')") is False
        assert copy.sql("SELECT state FROM outbox_status") == [("suspended",)] * 2
        refused(copy, "RS213", "SELECT * FROM outbox_fetch('d')")
        emit(copy, "emitted while suspended")
        copy.sql("SELECT outbox_consent(%s)", consent)
        emit(copy, "new")
        positions = dict(copy.sql("SELECT event_key, id FROM outbox_log"))
        assert len(set(positions.values())) == len(positions)
        assert max(positions[key] for key in self.ids) < positions["emitted while suspended"] < positions["new"]
        assert sorted(keys(drain(copy, "sharded"))) == sorted(ids(copy))
        first = drain(copy, max_events=1, batches=2)
        unsent = {key for key, in copy.sql("SELECT event_key FROM outbox_events WHERE sent_at IS NULL")}
        rest = first + drain(copy)
        expected = (self.all | {"emitted while suspended", "new"}) - set(keys(self.done))
        assert sorted(keys(rest)) == sorted(expected)
        assert unsent == (expected | {"dead"}) - set(keys(first))
        wanted = ids(copy)
        assert all(wanted[key] == event_id for key, event_id in rest)
        if consent == "same":
            assert wanted.items() >= self.ids.items()
        else:
            assert not set(wanted.values()) & set(self.ids.values())
        assert copy.sql("SELECT event_key FROM outbox_dead_letters") == [("dead",)]
        copy.sql("SELECT outbox_retry('d')")
        assert keys(drain(copy)) == ["dead"]
        assert copy.value("SELECT outbox_cancel('delayed')") is True
        assert drain(copy) == drain(copy, "sharded") == []
        late = copy.connect(autocommit=False)
        run(late, "SELECT outbox_emit(NULL, 'late in the new era', 't', '{}')")
        emit(copy, "last")
        assert keys(drain(copy)) == ["last"]
        late.commit()
        assert keys(drain(copy)) == ["late in the new era"]
        assert sorted(keys(drain(copy, "sharded"))) == ["last", "late in the new era"]
        assert copy.sql("SELECT event_key FROM outbox_events WHERE sent_at IS NULL") == []


@pytest.mark.parametrize("consent", ["same", "fork"])
def test_a_clone_delivers_what_is_due_and_no_more(db, clone, consent):
    history = History(db)
    history.check(clone(), consent, db)
    # The original goes on as if nothing had happened.
    assert sorted(keys(drain(db))) == sorted(history.all - set(keys(history.done)))


def test_eras_may_follow_each_other_before_anything_is_read(db, clone):
    history = History(db)
    copy = clone()
    copy.sql("SELECT outbox_consent('same')")
    copy.sql("SELECT outbox_consent('fork')")
    emit(copy, "between")
    delivered = drain(copy, max_events=2, batches=1)
    copy.sql("SELECT outbox_consent('fork')")
    delivered += drain(copy)
    assert sorted(keys(delivered)) == sorted((history.all | {"between"}) - set(keys(history.done)))
    emit(copy, "last")
    assert keys(drain(copy)) == ["last"]


def test_positions_of_a_new_era_are_above_all_old_ones(db, clone):
    """Also where the rows of the log are gone, and a restore has left the sequence behind."""
    db.sql("SELECT outbox_create_destination('d', 'pull')")
    emit(db, *(f"k{i}" for i in range(10)))
    assert len(drain(db)) == 10
    db.sql("DELETE FROM outbox_log")
    db.sql("SELECT setval('outbox_log_id_seq', 1, false)")
    copy = clone()
    copy.sql("SELECT outbox_consent('same')")
    emit(copy, "new")
    assert keys(drain(copy)) == ["new"]
    assert copy.value("SELECT id FROM outbox_events") > 10


def test_the_worker_of_a_clone_publishes_after_consent_only(server, db, clone):
    with Receiver() as receiver:
        db.sql("SELECT outbox_create_destination('hook', 'http', %s)", json.dumps({"url": receiver.url}))
        db.sql("SELECT outbox_pause('hook')")
        emit(db, "a")
        copy = clone()
        copy.sql("SELECT outbox_resume('hook')")
        db.sql("SELECT outbox_resume('hook')")
        eventually(lambda: len(receiver.requests) == 1)
        workers = "SELECT count(*) FROM pg_stat_activity WHERE backend_type = 'retrysafe worker' AND datname = %s"
        eventually(lambda: copy.value(workers, copy.name) >= 1)
        assert copy.sql("SELECT state, backlog FROM outbox_status") == [("suspended", 1)]
        # The original's worker has gone through a turn since the clone's one is there: that one would have sent, too.
        emit(db, "b")
        eventually(lambda: len(receiver.requests) == 2)
        copy.sql("SELECT outbox_consent('fork')")
        eventually(lambda: len(receiver.requests) == 3)
        sent = [request.header("ce-id") for request in receiver.requests]
        assert sent == [*map(str, (ids(db)["a"], ids(db)["b"], ids(copy)["a"]))]


def test_the_relay_of_a_clone_publishes_after_consent_only(db, clone):
    """Neither one that is to publish what there is, nor one that stays and asks again."""
    arguments = "--allowed-addresses", "127.0.0.1", "hook"

    def refusal(relay):
        return [(line["sqlstate"], line["reason"]) for line in relay.lines("could not fetch events")]
    with Receiver() as receiver:
        db.sql("SELECT outbox_create_destination('hook', 'http', %s, workers => false)", json.dumps({"url": receiver.url}))
        emit(db, "a")
        copy = clone()
        emit(copy, "b")
        with Relay(copy, "--drain", *arguments) as relay:
            assert relay.wait() == 3
            assert refusal(relay) == [("RS213", "publishing is suspended (See outbox_consent.)")]
        with Relay(copy, *arguments) as relay:
            assert eventually(lambda: refusal(relay), message=relay.log)[0][0] == "RS213"
            assert copy.sql("SELECT state, backlog, delivered FROM outbox_status") == [("suspended", 2, 0)]
            assert receiver.requests == []
            copy.sql("SELECT outbox_consent('fork')")
            eventually(lambda: copy.value("SELECT delivered FROM outbox_status") == 2, message=relay.log)
            assert relay.stop() == 0
        with Relay(db, "--drain", *arguments) as relay:
            assert relay.wait() == 0, relay.log()
        assert sorted(receiver.ids) == sorted(map(str, [*ids(copy).values(), *ids(db).values()]))


def test_a_database_that_never_published_needs_no_consent(db, clone):
    copy = clone()
    assert reason(copy) is None
    refused(copy, "RS215", "SELECT outbox_consent('same')")
    copy.sql("SELECT outbox_create_destination('d', 'pull')")


def test_consent_needs_a_decision(db):
    db.sql("SELECT outbox_create_destination('d', 'pull')")
    refused(db, "RS214", "SELECT outbox_consent(NULL)")
    refused(db, "RS214", "SELECT outbox_consent('yes')")
    refused(db, "RS215", "SELECT outbox_consent('same')")
    session = db.connect()
    session.set_session(isolation_level="REPEATABLE READ")
    with pytest.raises(psycopg2.Error) as error:
        run(session, "SELECT outbox_consent('fork')")
    assert error.value.pgcode == "RS207"


def test_consent_waits_for_those_who_write_events(db):
    db.sql("SELECT outbox_create_destination('d', 'pull')")
    writer = db.connect(autocommit=False)
    run(writer, "SELECT outbox_emit(NULL, 'open', 't', '{}')")
    consent = Pending(db, "SELECT outbox_consent('fork')")
    assert consent.blocks()
    late = Pending(db, "SELECT outbox_emit(NULL, 'late', 't', '{}')")
    numbered = Pending(db, "BEGIN", "SELECT idem_begin('k', 'h')", "SELECT outbox_emit('k', NULL, 't', '{}')")
    assert late.blocks() and numbered.blocks()
    writer.commit()
    consent.result()
    late.result()
    first = db.value("SELECT max(first_id) FROM outbox_eras")
    assert numbered.result()[0][0] > first
    numbered.close()
    assert db.value("SELECT id FROM outbox_log WHERE event_key = 'open'") < first
    assert db.value("SELECT id FROM outbox_log WHERE event_key = 'late'") > first


def test_consent_waits_for_a_prepared_writer(db):
    db.sql("SELECT outbox_create_destination('d', 'pull')")
    writer = db.connect()
    run(writer, "BEGIN")
    run(writer, "SELECT outbox_emit(NULL, 'prepared', 't', '{}')")
    run(writer, f"PREPARE TRANSACTION '{db.name}'")
    consent = Pending(db, "SELECT outbox_consent('fork')")
    assert consent.blocks()
    run(writer, f"COMMIT PREPARED '{db.name}'")
    consent.result()
    assert db.value("SELECT id FROM outbox_log") < db.value("SELECT max(first_id) FROM outbox_eras")


def test_a_setting_stops_publishing(server, db):
    db.sql("SELECT outbox_create_destination('d', 'pull')")
    server.set("retrysafe.publish", "off")
    try:
        connection = db.connect()
        while not (why := run(connection, "SELECT outbox_suspended_reason()")[0][0]):
            pass  # until the reload has reached this session
        assert "retrysafe.publish" in why
    finally:
        server.set("retrysafe.publish", None)


# --- other clusters -----------------------------------------------------------------------------------------


@pytest.fixture
def other(folder):
    cluster = Server(folder / "other")
    yield cluster
    cluster.stop()


def empty_database(server):
    admin = server.connect()
    run(admin, "CREATE DATABASE restored")
    run(admin, "ALTER DATABASE restored SET search_path = retrysafe, public")
    admin.close()
    return Database(server, "restored")


def drop(database):
    database.close()
    admin = database.server.connect()
    run(admin, f'DROP DATABASE "{database.name}" WITH (FORCE)')
    admin.close()


def grow_old(db, transactions=3000):
    """By more than a restore of our dumps takes."""
    db.sql(f"DO $$ BEGIN FOR i IN 1..{transactions} LOOP PERFORM pg_current_xact_id(); COMMIT; END LOOP; END $$")


def is_younger(restored):
    """Every transaction id that came with the dump is one of the future there."""
    return restored.value("SELECT pg_current_xact_id() < (SELECT min(txid) FROM outbox_log)")


@pytest.mark.parametrize("format, consent", [("plain", "same"), ("custom", "same"), ("custom", "fork"), ("directory", "same")])
def test_a_restored_dump_delivers_what_is_due_and_no_more(server, other, folder, db, format, consent):
    grow_old(db)
    history = History(db)
    to_folder = [f"--file={folder / 'dump'}"] if format == "directory" else []
    dump = as_postgres(server.bindir() / "pg_dump", f"--format={format}", *to_folder, server.dsn(db.name))
    restored = empty_database(other)
    if format == "plain":
        as_postgres(server.bindir() / "psql", "-X", "-q", "-v", "ON_ERROR_STOP=1", other.dsn("restored"), stdin=dump)
    elif format == "directory":  # in parallel, in any order
        as_postgres(server.bindir() / "pg_restore", "--exit-on-error", "--jobs=4", "-d", other.dsn("restored"),
                    folder / "dump")
    else:
        as_postgres(server.bindir() / "pg_restore", "--exit-on-error", "-d", other.dsn("restored"), stdin=dump)
    assert is_younger(restored)
    assert "restored" in reason(restored)
    assert ids(restored) == ids(db)
    history.check(restored, consent, db)


def test_a_dump_restored_over_its_own_database_is_suspended(server, db, folder):
    """Numbers of transactions mean the same there, but a reader must not look at tables that are half loaded."""
    history = History(db)
    dump = folder / "dump"
    as_postgres(server.bindir() / "pg_dump", "--format=directory", f"--file={dump}", server.dsn(db.name))
    as_postgres(server.bindir() / "pg_restore", "--exit-on-error", "--clean", "--jobs=4", "-d", server.dsn(db.name), dump)
    assert "dump" in reason(db)
    history.check(db, "same")


@pytest.mark.parametrize("direction", ["older", "younger"])
def test_transaction_ids_of_another_cluster_mean_nothing(server, other, db, direction):
    """A dump goes to a cluster whose transaction ids are far behind, or far ahead."""
    if direction == "younger":
        grow_old(db)
    else:  # than a server that other tests have used
        grow_old(Database(other, "postgres"), 3000 + db.value("SELECT pg_current_xact_id()::text::int"))
    history = History(db)
    dump = as_postgres(server.bindir() / "pg_dump", server.dsn(db.name))
    restored = empty_database(other)
    as_postgres(server.bindir() / "psql", "-X", "-q", "-v", "ON_ERROR_STOP=1", other.dsn("restored"), stdin=dump)
    assert is_younger(restored) == (direction == "younger")
    history.check(restored, "same")


@pytest.mark.parametrize("how", ["plain dump", "custom dump", "base backup"])
def test_the_worker_of_a_copy_publishes_after_consent_only(server, other, copy_of, db, how):
    with Receiver() as receiver:
        db.sql("SELECT outbox_create_destination('hook', 'http', %s)", json.dumps({"url": receiver.url}))
        db.sql("SELECT outbox_pause('hook')")
        emit(db, "a")
        if how == "base backup":
            copy = Database(copy_of(), db.name)
        else:
            copy = empty_database(other)
            dump = as_postgres(server.bindir() / "pg_dump", f"--format={how.split()[0]}", server.dsn(db.name))
            program = ("psql", "-X", "-q") if how == "plain dump" else ("pg_restore",)
            as_postgres(server.bindir() / program[0], *program[1:], "-d", other.dsn("restored"), stdin=dump)
        copy.sql("SELECT outbox_resume('hook')")
        eventually(lambda: copy.value("SELECT state FROM outbox_workers WHERE database = current_database()") == "suspended")
        let_look(copy, "hook")
        assert receiver.requests == []
        copy.sql("SELECT outbox_consent('same')")
        eventually(lambda: len(receiver.requests) == 1)
        assert receiver.ids == [str(ids(db)["a"])]


@pytest.mark.parametrize("direction", ["older", "younger"])
def test_a_dump_goes_over_epochs_of_transaction_ids(server, other, direction):
    """To a cluster whose transaction ids are billions behind, or ahead."""
    other.pg_ctl("stop", "-m", "fast")
    as_postgres(server.bindir() / "pg_resetwal", "-e", "3", "-D", other.directory / "data")
    other.pg_ctl("start")
    old, young = (server, other) if direction == "older" else (other, server)
    original = make_database(old)
    history = History(original)
    dump = as_postgres(server.bindir() / "pg_dump", old.dsn(original.name))
    restored = empty_database(young)
    try:
        as_postgres(server.bindir() / "psql", "-X", "-q", "-v", "ON_ERROR_STOP=1", young.dsn(restored.name), stdin=dump)
        history.check(restored, "same")
    finally:
        drop(original), drop(restored)


@pytest.mark.parametrize("encoding, letter", [("LATIN1", "é"), ("EUC_JP", "あ")])
def test_a_dump_goes_to_another_encoding(server, other, encoding, letter):
    """Texts become other bytes, and stay what they were: the ids of events, the shards of ordering keys, the keys of requests."""
    db = make_database(server, options=f"ENCODING '{encoding}' LOCALE 'C' TEMPLATE template0")
    db.sql("SELECT outbox_create_destination('d', 'pull', shards => 4)")
    db.sql("CREATE FUNCTION public.handle(jsonb) RETURNS jsonb LANGUAGE sql AS 'SELECT $1'")
    db.sql("SELECT idem_run(%s, %s, 'public.handle(jsonb)')", f"k{letter}", f'{{"{letter}": 1}}')
    numbers = range(40)
    for n in numbers:
        emit(db, f"{letter}{n}", ordering_key=f"{letter}{n % 20}")
    drain(db, max_events=3, batches=2)
    batch, event_id = db.sql("SELECT batch, event_id FROM outbox_fetch('d', 3)")[0]
    db.sql("SELECT outbox_nack(%s, %s, retry_after => '0')", batch, event_id)  # and the next one of its ordering key waits
    db.sql("SELECT outbox_ack(%s)", batch)
    original, before = ids(db), dict(db.sql("SELECT event_key, sent_at IS NOT NULL FROM outbox_events"))
    done = [k for k, sent in before.items() if sent]
    assert done and len(done) < len(numbers)
    dump = as_postgres(server.bindir() / "pg_dump", server.dsn(db.name))
    restored = empty_database(other)
    as_postgres(server.bindir() / "psql", "-X", "-q", "-v", "ON_ERROR_STOP=1", other.dsn("restored"), stdin=dump)
    restored.sql("SELECT outbox_consent('same')")
    assert ids(restored) == original
    rest = keys(drain(restored))
    assert sorted(done + rest) == sorted(original)
    for n in range(20):  # what waits goes before what comes after it
        first, second = f"{letter}{n}", f"{letter}{n + 20}"
        assert second in done or first in done or rest.index(first) < rest.index(second)
    assert restored.sql("SELECT outcome FROM idem_begin(%s, idem_hash(%s))", f"k{letter}", f'{{"{letter}": 1}}') == [("replay",)]
    drop(db)


def test_a_dump_of_the_schema_alone_is_a_log_of_its_own(server, other, db):
    """Nothing of the original is in it, so nothing of it is published or replayed, and no consent is due."""
    History(db)
    original = ids(db)
    dump = as_postgres(server.bindir() / "pg_dump", "--schema-only", server.dsn(db.name))
    restored = empty_database(other)
    as_postgres(server.bindir() / "psql", "-X", "-q", "-v", "ON_ERROR_STOP=1", other.dsn("restored"), stdin=dump)
    assert reason(restored) is None
    assert restored.sql("SELECT name FROM outbox_status") == restored.sql("SELECT id FROM outbox_events") == []
    assert restored.sql("SELECT ring FROM ring_status") == []
    assert restored.value("SELECT idem_run('request', '{\"n\": 2}', 'public.handle(jsonb)')") == {"n": 2}
    assert restored.value("SELECT inbox_accept('consumer', 'seen')") is True
    restored.sql("SELECT outbox_create_destination('d', 'pull')")
    emit(restored, "done0", "fresh")
    assert keys(drain(restored)) == ["done0", "fresh"]
    assert not set(ids(restored).values()) & set(original.values())


@pytest.mark.parametrize("consent", ["same", "fork"])
def test_a_base_backup_delivers_what_is_due_and_no_more(db, copy_of, consent):
    history = History(db)
    history.check(Database(copy_of(), db.name), consent, db)


def test_a_server_started_from_a_base_backup_is_suspended(db, copy_of):
    db.sql("SELECT outbox_create_destination('d', 'pull')")
    emit(db, "a")
    server = copy_of()
    copy = Database(server, db.name)
    assert "backup" in reason(copy)
    server.pg_ctl("restart", "-m", "immediate")
    assert "backup" in reason(copy), "the mark outlives the files that it was made for"
    copy.sql("SELECT outbox_consent('same')")
    assert reason(copy) is None
    server.pg_ctl("restart", "-m", "fast")
    assert reason(copy) is None
    assert reason(db) is None


def test_a_server_that_cannot_keep_the_mark_does_not_start(server, db, folder):
    """Nothing else would tell, after recovery, that it is a copy."""
    db.sql("SELECT outbox_create_destination('d', 'pull')")
    copy = Copy(server, folder / "copy")
    in_the_way = copy.directory / "data/retrysafe_restore_mark.new"
    in_the_way.mkdir()
    with pytest.raises(subprocess.CalledProcessError):
        copy.start()
    assert 'could not write file "retrysafe_restore_mark"' in copy.log()
    assert "would publish events a second time" in copy.log()
    in_the_way.rmdir()
    copy.pg_ctl("start")
    try:
        assert "backup" in reason(Database(copy, db.name))
    finally:
        copy.stop()


def test_point_in_time_recovery_is_suspended_until_consent(db, copy_of):
    db.sql("SELECT outbox_create_destination('d', 'pull')")
    copy = Database(copy_of("recovery.signal", restore_command="false"), db.name)
    assert "backup" in reason(copy)
    eventually(lambda: not copy.value("SELECT pg_is_in_recovery()"))
    assert "backup" in reason(copy)
    copy.sql("SELECT outbox_consent('fork')")
    assert reason(copy) is None


def test_a_standby_reads_across_turns_of_the_rings(server, db, copy_of):
    """In sessions that knew the rings before, and in a snapshot from before a piece was emptied."""
    server.set("retrysafe.workers_per_database", "0")
    server.set("retrysafe.outbox_retention", "0")
    server.set("retrysafe.idem_rotation_age", "1s")
    try:
        eventually(lambda: db.value("SHOW retrysafe.idem_rotation_age") == "1s")
        db.sql("SELECT outbox_create_destination('d', 'pull')")
        db.sql("CREATE FUNCTION public.handler(jsonb) RETURNS jsonb LANGUAGE sql AS 'SELECT $1'")

        def save(key):
            db.sql("SELECT idem_run(%s, '{}', 'public.handler(jsonb)')", key)
        save("k1")
        emit(db, "a")
        standby = copy_of("standby.signal", primary_conninfo=server.dsn().replace("'", ""), hot_standby_feedback="off")
        copy = Database(standby, db.name)

        def peek(connection, key):
            return run(connection, "SELECT outcome FROM idem_peek(%s, idem_hash('{}'))", key)[0][0]
        session, old = copy.connect(), copy.connect(autocommit=False)
        assert peek(session, "k1") == "replay"
        old.set_session(isolation_level="REPEATABLE READ")
        assert run(old, "SELECT event_key FROM outbox_events") == [("a",)]
        for n in range(2, 4):
            eventually(lambda: db.sql("SELECT idem_cleanup()") and
                       db.value("SELECT count(*) FROM ring_pieces WHERE ring = 'records'") == n)
            save(f"k{n}")
            eventually(lambda: peek(session, f"k{n}") == "replay")
            assert peek(session, "k1") == "replay"
        eventually(lambda: [drain(db), db.value("SELECT outbox_cleanup()")] and db.value("SELECT count(*) FROM outbox_log") == 0)
        with contextlib.suppress(psycopg2.Error):  # emptied under it; cancelled, where it holds replay up for too long
            run(old, "SELECT count(*) FROM outbox_events, pg_sleep(0)")
        old.close()
        emit(db, "b")
        eventually(lambda: run(session, "SELECT event_key FROM outbox_events") == [("b",)], timeout=60)
        standby.pg_ctl("promote")
        eventually(lambda: not copy.value("SELECT pg_is_in_recovery()"))
        assert keys(drain(copy)) == ["b"]
        copy.sql("SELECT idem_run('k2', '{}', 'public.handler(jsonb)')")
        emit(copy, "c")
        assert keys(drain(copy)) == ["c"]
    finally:
        for name in ("workers_per_database", "outbox_retention", "idem_rotation_age"):
            server.set(f"retrysafe.{name}", None)


def test_a_promoted_standby_publishes_unless_told_otherwise(server, db, copy_of):
    db.sql("SELECT outbox_create_destination('d', 'pull')")
    emit(db, "a")
    drain(db)
    standby = copy_of("standby.signal", primary_conninfo=server.dsn().replace("'", ""))
    copy = Database(standby, db.name)
    assert reason(copy) is None
    refused(copy, "25006", "SELECT outbox_consent('fork')")
    assert copy.sql("SELECT name, backlog FROM outbox_status") == [("d", 0)]
    assert copy.sql("SELECT event_key, sent_at IS NOT NULL FROM outbox_events") == [("a", True)]
    standby.pg_ctl("promote")
    assert reason(copy) is None
    copy.sql("ALTER SYSTEM SET retrysafe.on_timeline_change = 'suspend'")
    standby.pg_ctl("restart", "-m", "fast")
    assert "promoted" in reason(copy)
    copy.sql("SELECT outbox_consent('same')")
    assert reason(copy) is None


def test_a_backup_of_a_restored_server_is_a_restore_again(db, copy_of, folder):
    db.sql("SELECT outbox_create_destination('d', 'pull')")
    first = copy_of()
    Database(first, db.name).sql("SELECT outbox_consent('same')")
    second = Copy(first, folder / "second").start()
    try:
        assert "backup" in reason(Database(second, db.name))
    finally:
        second.stop()
