"""Destinations as operators make, alter and drop them: names, where they start, who may name what, shards."""
import psycopg2
import pytest

from conftest import Pending, run
from operating import (  # noqa: F401 (the fixture no_retention)
    bury, clean_up, drain, emit, fetch, no_retention, refused, sent_at, status)
from test_access import views


def test_two_sessions_make_one_destination(db):
    first = db.connect(autocommit=False)
    run(first, "SELECT outbox_create_destination('d', 'pull')")
    second = Pending(db, "SELECT outbox_create_destination('d', 'pull')")
    assert second.blocks()
    first.commit()
    with pytest.raises(psycopg2.Error) as error:
        second.result()
    assert error.value.pgcode == "RS202"
    assert db.value("SELECT count(*) FROM outbox_status") == 1


def test_an_aborted_creation_leaves_the_name_free(db):
    first = db.connect(autocommit=False)
    run(first, "SELECT outbox_create_destination('d', 'pull')")
    second = Pending(db, "SELECT outbox_create_destination('d', 'pull')")
    assert second.blocks()
    first.rollback()
    second.result()
    assert db.value("SELECT count(*) FROM outbox_status") == 1


def test_start_now_earliest_or_at_a_position(db):
    emit(db, "a")
    second = emit(db, "b")
    emit(db, "c")
    open_writer = db.connect(autocommit=False)
    run(open_writer, "SELECT outbox_emit(NULL, 'late', 't', '{}')")
    creator = db.connect(autocommit=False)
    # The first destination of a log that has events waits for those who write some more.
    first = Pending(db, "SELECT outbox_create_destination('now', 'pull')")
    assert first.blocks()
    open_writer.commit()
    first.result()
    late = db.connect(autocommit=False)
    run(late, "SELECT outbox_emit(NULL, 'later', 't', '{}')")
    run(creator, "SELECT outbox_create_destination('own', 'pull')")
    run(creator, "SELECT outbox_emit(NULL, 'of the creator', 't', '{}')")
    creator.commit()
    db.sql("SELECT outbox_create_destination('earliest', 'pull', start_at => 'earliest')")
    db.sql("SELECT outbox_create_destination('second', 'pull', start_at => %s)", str(second))
    late.commit()
    emit(db, "d")
    assert sorted(drain(db, "now")) == ["d", "later", "of the creator"]
    assert sorted(drain(db, "own")) == ["d", "later", "of the creator"]
    assert sorted(drain(db, "earliest")) == ["a", "b", "c", "d", "late", "later", "of the creator"]
    assert sorted(drain(db, "second")) == ["b", "c", "d", "late", "later", "of the creator"]


def test_what_is_before_the_start_is_nothing_that_the_destination_has_or_wants(db):
    db.sql("SELECT outbox_create_destination('first', 'pull')")
    for key in "abcde":
        emit(db, key)
    after = db.value("SELECT max(id) + 1 FROM outbox_log")
    db.sql("SELECT outbox_create_destination('d', 'pull', start_at => %s)", str(after))
    db.sql("SELECT outbox_alter_destination('d', shards => 2)")  # refused while events are pending
    db.sql("SELECT outbox_drop_destination('d')")
    db.sql("SELECT outbox_create_destination('d', 'pull', start_at => %s)", str(after))
    db.sql("SELECT outbox_drop_destination('first')")
    db.sql("UPDATE outbox_eras SET database = 1")  # as in a restored dump
    db.sql("SELECT outbox_consent('same')")
    assert drain(db, "d") == []
    emit(db, "f")
    assert drain(db, "d") == ["f"]
    assert [key for key, at in sent_at(db).items() if at] == ["f"]


def test_only_privileged_roles_name_files_and_variables_of_the_server(db, role):
    db.sql(f"ALTER DATABASE {db.name} SET retrysafe.allowed_secret_directory = '/srv/secrets'")
    plain = db.connect(user=role("admin"))
    reader_name = role("admin")
    db.sql(f"GRANT pg_read_server_files TO {reader_name}")
    reader = db.connect(user=reader_name)
    create = "SELECT outbox_create_destination('d', 'http', %s::jsonb)"
    for option in ('"secret_file": "a.key"', '"secret_env": "RETRYSAFE_X"', '"ca_file": "ca.pem"'):
        options = '{"url": "https://example.com", ' + option + "}"
        refused(plain, "42501", create, options)
        run(reader, create, options)
        # Whoever changes where the secret is sent to must be allowed to use it.
        refused(plain, "42501", "SELECT outbox_alter_destination('d', options => '{\"url\": \"https://evil.example\"}')")
        run(plain, "SELECT outbox_alter_destination('d', max_attempts => 3)")
        run(plain, "SELECT outbox_drop_destination('d')")


def test_only_privileged_roles_name_the_certificate_of_a_postgres_destination(db, role):
    db.sql(f"ALTER DATABASE {db.name} SET retrysafe.allowed_secret_directory = '/srv/secrets'")
    reader = role("admin")
    db.sql(f"GRANT pg_read_server_files TO {reader}")
    create = "SELECT outbox_create_destination('d', 'postgres', %s::jsonb)"
    for files in ('"ca_file": "ca.pem"', '"cert_file": "courier.pem", "key_file": "courier.key"'):
        options = '{"host": "db", "dbname": "d", "user": "u", "password": "hunter2", ' + files + "}"
        refused(db.connect(user=role("admin")), "42501", create, options)
        run(db.connect(user=reader), create, options)
        db.sql("SELECT outbox_drop_destination('d')")


def test_nobody_else_can_have_secrets_sent_to_a_server_of_their_own(db, role):
    creator, other = role("admin"), role("admin")
    run(db.connect(user=creator), """SELECT outbox_create_destination('d', 'http',
        '{"url": "https://example.com", "headers": {"Authorization": "hunter2"}}')""")
    refused(db.connect(user=other), "42501",
            "SELECT outbox_alter_destination('d', options => '{\"url\": \"https://evil.example\"}')")
    run(db.connect(user=other), "SELECT outbox_alter_destination('d', max_attempts => 3)")
    run(db.connect(user=creator), "SELECT outbox_alter_destination('d', options => '{\"url\": \"https://example.org\"}')")
    assert status(db, "d")["options"]["url"] == "https://example.org"


def test_a_postgres_destination_of_an_ordinary_role_needs_a_password(db, role):
    plain = db.connect(user=role("admin"))
    options = '{"host": "127.0.0.1", "dbname": "d", "user": "u"}'
    refused(plain, "42501", "SELECT outbox_create_destination('d', 'postgres', %s::jsonb)", options)
    db.sql("SELECT outbox_create_destination('d', 'postgres', %s::jsonb)", options)
    # It acts with the rights of the superuser that made it.
    refused(plain, "42501", "SELECT outbox_alter_destination('d', options => '{\"password\": \"x\"}')")
    refused(plain, "42501", "SELECT outbox_alter_destination('d', max_attempts => 3)")


def test_a_function_runs_as_its_creator_whoever_alters_it(db, role):
    creator, other, member = role("admin"), role("admin"), role("admin")
    db.sql(f"GRANT {creator} TO {member}")
    db.sql("CREATE FUNCTION public.handler(event jsonb) RETURNS void LANGUAGE sql AS 'SELECT'")
    db.sql("CREATE FUNCTION public.hidden(event jsonb) RETURNS void LANGUAGE sql AS 'SELECT'")
    db.sql("REVOKE ALL ON FUNCTION public.hidden FROM PUBLIC")
    refused(db.connect(user=creator), "42501",
            "SELECT outbox_create_destination('d', 'function', '{\"function\": \"public.hidden\"}')")
    run(db.connect(user=creator), "SELECT outbox_create_destination('d', 'function', '{\"function\": \"public.handler\"}')")
    refused(db.connect(user=other), "42501", "SELECT outbox_alter_destination('d', max_attempts => 3)")
    run(db.connect(user=member), "SELECT outbox_alter_destination('d', max_attempts => 3)")
    db.sql("SELECT outbox_alter_destination('d', max_attempts => 4)")
    assert status(db, "d")["run_as"] == creator


def test_kinds_are_registered_by_superusers_only(db, role):
    plain = db.connect(user=role("admin"))
    refused(plain, "42501", "SELECT outbox_register_kind('k', 'l', '[]')")
    refused(plain, "42501", "SELECT outbox_unregister_kind('k')")


def test_no_secret_is_shown(db):
    db.sql("""SELECT outbox_create_destination('d', 'http', '{"url": "https://example.com", "secret": "hunter2",
              "headers": {"Authorization": "hunter2"}}')""")
    for view in views(db):
        assert "hunter2" not in str(db.sql(f"SELECT * FROM {view}"))
    error = refused(db.connect(), "RS203", "SELECT outbox_alter_destination('d', options => "
                    "'{\"secret\": \"hunter2\", \"secret_env\": \"RETRYSAFE_X\"}')")
    assert "hunter2" not in str(error.diag.message_primary) + str(error.diag.message_hint)


def test_a_paused_destination_keeps_its_events(db):
    db.sql("SELECT outbox_create_destination('d', 'pull')")
    db.sql("SELECT outbox_pause('d')")
    emit(db, "a")
    assert fetch(db, "d") == (None, [])
    assert status(db, "d")["state"] == "paused"
    db.sql("SELECT outbox_resume('d')")
    assert drain(db, "d") == ["a"]


def test_the_number_of_shards_changes_without_losing_or_repeating(db):
    db.sql("SELECT outbox_create_destination('d', 'pull', shards => 4)")
    for i in range(20):
        emit(db, f"a{i}", ordering_key=f"k{i % 7}")
    open_writer = db.connect(autocommit=False)
    run(open_writer, "SELECT outbox_emit(NULL, 'open', 't', '{}', 'k1')")
    assert len(drain(db, "d")) == 20
    refused(db.connect(), "RS214", "SELECT outbox_alter_destination('d', shards => 0)")
    db.sql("SELECT outbox_alter_destination('d', shards => 2)")
    open_writer.commit()
    emit(db, "b", ordering_key="k2")
    refused(db.connect(), "RS206", "SELECT outbox_alter_destination('d', shards => 3)")
    assert sorted(drain(db, "d")) == ["b", "open"]
    db.sql("SELECT outbox_alter_destination('d', shards => 3)")
    assert drain(db, "d") == []
    emit(db, "c")
    assert drain(db, "d") == ["c"]


def test_what_old_shards_delivered_stays_told(db):
    emit(db, "before")
    db.sql("SELECT outbox_create_destination('d', 'pull', shards => 3)")
    for i in range(8):
        emit(db, f"a{i}", ordering_key=f"k{i}")
    drain(db, "d")
    for shards in (1, 4, 2):
        db.sql("SELECT outbox_alter_destination('d', shards => %s)", shards)
        assert status(db, "d")["delivered"] == 8
        unsent = {key for key, at in sent_at(db).items() if at is None}
        assert unsent == {"before"}
    emit(db, "b")
    assert sent_at(db)["b"] is None
    assert drain(db, "d") == ["b"]
    assert status(db, "d")["delivered"] == 9 and sent_at(db)["b"] is not None


def test_old_shards_stay_told_when_retention_took_their_start(db, no_retention):
    db.sql("SELECT outbox_create_destination('d', 'pull', shards => 2)")
    for key in "abcd":
        emit(db, key, ordering_key=key)
        drain(db, "d")
    clean_up(db, "d")
    clean_up(db)
    assert db.value("SELECT min(window_no) FROM outbox_windows") > 0
    emit(db, "e")
    drain(db, "d")
    db.sql("SELECT outbox_alter_destination('d', shards => 1)")
    assert sent_at(db)["e"] is not None
    assert status(db, "d")["delivered"] == 5


def test_a_drop_waits_for_a_record_under_way_and_leaves_nothing(db):
    db.sql("SELECT outbox_create_destination('d', 'pull', shards => 2)")
    emit(db, "a")
    batch, _ = fetch(db, "d")
    recorder = db.connect(autocommit=False)
    run(recorder, "SELECT outbox_ack(%s)", batch)
    old = db.connect(autocommit=False)
    run(old, "SET TRANSACTION ISOLATION LEVEL REPEATABLE READ")
    refused(old, "RS207", "SELECT outbox_drop_destination('d')")
    dropper = Pending(db, "SELECT outbox_drop_destination('d')")
    assert dropper.blocks()
    recorder.commit()
    assert dropper.result() == [(True,)]
    for table in ("destinations", "shards", "windows", "batches", "parked"):
        assert db.value(f"SELECT count(*) FROM outbox_{table}") == 0


def test_a_batch_of_old_shards_is_refused(db):
    db.sql("SELECT outbox_create_destination('d', 'pull')")
    emit(db, "a")
    batch, keys = fetch(db, "d")
    refused(db.connect(), "RS206", "SELECT outbox_alter_destination('d', shards => 2)")
    db.sql("SELECT outbox_drop_destination('d')")
    db.sql("SELECT outbox_create_destination('d', 'pull')")
    with pytest.raises(psycopg2.Error) as error:
        db.sql("SELECT outbox_ack(%s)", batch)
    assert error.value.pgcode in ("RS209", "RS210", "RS201")


@pytest.mark.parametrize("alteration, fetched", [
    ("outbox_alter_destination('d', on_exhausted => 'dead_letter')", ["of x", "behind the dead"]),
    ("outbox_alter_destination('d', event_types => '{x, y}')", ["of x", "of y"]),
    ("outbox_pause('d')", []), ("outbox_drop_destination('d')", None)])
def test_a_fetch_goes_by_what_a_destination_is_when_it_returns(db, alteration, fetched):
    db.sql("SELECT outbox_create_destination('d', 'pull', event_types => '{x}', on_exhausted => 'block')")
    emit(db, "dead", "x", "k")
    bury(db, "d")
    emit(db, "of x", "x")
    emit(db, "of y", "y")
    emit(db, "behind the dead", "x", "k")
    administrator = db.connect(autocommit=False)
    run(administrator, "LOCK TABLE outbox_scheduled")  # where a fetch looks, when it knows the destination
    pending = Pending(db, "SELECT event_key FROM outbox_fetch('d')")
    assert pending.blocks()
    db.sql(f"SELECT {alteration}")
    administrator.rollback()
    if fetched is None:
        with pytest.raises(psycopg2.Error) as error:
            pending.result()
        assert error.value.pgcode == "RS201"
    else:
        assert [key for (key,) in pending.result()] == fetched
