"""Programs beside the server that somebody starts again when they have died, as a service manager does. They are started in
the main thread: some end with the thread that started them."""
import signal
import time

import psycopg2

from brokers.redis import Redis
from relay_process import Relay


class Keeper:
    """`away_until`: when it may be started again."""

    def __init__(self, name):
        self.name, self.away_until = name, 0.0
        self.unexpected = []

    def look(self):
        if not self.runs() and time.monotonic() >= self.away_until:
            self.start()


class RelayKeeper(Keeper):
    def __init__(self, site, name, *destinations):
        super().__init__(name)
        self.site, self.destinations = site, destinations
        self.relay = None

    @property
    def pid(self):
        """None when it does not run. For other threads too."""
        relay = self.relay
        return relay.pid if relay and relay.process.poll() is None else None

    def runs(self):
        if self.relay is None:
            return False
        status = self.relay.process.poll()
        if status is not None:
            if status not in (0, -signal.SIGKILL):
                self.unexpected.append(f"{self.name} ended with {status}: {self.relay.log()[-2000:]}")
            self.relay.__exit__()
            self.relay = None
        return status is None

    def start(self):
        try:
            self.relay = Relay(self.site.db, "--allowed-addresses", "127.0.0.1", "--connections", "2", *self.destinations,
                               connection=self.site.dsn())
        except psycopg2.Error:
            pass  # it asks the server where the modules are: next time

    def stop(self):
        if self.runs():
            self.relay.__exit__()


class RedisKeeper(Keeper):
    def __init__(self):
        super().__init__("redis")
        self.redis = Redis()
        self.redis.start()

    @property
    def pid(self):
        process = self.redis.process
        return process.pid if process and process.poll() is None else None

    def runs(self):
        return self.pid is not None

    def start(self):
        self.redis.start()

    def stop(self):
        self.redis.__exit__()
