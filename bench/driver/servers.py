"""What events are delivered to: real servers, started by the modules that the tests start them with (test/system/brokers),
on a disk and with the settings of a careful operator."""
import glob
import pathlib
import re
import shutil
import subprocess

import ending
from driver import build, http
from driver.cluster import Cluster
from driver.queues import wait


class Server:
    """Made and started on an ExitStack, which ends it. Raises where it cannot be had."""
    kind: str
    settings: str           # which decide what an acknowledgement means

    def options(self):
        """Of the destination, beside the defaults of its kind."""

    def clear(self):
        """Forgets its messages."""

    def stored(self):
        """How many messages it has got since; None: it does not tell."""


class Http(Server):
    kind = "http"
    settings = "http/receiver.cpp answers and keeps nothing"

    def __init__(self, at_end, _):
        _, self._url = at_end.enter_context(http.receiver())

    def options(self):
        return {"url": self._url}


class Postgres(Server):
    kind = "postgres"
    settings = "a second server, an inbox table without a function; fsync and synchronous_commit on"

    def __init__(self, at_end, _):
        self._cluster = at_end.enter_context(Cluster(shared_buffers="256MB"))
        self._cluster.sql("""CREATE TABLE public.retrysafe_inbox (
            event_id uuid PRIMARY KEY, event_type text, ordering_key text, payload jsonb, headers jsonb, created_at timestamptz,
            received_at timestamptz NOT NULL DEFAULT now())""")

    def options(self):
        return {"host": "127.0.0.1", "port": self._cluster.port, "dbname": "postgres", "user": "postgres"}

    def clear(self):
        self._cluster.sql("TRUNCATE public.retrysafe_inbox")

    def stored(self):
        return self._cluster.sql("SELECT count(*) FROM public.retrysafe_inbox")[0][0]


class Kafka(Server):
    kind = "kafka"
    PARTITIONS = 4
    # Those of the project's own start script; the tests have others, for servers that live for seconds.
    JVM = ("-server", "-Xms1g", "-Xmx1g", "-XX:+UseG1GC", "-XX:MaxGCPauseMillis=20", "-XX:InitiatingHeapOccupancyPercent=35")

    def __init__(self, at_end, _):
        with ending.deferred():
            from brokers import kafka
        _need("kcat", "java", "mvn")
        self._broker = kafka.Kafka(java=("java", *self.JVM, *kafka.CLASSES))
        version = _version(f"{kafka.JARS}/kafka_*.jar", r"-([\d.]+)\.jar")
        self.settings = (f"Kafka {version}, one node, {self.PARTITIONS} partitions without replicas; the producer waits for all "
                         "in-sync replicas, which is this one; flushed by the operating system, as by default")
        self._topic, self._before = kafka.TOPIC, 0
        at_end.push(self._broker)
        self._broker.start()

    def options(self):
        return {"brokers": self._broker.brokers, "topic": self._topic}

    def clear(self):
        self._before += self.stored()

    def stored(self):
        wait(self._look_at_ends, "kcat to find the ends of the partitions", timeout=20, every=0.1)
        return sum(self._ends) - self._before

    def _look_at_ends(self):
        """It may fail while leaders are being found."""
        ends = [part for number in range(self.PARTITIONS) for part in ("-t", f"{self._topic}:{number}:-1")]
        shown = subprocess.run(["kcat", "-b", self._broker.brokers, "-Q", *ends], capture_output=True, text=True)
        self._ends = [int(offset) for offset in re.findall(r"offset (\d+)", shown.stdout)]
        return shown.returncode == 0 and len(self._ends) == self.PARTITIONS


class Nats(Server):
    kind = "nats"

    def __init__(self, at_end, folder):
        with ending.deferred():
            from brokers import nats
        _need(nats.SERVER)
        self._server = nats.Server(f"jetstream {{ store_dir: {folder}/nats, max_mem: 64MB, max_file: 16GB }}")
        at_end.callback(self._server.close)
        self._server.start()
        with self._server.client() as client:
            self.settings = (f"nats-server {client.info['version']}, JetStream with file storage and a duplicate window of two "
                             "minutes; flushed every two minutes, as by default")
            client.api("STREAM.CREATE.EVENTS", name="EVENTS", subjects=["events.>"], storage="file",
                       duplicate_window=120 * 10 ** 9)

    def options(self):
        return {"servers": f"127.0.0.1:{self._server.port}", "subject": "events.{type}"}

    def clear(self):
        self._ask("STREAM.PURGE.EVENTS")

    def stored(self):
        return self._ask("STREAM.INFO.EVENTS")["state"]["messages"]

    def _ask(self, call):
        with self._server.client() as client:
            return client.api(call)


class RabbitMQ(Server):
    kind = "rabbitmq"

    def __init__(self, at_end, _):
        with ending.deferred():
            from brokers import rabbitmq
        version = _version("/usr/lib/rabbitmq/lib/rabbitmq_server-*", r"-([\d.]+)$")
        self.settings = (f"RabbitMQ {version}, one node, a durable classic queue behind an exchange of type topic; persistent "
                         "messages, which are confirmed when they are on disk")
        self._broker, self._queue = rabbitmq.RabbitMQ(), rabbitmq.QUEUE
        at_end.push(self._broker)
        self._broker.start()

    def options(self):
        return self._broker.options()

    def clear(self):
        with self._broker.channel() as channel:
            channel.queue_purge(self._queue)

    def stored(self):
        with self._broker.channel() as channel:
            return channel.queue_declare(self._queue, passive=True).method.message_count


class Redis(Server):
    kind = "redis"

    def __init__(self, at_end, folder):
        with ending.deferred():
            from brokers import redis
        _need("redis-server", "redis-cli")
        self._broker = redis.Redis("--dir", folder, "--appendfsync", "everysec")
        at_end.push(self._broker)
        self._broker.start()
        version = re.search(r"redis_version:(\S+)", self._broker.cli("INFO", "server"))[1]
        self.settings = f"Redis {version}, appendonly yes, appendfsync everysec; no replica is waited for"

    def options(self):
        return self._broker.options()

    def clear(self):
        self._broker.cli("DEL", "events")

    def stored(self):
        return int(self._broker.cli("XLEN", "events"))


ALL = (Http, Postgres, Kafka, Nats, RabbitMQ, Redis)


def _need(*programs):
    for program in programs:
        if not shutil.which(program):
            raise FileNotFoundError(f"{pathlib.Path(program).name} is not installed")


def _version(pattern, expression):
    """That the name of a file or folder tells."""
    found = [match[1] for path in glob.glob(pattern) if (match := re.search(expression, path))]
    if not found:
        raise FileNotFoundError(f"{pattern} is not there")
    return max(found)
