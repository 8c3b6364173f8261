"""Apache Kafka: one node in KRaft mode, from the jars that the project publishes, on Debian's Java.

As a program (python3 -m brokers.kafka) it fetches the jars and prints where they are.
"""
import base64
import collections
import contextlib
import ctypes
import fcntl
import hashlib
import json
import os
import pathlib
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import uuid

import ending
from brokers.broker import Broker, Message
from brokers.librdkafka import INVALID_REPLICATION_FACTOR, Failure, configure_topic, create_topic
from brokers.ports import free_ports
from waiting import deadline

HERE = pathlib.Path(__file__).resolve().parent / "kafka_jars"
JARS = HERE.parents[3] / "build/kafka"
TOPIC = "events"
USER, PASSWORD = "shop", "correct-horse"  # may do everything
GUEST = "guest"  # may do nothing; the same password
CLASSES = ["-Dorg.slf4j.simpleLogger.defaultLogLevel=warn", "-cp", f"{JARS}/*"]
# Short-lived, so the quick compiler and the collector without threads.
JAVA = ["java", "-XX:TieredStopAtLevel=1", "-XX:+UseSerialGC", "-Xmx256m", *CLASSES]


def run_maven(arguments, what):
    """Says how far it is, since it may take minutes: Maven first fetches its own parts."""
    print(f"Maven fetches {what} and what it needs itself. Once; it may take minutes.", file=sys.stderr, flush=True)
    files, kilobytes, last_lines, said_at = 0, 0.0, collections.deque(maxlen=20), time.monotonic()
    with subprocess.Popen(["mvn", "-B", "-f", HERE / "pom.xml", *arguments], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                          stderr=subprocess.STDOUT, text=True) as maven:
        for line in maven.stdout:
            last_lines.append(line)
            if fetched := re.search(r"Downloaded from .* \(([\d.]+) ([kM]?)B", line):
                files, kilobytes = files + 1, kilobytes + float(fetched[1]) * {"": 0.001, "k": 1, "M": 1000}[fetched[2]]
            if time.monotonic() - said_at > 5:
                said_at = time.monotonic()
                print(f"  {files} files, {kilobytes / 1000:.0f} MB so far", file=sys.stderr, flush=True)
    if maven.returncode:
        raise RuntimeError("Maven failed; mirrors and proxies are told to it in ~/.m2/settings.xml\n" + "".join(last_lines))


def fetch():
    """Has Maven bring the jars, once; each must be the one that SHA256SUMS names."""
    sums = HERE / "SHA256SUMS"
    stamp = JARS / "complete"
    wanted = hashlib.sha256(sums.read_bytes() + (HERE / "pom.xml").read_bytes()).hexdigest()
    JARS.parent.mkdir(exist_ok=True)
    with open(JARS.parent / "kafka.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if stamp.exists() and stamp.read_text() == wanted:
            return
        shutil.rmtree(JARS, ignore_errors=True)
        run_maven(["dependency:copy-dependencies", "-DincludeScope=runtime", f"-DoutputDirectory={JARS}"],
                  f"Kafka's {len(sums.read_text().splitlines())} libraries, 45 MB,")
        found = "".join(f"{hashlib.sha256(jar.read_bytes()).hexdigest()}  {jar.name}\n" for jar in sorted(JARS.glob("*.jar")))
        if not sums.read_text():
            sums.write_text(found)
        assert sorted(found.split("\n")) == sorted(sums.read_text().split("\n")), "not the jars of SHA256SUMS"
        stamp.write_text(wanted)


def die_with_parent():
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


def make_certificate(directory):
    """For localhost, by itself; files cert.pem and key.pem."""
    subprocess.run(["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-keyout", directory / "key.pem",
                    "-out", directory / "cert.pem", "-days", "2", "-subj", "/CN=localhost",
                    "-addext", "subjectAltName=DNS:localhost"], check=True, capture_output=True)
    (directory / "server.pem").write_text((directory / "key.pem").read_text() + (directory / "cert.pem").read_text())


class Kafka(Broker):
    kind = "kafka"
    reader = "kcat"

    def __init__(self, tls=False, java=JAVA, replica=False):
        """`java`: the command that runs the server. `replica`: a second node, to hold copies of partitions, and
        a listener of the first that says that it is to be reached at gate_port."""
        fetch()
        self._java = java
        self.directory = pathlib.Path(tempfile.mkdtemp(prefix="retrysafe-kafka-"))
        self.directory.chmod(0o755)
        self.port, self.login_port, self.tls_port, controller = free_ports(4)
        self.brokers = f"127.0.0.1:{self.port}"
        self._process = self._replica = None
        # "K": not to begin with a hyphen, which would make it an option.
        self._cluster = "K" + base64.urlsafe_b64encode(uuid.uuid4().bytes).decode()[1:22]
        listeners = [f"PLAINTEXT://127.0.0.1:{self.port}", f"SASL_PLAINTEXT://127.0.0.1:{self.login_port}"]
        settings = {
            "process.roles": "broker,controller", "node.id": 1, "log.dirs": self.directory / "data",
            "controller.quorum.voters": f"1@127.0.0.1:{controller}", "controller.listener.names": "CONTROLLER",
            "inter.broker.listener.name": "PLAINTEXT",
            "sasl.enabled.mechanisms": "PLAIN,SCRAM-SHA-256,SCRAM-SHA-512",
            "listener.name.sasl_plaintext.plain.sasl.jaas.config": self._jaas("plain.Plain", users=True),
            "listener.name.sasl_plaintext.scram-sha-256.sasl.jaas.config": self._jaas("scram.Scram"),
            "listener.name.sasl_plaintext.scram-sha-512.sasl.jaas.config": self._jaas("scram.Scram"),
            "authorizer.class.name": "org.apache.kafka.metadata.authorizer.StandardAuthorizer",
            "super.users": f"User:ANONYMOUS;User:{USER};User:CN=localhost",
            "auto.create.topics.enable": "false", "connection.failed.authentication.delay.ms": 0,
            # A node that was killed is let in again as soon as it is back.
            "broker.session.timeout.ms": 1000, "broker.heartbeat.interval.ms": 200,
            "num.network.threads": 1, "num.io.threads": 2, "background.threads": 1, "log.cleaner.enable": "false",
            "offsets.topic.replication.factor": 1,
        }
        if tls:
            make_certificate(self.directory)
            listeners.append(f"SSL://localhost:{self.tls_port}")
            settings |= {"ssl.keystore.type": "PEM", "ssl.keystore.location": self.directory / "server.pem",
                         "ssl.truststore.type": "PEM", "ssl.truststore.location": self.directory / "cert.pem",
                         "ssl.client.auth": "requested"}
        gate, behind_gate = [], []
        if replica:
            self.gate_port, self.behind_gate_port, replica_port = free_ports(3)
            gate, behind_gate = ([f"GATED://127.0.0.1:{port}"] for port in (self.gate_port, self.behind_gate_port))
        settings |= {"listeners": ",".join([*listeners, *behind_gate, f"CONTROLLER://127.0.0.1:{controller}"]),
                     "advertised.listeners": ",".join(listeners + gate),
                     "listener.security.protocol.map": "CONTROLLER:PLAINTEXT,PLAINTEXT:PLAINTEXT,GATED:PLAINTEXT,"
                                                       "SASL_PLAINTEXT:SASL_PLAINTEXT,SSL:SSL"}
        self._write("server.properties", settings)
        self._has_replica = replica
        if replica:
            own = f"PLAINTEXT://127.0.0.1:{replica_port}"
            self._write("replica.properties", settings | {
                "process.roles": "broker", "node.id": 2, "log.dirs": self.directory / "replica", "listeners": own,
                "advertised.listeners": own})

    def _write(self, name, settings):
        (self.directory / name).write_text("".join(f"{k}={v}\n" for k, v in settings.items()))

    @staticmethod
    def _jaas(module, users=False):
        names = "".join(f' user_{name}="{PASSWORD}"' for name in (USER, GUEST)) if users else ""
        return f"org.apache.kafka.common.security.{module}LoginModule required{names};"

    def _format(self, properties):
        """Gives the storage an identity, and the users that log in with SCRAM.

        With "eligible leader replicas" a partition may lose its last copy in sync: where a node alone is below
        min.insync.replicas and misses a heart-beat, it only remains eligible, which a change of the setting then forgets."""
        users = [part for mechanism in ("SCRAM-SHA-256", "SCRAM-SHA-512") for name in (USER, GUEST)
                 for part in ("--add-scram", f"{mechanism}=[name={name},password={PASSWORD}]")]
        subprocess.run([*JAVA, "kafka.tools.StorageTool", "format", "-t", self._cluster, "-c",
                        self.directory / properties, "--feature", "eligible.leader.replicas.version=0", *users],
                       check=True, stdout=subprocess.DEVNULL)

    def _run(self, properties):
        with open(self.directory / "log", "a") as log:
            return subprocess.Popen([*self._java, "kafka.Kafka", self.directory / properties], stdout=log, stderr=log,
                                    cwd=self.directory, preexec_fn=die_with_parent)

    def start(self):
        if not (self.directory / "data").exists():
            self._format("server.properties")
        with ending.deferred():
            self._process = self._run("server.properties")
        ends = deadline(60)
        made = False
        while True:
            assert self._process.poll() is None, (self.directory / "log").read_text()[-3000:]
            assert time.monotonic() < ends, "the broker does not come up"
            try:
                socket.create_connection(("127.0.0.1", self.port), 1).close()
                if not made:
                    self.create_topic(TOPIC, 4)
                    made = True
                if self._has_leader():
                    break
            except (OSError, RuntimeError, AssertionError):
                pass
            time.sleep(0.05)
        if self._has_replica and not self._replica:
            self._format("replica.properties")
            with ending.deferred():
                self._replica = self._run("replica.properties")
            while len(self._metadata(TOPIC)["brokers"]) < 2:
                assert time.monotonic() < ends, "the second node does not come up"
                time.sleep(0.05)

    def _metadata(self, topic):
        shown = subprocess.run(["kcat", "-b", self.brokers, "-L", "-J", "-t", topic, "-m", "2"], capture_output=True)
        if shown.returncode:
            raise RuntimeError(shown.stderr.decode())
        return json.loads(shown.stdout)

    def _has_leader(self):
        topic, = self._metadata(TOPIC)["topics"]
        return len(topic["partitions"]) > 0 and all(p["leader"] == 1 for p in topic["partitions"])

    def kill(self):
        self._process.kill()
        self._process.wait()

    def kill_replica(self, topic):
        """For good; waits until the first node leads the topic's partitions alone."""
        self._replica.kill()
        self._replica.wait()
        ends = deadline(60)
        while any([r["id"] for r in p["isrs"]] != [1] for p in self._metadata(topic)["topics"][0]["partitions"]):
            assert time.monotonic() < ends, "the second node is still in sync"
            time.sleep(0.05)

    def pause(self):
        """The process stands still: connections stay, nothing answers."""
        os.kill(self._process.pid, signal.SIGSTOP)

    def go_on(self):
        os.kill(self._process.pid, signal.SIGCONT)

    def __exit__(self, *_):
        for process in self._process, self._replica:
            if process:
                process.kill()
                process.wait()
        shutil.rmtree(self.directory)

    def create_topic(self, name, partitions=1, replicas=1, **config):
        """Waits for nodes that are shut out because they were late with a heart-beat: on a busy machine a second is short."""
        ends = deadline(20)
        while True:
            try:
                return create_topic(self.brokers, name, partitions, replicas, **config)
            except Failure as failure:
                if failure.code != INVALID_REPLICATION_FACTOR or time.monotonic() > ends:
                    raise
            time.sleep(0.05)

    def configure_topic(self, name, **config):
        configure_topic(self.brokers, name, **config)

    def options(self):
        # Larger than what the broker takes, so that the broker is asked.
        return {"brokers": self.brokers, "topic": TOPIC, "connect_timeout": "500ms", "max_message_bytes": 10_000_000}

    def wrong_credentials(self):
        return self.options() | {"brokers": f"127.0.0.1:{self.login_port}", "user": USER,
                                 "password": "hunter2", "sasl_mechanism": "plain"}

    def wrong_host(self):
        return self.options() | {"brokers": "no-such-host.invalid:9092"}

    def too_large(self):
        return 2_000_000

    def read(self):
        return [as_event(m) for m in self.messages()]

    def messages(self, topic=TOPIC):
        return read_messages(self.brokers, topic)


class KafkaMessage:
    def __init__(self, line):
        self.partition, self.offset, self.key, self.value = line["partition"], line["offset"], line["key"], line["payload"]
        names_and_values = line.get("headers", [])
        self.headers = dict(zip(names_and_values[::2], names_and_values[1::2]))


def as_event(message):
    attributes = {name.removeprefix("ce_"): value for name, value in message.headers.items() if name.startswith("ce_")}
    assert message.headers["event-id"] == attributes["id"] and message.key == attributes.get("partitionkey")
    assert message.headers.get("content-type") == (None if message.value is None else "application/json")
    return Message.of(attributes, message.value)


def read_messages(brokers, topic):
    """All of a topic, by partition and in the order of each, as kcat reads them."""
    shown = subprocess.run(["kcat", "-b", brokers, "-C", "-t", topic, "-o", "beginning", "-e", "-q", "-J"],
                           check=True, capture_output=True, timeout=60)
    return [KafkaMessage(json.loads(line)) for line in shown.stdout.splitlines()]


if __name__ == "__main__":
    fetch()
    print(JARS)
