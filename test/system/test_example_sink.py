"""The example of docs/writing-a-sink.md: built with what is installed, and nothing else, and used as it is told there."""
import json
import pathlib
import re
import subprocess

import pytest

from conftest import TOP, eventually, run
from null_destination import emit

pytestmark = pytest.mark.xdist_group("example_sink")  # one library, in a folder that all share

OPTIONS = '[{"name": "path", "type": "string", "required": true, "max": 1000}]'


@pytest.fixture(scope="module")
def file_sink(server):
    """In a folder where this server finds its libraries."""
    connection = server.connect()
    folder = pathlib.Path(run(connection, "SHOW dynamic_library_path")[0][0].split(":")[0])
    connection.close()
    headers = next(folder.parents[4].rglob("retrysafe_sink.h")).parent
    library = folder / "file_sink.so"
    build(headers, library)
    yield folder
    library.unlink()


def build(headers, library):
    subprocess.run(["cc", "-shared", "-fPIC", "-O2", "-Wall", "-Wextra", "-Werror", f"-I{headers}", "-o", library,
                    TOP / "examples/file_sink/file_sink.c"], check=True)


@pytest.fixture
def path(db, file_sink):
    db.sql("SELECT outbox_register_kind('file', 'file_sink', %s)", OPTIONS)
    return db.server.directory / f"{db.name}.jsonl"


def create(db, path, extra=""):
    db.sql(f"SELECT outbox_create_destination('archive', 'file', jsonb_build_object('path', %s){extra})", str(path))


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def test_a_line_for_each_event(db, path):
    create(db, path, ", shards => 3")
    expected = [(f"{key}-{number}", f'k"\\{key}') for number in range(40) for key in "abc"]
    for event_key, ordering_key in expected:
        db.sql("SELECT outbox_emit(NULL, %s, 'it''s \"one\"', %s, %s)", event_key, json.dumps(event_key), ordering_key)
    db.sql("SELECT outbox_emit(NULL, 'last', 't', NULL)")
    eventually(lambda: len(lines(path)) == len(expected) + 1)
    ids = dict(db.sql("SELECT event_id::text, event_key FROM outbox_events"))
    assert {line["id"] for line in lines(path)} == set(ids)
    for _, ordering_key in expected[:3]:
        got = [line["data"] for line in lines(path) if line.get("key") == ordering_key]
        assert got == [event_key for event_key, other in expected if other == ordering_key]
    unordered = next(line for line in lines(path) if "key" not in line)
    assert (ids[unordered["id"]], unordered["data"], unordered["type"]) == ("last", None, "t")


def test_a_library_that_is_not_there_is_told_and_waited_for(db):
    session = db.server.connect(db.name)
    run(session, "SELECT outbox_register_kind('post', 'no_such_sink', '[]')")
    where = db.value("SHOW dynamic_library_path").replace("$libdir", db.value("SELECT setting FROM pg_config WHERE name = 'PKGLIBDIR'"))
    told, = session.notices
    assert f'WARNING:  library "no_such_sink.so" is not installed in {where}\n' in told and "dynamic_library_path" in told
    session.close()
    db.sql("SELECT outbox_create_destination('d', 'post')")
    emit(db, "a")
    error = eventually(lambda: db.value("SELECT last_error FROM outbox_status"))
    assert error == f'library "no_such_sink.so" is not installed in {where}'


def test_a_library_of_another_version_of_the_interface_is_refused(db, file_sink, tmp_path):
    header = next(file_sink.parents[4].rglob("retrysafe_sink.h")).read_text()
    version = re.search(r"define RETRYSAFE_SINK_ABI_VERSION (\d+)", header)[1]
    (tmp_path / "retrysafe_sink.h").write_text(header.replace(f"SINK_ABI_VERSION {version}", "SINK_ABI_VERSION 4711"))
    library = file_sink / "old_sink.so"
    build(tmp_path, library)
    try:
        db.sql("SELECT outbox_register_kind('old', 'old_sink', %s)", OPTIONS)
        db.sql("SELECT outbox_create_destination('d', 'old', '{\"path\": \"/nowhere\"}')")
        emit(db, "a")
        error = eventually(lambda: db.value("SELECT last_error FROM outbox_status"))
    finally:
        library.unlink()
    assert error == f'library "old_sink" was built for version 4711 of the sink interface, this is version {version}'


def test_a_file_that_cannot_be_opened_is_told(db, path):
    folder = path.with_suffix(".missing")
    create(db, folder / "file")
    emit(db, "a")
    error = eventually(lambda: db.value("SELECT last_error FROM outbox_status"))
    assert f'could not open file "{folder}/file": No such file or directory' in error
    assert db.value("SELECT count(*) FROM outbox_dead_letters") == 0
