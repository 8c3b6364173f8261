"""redis-server, read back with redis-cli."""
import json
import os
import pathlib
import shutil
import subprocess
import tempfile
import time

import ending
from brokers.broker import Broker, Message
from brokers.ports import free_port
from waiting import deadline

PASSWORD = "correct horse"


class Redis(Broker):
    kind = "redis"
    reader = "redis-cli"

    def __init__(self, *settings):
        self.settings = settings
        self.process = None
        # In memory, where that can be: it is synced after each event, and what dies in a test are processes.
        memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
        self.folder = pathlib.Path(tempfile.mkdtemp(prefix="retrysafe-redis-", dir=memory))
        self.port = free_port()

    def __exit__(self, *_):
        self.kill()
        shutil.rmtree(self.folder)

    def start(self, until="PONG"):
        # setpriv: it ends with this process, whatever becomes of that.
        with ending.deferred():
            self.process = subprocess.Popen(
                ["setpriv", "--pdeathsig", "KILL", "redis-server", "--port", str(self.port), "--bind", "127.0.0.1", "-::1",
                 "--dir", str(self.folder), "--logfile", str(self.folder / "log"), "--save", "",
                 # What was acknowledged is on disk.
                 "--appendonly", "yes", "--appendfsync", "always", "--requirepass", PASSWORD,
                 "--proto-max-bulk-len", "1mb", *map(str, self.settings)])
        ends = deadline(60)  # it reads all that it has
        while not self.cli("PING").startswith(until):
            assert time.monotonic() < ends and self.process.poll() is None, (self.folder / "log").read_text()
            time.sleep(0.02)

    def kill(self):
        if self.process:
            self.process.kill()
            self.process.wait()
        self.process = None

    def options(self, **others):
        return {"host": "127.0.0.1", "port": self.port, "password": PASSWORD, "stream": "events"} | others

    def wrong_credentials(self):
        return self.options(password="hunter2")

    def wrong_host(self):
        return self.options(host="no-such-host.invalid")

    def too_large(self):
        return 1024 * 1024 + 10_000

    def cli(self, *words, port=None):
        """The answer as redis-cli prints it for programs; errors too."""
        result = subprocess.run(["redis-cli", "-p", str(port or self.port), "--no-auth-warning", "-a", PASSWORD, *words],
                                capture_output=True, text=True)
        return (result.stdout or result.stderr).rstrip("\n")

    def entries(self, stream="events"):
        """Each entry as a dictionary. --json would need version 7 of the protocol, --csv quotes what is not ASCII."""
        text = self.cli("EVAL", """
            local out = {}
            for _, entry in ipairs(redis.call('XRANGE', KEYS[1], '-', '+')) do
              local fields = {}
              for i = 1, #entry[2], 2 do fields[entry[2][i]] = entry[2][i + 1] end
              out[#out + 1] = cjson.encode(fields)
            end
            return out""", "1", stream)
        return [json.loads(line) for line in text.split("\n") if line]  # JSON may hold what else ends a line

    def read(self):
        return [as_event(entry) for entry in self.entries()]


def as_event(entry):
    payload = entry.pop("data", None)
    assert entry.pop("datacontenttype", None) == (None if payload is None else "application/json")
    return Message.of(entry, payload)
