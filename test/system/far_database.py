"""A database on the far side of the destination kind "postgres", and the module of that kind, driven alone."""
import json
import select
import sys
import time
import uuid

import pytest

from conftest import TOP

sys.path.insert(0, str(TOP / "test/sinks"))
import sink as interface  # noqa: E402


def event_id(key):
    """The same key is the same event."""
    return str(uuid.uuid5(uuid.NAMESPACE_URL, key))


class Sink(interface.Sink):
    """Events and their outcomes by event key."""

    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.longest = 0.0  # seconds that one call took
        self._numbers = 0
        self._waiting = {}

    def _timed(self, function, *arguments):
        begin = time.monotonic()
        result = function(*arguments)
        self.longest = max(self.longest, time.monotonic() - begin)
        return result

    def submit(self, key, payload="{}", attempt=1, **parts):
        self._numbers += 1
        event = interface.event(self._numbers, id=event_id(key), event_key=key, payload=payload, **parts)
        event.attempt = attempt
        self._waiting[self._numbers] = (key, event)
        if self._timed(super().submit, event):
            return True
        del self._waiting[self._numbers]
        return False

    def flush(self):
        self._timed(self.module.flush, self.handle)

    def collect(self):
        outcomes, timeout = self._timed(super().collect)
        return {self._waiting.pop(outcome.tag)[0]: outcome for outcome in outcomes}, timeout

    def wait(self, within=20):
        """Works until every event has its outcome."""
        result = {}
        deadline = time.monotonic() + within
        while self._waiting:
            found, timeout = self.collect()
            result.update(found)
            if self._waiting and not found:
                left = deadline - time.monotonic()
                assert left > 0, f"no outcome for {[key for key, _ in self._waiting.values()]}"
                poll = select.poll()
                poll.register(self.module.wait_fd(self.handle), select.POLLIN)
                poll.poll(1000 * left if timeout < 0 else min(1000 * left, timeout))
        return result

    def deliver(self, *keys):
        """One batch."""
        for key in keys:
            assert self.submit(key)
        self.flush()
        return self.wait()

INBOX = """CREATE TABLE public.retrysafe_inbox (
  event_id uuid PRIMARY KEY, event_type text NOT NULL, source text, event_key text, scope text, ordering_key text,
  payload jsonb, headers jsonb, created_at timestamptz, received_at timestamptz NOT NULL DEFAULT clock_timestamp(),
  serial bigint GENERATED ALWAYS AS IDENTITY)"""

HANDLER = """CREATE TABLE public.effects (serial bigint GENERATED ALWAYS AS IDENTITY, key text, event jsonb);
CREATE FUNCTION public.handle(event jsonb) RETURNS void LANGUAGE plpgsql AS $$
BEGIN
  INSERT INTO public.effects (key, event) VALUES (event->>'key', event);
  IF event->'payload' ? 'sqlstate' THEN
    RAISE EXCEPTION 'handler says no' USING ERRCODE = event->'payload'->>'sqlstate', DETAIL = 'secret detail';
  END IF;
END $$"""


@pytest.fixture
def far(db):
    """The far side: a plain database with an inbox and a handler."""
    db.sql(INBOX)
    db.sql(HANDLER)
    return db


@pytest.fixture
def sinks():
    opened = []

    def open_sink(database, allowed="127.0.0.1, ::1, localhost", **options):
        given = {"host": "127.0.0.1", "port": database.server.port, "dbname": database.name, "user": "postgres",
                 "require_password": "false", **options}
        opened.append(Sink("postgres", {name: value for name, value in given.items() if value is not None}, allowed))
        return opened[-1]

    yield open_sink
    for sink in opened:
        sink.close()
        assert sink.log_lines == []
        assert sink.longest < 0.5, "a call blocked"


def effects(database):
    return [row[0] for row in database.sql("SELECT key FROM public.effects ORDER BY serial")]


def statuses(outcomes):
    print({key: outcome.reason for key, outcome in outcomes.items() if outcome.reason})  # shown when the test fails
    return {key: outcome.status for key, outcome in outcomes.items()}


def create(db, far, **options):
    options = {"host": "127.0.0.1", "port": far.server.port, "dbname": far.name, "user": "postgres", **options}
    db.sql("SELECT outbox_create_destination('far', 'postgres', %s, backoff => '50 ms', backoff_max => '200 ms')",
           json.dumps(options))
