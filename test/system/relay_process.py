"""retrysafe-relay as a process of the tests."""
import json
import os
import shutil
import signal
import subprocess
import uuid

import preload
from conftest import TOP, eventually, run


class Relay:
    """Runs as the server's user, so that both write the same files."""

    def __init__(self, db, *arguments, config=None, connection=None, environment=None, log_format="json"):
        server = db.server
        program = server.directory / "retrysafe-relay"
        if not program.exists():
            shutil.copy(TOP / "retrysafe-relay", program)
        libraries = db.value("SHOW dynamic_library_path")
        command = [program, "--library-path", libraries, "--log-format", log_format]
        if config is not None:
            path = server.directory / f"relay-{uuid.uuid4().hex}.conf"
            path.write_text(config)
            command += ["--config", path]
        if connection is None and "connection =" not in (config or ""):
            connection = server.dsn(db.name)
        if connection is not None:
            command += ["--connection", connection]
        self.log_file = server.directory / f"relay-{uuid.uuid4().hex}.log"
        user = {"user": "postgres", "group": "postgres", "extra_groups": []} if os.getuid() == 0 else {}
        self.process = subprocess.Popen([str(part) for part in [*command, *arguments]], stderr=open(self.log_file, "wb"),
                                        stdout=subprocess.PIPE, env=preload.behind_sanitizer({**os.environ, **(environment or {})}), cwd="/", **user)

    @property
    def pid(self):
        return self.process.pid

    def log(self):
        return self.log_file.read_text()

    def lines(self, message=None):
        every = [json.loads(line) for line in self.log().splitlines()]
        return [line for line in every if message is None or line["message"] == message]

    def ready(self):
        eventually(lambda: self.lines("publishing") or self.process.poll() is not None)
        assert self.process.poll() is None, self.log()
        return self

    def wait(self, timeout=30):
        """Its exit status."""
        return self.process.wait(timeout)

    def stop(self, signal_number=signal.SIGTERM, timeout=30):
        if self.process.poll() is None:
            os.kill(self.pid, signal_number)
        return self.wait(timeout)

    def kill(self):
        self.stop(signal.SIGKILL)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.kill()
        self.process.stdout.close()


def emit_many(db, count, keys=10, prefix="e"):
    connection = db.server.connect(db.name)
    try:
        run(connection, "SELECT retrysafe.outbox_emit(NULL, %s || i, 't', to_jsonb(i), 'k' || i %% %s) FROM"
                        " generate_series(1, %s) i", prefix, keys, count)
    finally:
        connection.close()
