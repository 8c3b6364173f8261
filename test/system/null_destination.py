"""The kind `null` of test builds: destinations that deliver to a file and misbehave on command."""
import collections
import pathlib
import uuid

from conftest import run

OPTIONS = """[{"name": "file", "type": "string"}, {"name": "control", "type": "string"},
              {"name": "delay_ms", "type": "integer"}, {"name": "parallel", "type": "integer"},
              {"name": "refuse", "type": "string"}, {"name": "breaks", "type": "string"},
              {"name": "broken", "type": "string"}]"""

Attempt = collections.namedtuple("Attempt", "ms id key number outcome pid")
DELIVERED, RETRY, FINAL, UNREACHABLE = "0", "1", "2", "3"


class NullDestination:
    def __init__(self, db, name="d", options="", **parameters):
        self.db, self.name = db, name
        folder = db.server.directory
        self.file = folder / f"null-{uuid.uuid4().hex}"
        self.control = pathlib.Path(f"{self.file}-control")
        register(db)
        settings = f'"file": "{self.file}", "control": "{self.control}"' + (f", {options}" if options else "")
        extra = "".join(f", {key} => {value}" for key, value in parameters.items())
        db.sql(f"SELECT outbox_create_destination('{name}', 'null', '{{{settings}}}'{extra})")

    def tell(self, word):
        """What becomes of attempts from now on: ok, retry, final, unreachable, hang, forget."""
        self.control.write_text(word)
        self.control.chmod(0o644)

    def attempts(self, outcome=None):
        if not self.file.exists():
            return []
        lines = self.file.read_text().splitlines()
        every = [Attempt(int(ms), *rest) for ms, *rest in (line.split(" ") for line in lines)]
        return [a for a in every if outcome is None or a.outcome == outcome]

    def delivered(self):
        """Event keys in the order of their delivery, copies included."""
        return [a.key for a in self.attempts(DELIVERED)]

    def ids(self):
        """Event ids of what was delivered, copies included."""
        return [a.id for a in self.attempts(DELIVERED)]

    def status(self):
        connection = self.db.server.connect(self.db.name)
        try:
            with connection.cursor() as cursor:
                cursor.execute("SELECT * FROM retrysafe.outbox_status WHERE name = %s", (self.name,))
                return dict(zip([c.name for c in cursor.description], cursor.fetchone()))
        finally:
            connection.close()


def register(db):
    db.sql(f"""SELECT outbox_register_kind('null', 'retrysafe_null', '{OPTIONS}')
                WHERE NOT EXISTS (SELECT FROM outbox_kinds WHERE kind = 'null')""")


def emit(db, *keys, ordering_key=None):
    connection = db.server.connect(db.name)
    try:
        for key in keys:
            run(connection, "SELECT outbox_emit(NULL, %s, 't', '{}', %s)", key, ordering_key)
    finally:
        connection.close()


def worker_pids(db):
    """Process ids of this database's workers."""
    connection = db.server.connect()
    try:
        return [pid for (pid,) in run(connection, """SELECT pid FROM pg_stat_activity WHERE datname = %s
            AND backend_type = 'retrysafe worker'""", db.name)]
    finally:
        connection.close()
