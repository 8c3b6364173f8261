"""Far sides that keep what they took by themselves: tables, and the streams of a redis. Read in order of arrival."""
import json
import shutil

from conftest import run
from ledger import digest
from records import Arrival

# Nothing in it refuses a second copy: where it must not come, it is to be seen.
TAKE = """
CREATE TABLE public.taken (serial bigint GENERATED ALWAYS AS IDENTITY, event jsonb);
CREATE FUNCTION public.take(event jsonb) RETURNS void LANGUAGE sql AS 'INSERT INTO public.taken (event) VALUES (event)';
"""
INBOX = "CREATE TABLE public.retrysafe_inbox (event_id uuid PRIMARY KEY)"


class Taken:
    def __init__(self, db):
        self.db = db
        db.sql(TAKE)

    def read(self):
        connection = self.db.server.connect(self.db.name)
        try:
            last = 0
            while rows := run(connection, "SELECT serial, event FROM public.taken WHERE serial > %s ORDER BY serial LIMIT 5000", last):
                last = rows[-1][0]
                for _, event in rows:
                    yield Arrival(event["id"], event["key"], event["type"], event["ordering_key"],
                                  event["payload"].get("n"), digest(event["payload"]))
        finally:
            connection.close()


class Stream:
    def __init__(self, redis):
        self.redis = redis

    def read(self):
        """In pages: a stream of hours is long."""
        last = "-"
        while True:
            lines = self.redis.cli("EVAL", """
                local out = {}
                for _, entry in ipairs(redis.call('XRANGE', KEYS[1], ARGV[1], '+', 'COUNT', 1000)) do
                  local fields = {}
                  for i = 1, #entry[2], 2 do fields[entry[2][i]] = entry[2][i + 1] end
                  out[#out + 1] = cjson.encode({entry[1], fields})
                end
                return out""", "1", "events", last).splitlines()
            entries = [json.loads(line) for line in lines if line]
            for position, e in entries:
                payload = json.loads(e["data"])
                yield Arrival(e["id"], e["eventkey"], e["type"], e.get("partitionkey"), payload.get("n"), digest(payload))
                last = f"({position}"
            if not entries:
                return


def redis_is_here():
    return all(map(shutil.which, ("redis-server", "redis-cli")))
