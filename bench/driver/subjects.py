"""What is compared: ours and the references. Each has a folder in bench/sql: schema.sql (its tables and functions) and
request.sql (the statement that a client sends for one request), and perhaps replay.sql (what it sends when the request
may be one that was answered). Each lives in a database of its own, in a schema of its
name.

One request is one order and two events with event key (or number), type, ordering key and a payload of 200 bytes. Keys are random,
so that they fall everywhere into an index, or of a known range where the same request is to come again. What belongs to a
request depends on its key alone: the same key is the same request.
"""
import pathlib
from dataclasses import dataclass, replace

SQL = pathlib.Path(__file__).resolve().parents[1] / "sql"
PAYLOAD_BYTES = 200
_KEY = r"""('req-' || :key)"""
_CUSTOMER = r"""('customer-' || :customer)"""
_DIGEST = r"""('\x""" + "5ca1ab1e" * 5 + "00000" + r"""' || :key)::bytea"""     # as the client computed it
_TEMPLATE = """{"request": "req-", "customer": "customer-", "amount": 12.50, "items": ""}"""
_ITEMS = "x" * (PAYLOAD_BYTES - len(_TEMPLATE) - 19 - 5)
_REQUEST = (r"""('{"request": "req-' || :key || '", "customer": "customer-' || :customer || '", "amount": 12.50, "items": "'"""
            + f""" || '{_ITEMS}' || '"}}')::jsonb""")
FIRST_KEY = 10 ** 18                                    # all keys have 19 digits
NEW = f"\\set key random({FIRST_KEY}, {2 ** 63 - 1})\n"
_INSTALL = {
    "retrysafe": "CREATE SCHEMA retrysafe; CREATE EXTENSION retrysafe SCHEMA retrysafe;",
    "pgq": "CREATE EXTENSION pgq;",
}


@dataclass(frozen=True)
class Subject:
    name: str
    label: str
    extension: str = ""         # that it is made of
    replay: str = "request"     # the script that asks for a stored answer

    @property
    def database(self):
        """Of its own, unless it is created in another one."""
        return self.name

    @property
    def schemas(self):
        """That hold its tables."""
        return (self.name, self.extension) if self.extension else (self.name,)

    def create(self, cluster, database=None):
        database = database or self.database
        cluster.sql(f"CREATE DATABASE {database}")
        parts = [f"CREATE SCHEMA {self.name}; SET search_path = {self.name};", (SQL / "orders.sql").read_text()]
        if self.extension:
            parts.insert(0, _INSTALL[self.extension])
        schema = SQL / self.name / "schema.sql"
        if schema.exists():
            parts.append(schema.read_text())
        cluster.sql("\n".join(parts), database=database)

    def request(self, choose_key, script="request"):
        """A script of pgbench; `choose_key` sets its variable `key`."""
        text = (SQL / self.name / f"{script}.sql").read_text()
        for name, value in (("key", _KEY), ("customer", _CUSTOMER), ("digest", _DIGEST), ("request", _REQUEST),
                            ("items", f"'{_ITEMS}'")):
            text = text.replace(f"@{name}@", value)
        return f"{choose_key}\\set customer 10000 + :key % 90000\n{text}"


BARE = Subject("bare", "(a) bare business insert")
HANDWRITTEN = Subject("handwritten", "(b) hand-written SQL")
HANDWRITTEN_PLUS = Subject("handwritten_plus", "(b+) hand-written SQL, same columns and look-ups")
PGQ = Subject("pgq_orders", "(c) PgQ", extension="pgq")
RUN = Subject("retrysafe_run", "retrysafe, idem_run", extension="retrysafe")
CALLS = Subject("retrysafe_calls", "retrysafe, three calls, event keys", extension="retrysafe")
NUMBERED = Subject("retrysafe_numbered", "retrysafe, three calls, numbered events", extension="retrysafe")
OURS = (RUN, CALLS, NUMBERED)
# As a client does that looks for an answer before it sends the request to the function: the same tables.
ASKED_FIRST = replace(NUMBERED, label="retrysafe, idem_begin by the client", replay="replay")
BY_HAND = (HANDWRITTEN, HANDWRITTEN_PLUS)


def numbered(count):
    """Draws one of `count` keys."""
    return f"\\set key {FIRST_KEY} + random(1, {count})\n"


def in_turn(each):
    """Each client takes the next key of its own `each`."""
    return f"\\set next :next + 1\n\\set key {FIRST_KEY} + :client_id * {each} + :next\n"


def create_all(cluster, candidates):
    """Makes those that can be had; returns them, and why the others cannot be measured."""
    present, missing = [], []
    for subject in candidates:
        installable = "SELECT 1 FROM pg_available_extensions WHERE name = %s"
        if subject.extension in ("", "retrysafe") or cluster.sql(installable, (subject.extension,)):
            subject.create(cluster)
            present.append(subject)
        else:
            missing.append(f"{subject.label}: the extension {subject.extension} is not installed")
    return present, missing
