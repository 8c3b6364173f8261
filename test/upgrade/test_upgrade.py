"""pg_upgrade: nothing is published before consent, nothing is lost or repeated, ids and answers stay.

One chain of servers, each upgraded to the next. On every one databases are made for every later one; each is asked there
what became of it, with upgrades in between that nobody noticed.
"""
import itertools
import json
import os
import shutil

import psycopg2
import pytest

from conftest import Server, eventually, make_database, run
from copies import as_postgres, folder  # noqa: F401 (a fixture)
from receiver import Receiver
from rings import SETTINGS, fetch_all, rotate, seal
from test_eras import History
from test_rings_copies import Story

MAJORS = [int(major) for major in os.environ["RETRYSAFE_MAJORS"].split()]


@pytest.fixture(autouse=True)
def servers_end_before_their_folder(folder):
    yield
    for running in list(Server.started):
        running.stop()


def start(major, folder):
    os.environ["PG_CONFIG"] = f"/usr/lib/postgresql/{major}/bin/pg_config"  # what Server goes by
    return Server(folder / str(major), *SETTINGS, "max_worker_processes = 40")  # for each database


def upgrade(old, major, folder):
    programs = old.bindir()
    old.end()
    new = start(major, folder)
    new.end()
    if major >= 18:  # clusters have checksums now unless told otherwise, and both must be alike
        as_postgres(new.bindir() / "pg_checksums", "--disable", "-D", new.directory / "data", cwd=folder)
    as_postgres(new.bindir() / "pg_upgrade", "-U", "postgres", "-b", programs, "-B", new.bindir(), "-d", old.directory / "data",
                "-D", new.directory / "data", cwd=folder)
    shutil.rmtree(old.directory)
    new.pg_ctl("start")
    return new


class Shop:
    """Answered requests, events that a worker published, one dead, and those that wait for it; a batch under way."""

    def __init__(self, db, receiver):
        self.receiver = receiver
        receiver.behave(lambda request: 400 if request.body == b'"bad"' else 204)
        db.sql("SELECT outbox_create_destination('hook', 'http', %s)", json.dumps({"url": receiver.url}))
        db.sql("SELECT outbox_create_destination('leased', 'pull')")
        session = db.connect()
        for key in "a", "b":
            run(session, "BEGIN")
            run(session, "SELECT idem_begin(%s, 'h', ttl => '1 day')", key)
            run(session, "SELECT idem_complete(%s, %s)", key, json.dumps(key.upper()))
            run(session, "COMMIT")
        run(session, "SELECT inbox_accept('mail', 'event')")
        run(session, "SELECT outbox_emit(NULL, 'sent' || i, 't', '{}', 'k') FROM generate_series(1, 20) i")
        run(session, "SELECT outbox_emit(NULL, 'dead', 't', '\"bad\"')")
        db.server.set("retrysafe.workers_per_database", "1")
        eventually(lambda: db.sql("SELECT backlog, dead FROM outbox_status WHERE name = 'hook'") == [(0, 1)])
        db.sql("SELECT outbox_pause('hook')")
        db.server.set("retrysafe.workers_per_database", "0")
        run(session, "SELECT outbox_emit(NULL, 'waits' || i, 't', '{}', 'k') FROM generate_series(1, 20) i")
        self.batch = run(session, "SELECT batch FROM outbox_fetch('leased', 5, lease => '1 day')")[0][0]
        run(session, "SELECT outbox_emit(NULL, 'tomorrow', 't', '{}', deliver_after => now() + '1 day')")
        self.log = run(session, "SELECT id, event_id::text, event_key FROM outbox_events ORDER BY id")
        receiver.behave(204)

    def check(self, db):
        session = db.connect()
        sent = self.receiver.ids
        db.sql("SELECT outbox_resume('hook')")
        assert db.sql("SELECT DISTINCT state FROM outbox_status") == [("suspended",)]
        for key in "a", "b":
            assert run(session, "SELECT outcome, response FROM idem_begin(%s, 'h')", key) == [("replay", key.upper())]
            assert run(session, "SELECT outcome FROM idem_begin(%s, 'other')", key) == [("conflict",)]
        assert run(session, "SELECT inbox_accept('mail', 'event')") == [(False,)]
        with pytest.raises(psycopg2.Error, match="suspended"):
            run(session, "SELECT outbox_fetch('leased')")
        assert db.sql("SELECT id, event_id::text, event_key FROM outbox_events ORDER BY id") == self.log
        assert run(session, "SELECT outbox_emit(NULL, 'waits1', 't', '{}', 'k')")[0][0] in [i for i, *_ in self.log]
        run(session, "SELECT outbox_emit(NULL, 'while suspended', 't', '{}', 'k')")
        assert db.value("SELECT id FROM outbox_events WHERE event_key = 'while suspended'") > self.log[-1][0]

        db.server.set("retrysafe.workers_per_database", "1")
        eventually(lambda: db.value("SELECT count(*) FROM pg_stat_activity WHERE backend_type = 'retrysafe worker'") > 0)
        assert db.sql("SELECT state, dead FROM outbox_status WHERE name = 'hook'") == [("suspended", 1)]
        assert self.receiver.ids == sent
        db.sql("SELECT outbox_consent('same')")
        run(session, "SELECT outbox_emit(NULL, 'last', 't', '{}', 'k')")
        ids = {key: event_id for _, event_id, key in
               db.sql("SELECT id, event_id::text, event_key FROM outbox_events ORDER BY id")}
        assert ids.items() >= {key: event_id for _, event_id, key in self.log}.items()
        wanted = [*(f"waits{i}" for i in range(1, 21)), "while suspended", "last"]
        eventually(lambda: len(self.receiver.ids) >= len(sent) + len(wanted))
        assert self.receiver.ids == sent + [ids[key] for key in wanted]
        db.sql("SELECT outbox_retry('hook')")
        eventually(lambda: self.receiver.ids[len(sent) + len(wanted):] == [ids["dead"]])
        db.server.set("retrysafe.workers_per_database", "0")

        with pytest.raises(psycopg2.Error) as error:
            run(session, "SELECT outbox_ack(%s)", self.batch)
        assert error.value.pgcode.startswith("RS")
        everything = [key for _, _, key in self.log] + wanted[-2:]
        assert sorted(fetch_all(db, "leased")) == sorted(everything), "the batch that was under way comes again"
        assert db.value("SELECT outbox_cancel('tomorrow')") is True


def tell_story(db):
    """With pieces of the rings in several states."""
    story = Story(db)
    story.go_on("d")
    seal(db, "log")
    rotate(db, "records")
    story.go_on("d", "slow")
    rotate(db, "log")
    story.go_on()
    return story


def test_each_server_to_each_later_one(folder):
    with Receiver() as receiver:
        made = {}
        server = start(MAJORS[0], folder)
        for major, next_major in itertools.zip_longest(MAJORS, MAJORS[1:]):
            for origin in MAJORS[:MAJORS.index(major)]:
                shop, history, story, databases = made[origin, major]
                for database in databases:
                    database.server = server
                shop.check(databases[0])
                history.check(databases[1], "same")
                story.check(databases[2], "same")
            for later in MAJORS[MAJORS.index(major) + 1:]:
                databases = [make_database(server, f"{what}_{major}_{later}") for what in ("shop", "history", "story")]
                # The rings of these servers turn fast; this one's answers stay.
                databases[1].sql(f"ALTER DATABASE {databases[1].name} SET retrysafe.idem_retention = '1h'")
                made[major, later] = (Shop(databases[0], receiver), History(databases[1]), tell_story(databases[2]), databases)
                for database in databases:
                    database.close()
            if next_major:
                server = upgrade(server, next_major, folder)
