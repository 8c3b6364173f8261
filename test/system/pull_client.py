"""A client of kind pull for tests, and the little that it needs."""
import psycopg2
import pytest

from conftest import run

STALE, INVALID, NOT_IN_BATCH = "RS210", "RS209", "RS211"


def create(db, name="d", **options):
    arguments = {"start_at": "earliest", **options}
    db.sql(f"SELECT outbox_create_destination(%s, 'pull', {', '.join(k + ' => %s' for k in arguments)})",
           name, *arguments.values())


def emit(db, *keys, ordering_key=None, event_type="t", payload="{}"):
    for key in keys:
        db.sql("SELECT outbox_emit(NULL, %s, %s, %s, %s)", key, event_type, payload, ordering_key)


class Client:
    """A publisher that speaks the pull API over one connection."""

    def __init__(self, db, destination="d"):
        self.connection, self.destination = db.connect(), destination

    def fetch(self, most=100, lease="30 s", **options):
        extra = "".join(f", {name} => {value}" for name, value in options.items())
        self.rows = run(self.connection, "SELECT batch, event_id, id, attempt, event_key, ordering_key FROM"
                                         f" outbox_fetch(%s, %s, lease => %s{extra})", self.destination, most, lease)
        self.batch = self.rows[0][0] if self.rows else None
        return [row[4] for row in self.rows]

    def ids(self):
        return {row[4]: row[2] for row in self.rows}

    def ack(self, up_to=None, batch=None):
        return run(self.connection, "SELECT outbox_ack(%s, %s)", batch or self.batch,
                   None if up_to is None else self.ids()[up_to])[0][0]

    def nack(self, key, reason="refused", retry_after="0 s", dead=False, batch=None):
        event_id = {row[4]: row[1] for row in self.rows}[key]
        return run(self.connection, "SELECT outbox_nack(%s, %s, %s, %s::interval, %s)", batch or self.batch, event_id,
                   reason, retry_after, dead)[0][0]

    def drain(self, most=100):
        keys = []
        while self.fetch(most):
            keys += [row[4] for row in self.rows]
            self.ack()
        return keys


def refused(code, call, *arguments, **options):
    with pytest.raises(psycopg2.Error) as error:
        call(*arguments, **options)
    assert error.value.pgcode == code, error.value
    return error.value


def expire(db):
    """The lease ends now, as time would end it."""
    db.sql("UPDATE outbox_shards SET lease_until = clock_timestamp()")
