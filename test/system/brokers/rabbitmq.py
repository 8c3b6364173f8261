"""RabbitMQ, read back with pika."""
import contextlib
import logging
import os
import pathlib
import shutil
import signal
import subprocess
import tempfile
import time

import pika

import ending
from brokers.broker import Broker, Message
from brokers.ports import free_ports
from waiting import deadline

logging.getLogger("pika").setLevel(logging.CRITICAL)  # failures are raised as well

EXCHANGE, QUEUE = "events", "everything"
MAX_MESSAGE_BYTES = 1_000_000
PREFIX = "cloudEvents:"  # of a header that is an attribute

# Erlang's name server would outlive the broker. Here both end when this script's standard input does: with the test,
# however that ends.
RUNNER = """
epmd -port "$ERL_EPMD_PORT" -address 127.0.0.1 </dev/null &
/usr/lib/rabbitmq/bin/rabbitmq-server </dev/null &
read -r _
kill -9 0
"""


class RabbitMQ(Broker):
    """With an exchange of type topic, and a queue that gets everything from it."""
    kind = "rabbitmq"
    reader = "pika"
    user, password = "publisher", "s3cret-of-rabbit"

    def __init__(self, *configuration):
        """`configuration`: more lines of rabbitmq.conf."""
        self.directory = pathlib.Path(tempfile.mkdtemp(prefix="retrysafe-rabbitmq-", dir="/tmp"))
        self.port, self.tls_port, self._distribution_port, self._epmd_port = free_ports(4)
        self._process, self._messages = None, []
        (self.directory / "plugins").write_text("[].\n")
        self.certificate = self.directory / "certificate"  # of "localhost", by itself
        subprocess.run(["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes",
                        "-keyout", self.directory / "key", "-out", self.certificate, "-days", "2", "-subj", "/CN=localhost",
                        "-addext", "subjectAltName=DNS:localhost"], check=True, capture_output=True)
        (self.directory / "rabbitmq.conf").write_text("\n".join([
            f"listeners.tcp.1 = 127.0.0.1:{self.port}", f"default_user = {self.user}", f"default_pass = {self.password}",
            f"listeners.ssl.1 = 127.0.0.1:{self.tls_port}", f"ssl_options.cacertfile = {self.certificate}",
            f"ssl_options.certfile = {self.certificate}", f"ssl_options.keyfile = {self.directory}/key",
            "loopback_users = none", f"max_message_size = {MAX_MESSAGE_BYTES}", "disk_free_limit.absolute = 1MB",
            *configuration, ""]))
        self.directory.chmod(0o755)

    def __exit__(self, *_):
        self.kill()
        shutil.rmtree(self.directory)

    def _run(self, *command, **options):
        """As the ordinary user that the package made: Erlang's cookie and the data have to be of one user."""
        directory = str(self.directory)
        environment = os.environ | {
            "HOME": directory, "ERL_EPMD_PORT": str(self._epmd_port), "RABBITMQ_CONF_ENV_FILE": f"{directory}/none",
            "RABBITMQ_NODENAME": f"retrysafe{self.port}@localhost", "RABBITMQ_CONFIG_FILE": f"{directory}/rabbitmq.conf",
            "RABBITMQ_DIST_PORT": str(self._distribution_port), "RABBITMQ_MNESIA_BASE": f"{directory}/data",
            "RABBITMQ_LOG_BASE": f"{directory}/log", "RABBITMQ_PID_FILE": f"{directory}/pid",
            "RABBITMQ_ENABLED_PLUGINS_FILE": f"{directory}/plugins",
            "RABBITMQ_SERVER_ADDITIONAL_ERL_ARGS": "-start_epmd false -kernel inet_dist_use_interface {127,0,0,1} +S 2:2",
        }
        if os.getuid() == 0:
            for path in [self.directory, *self.directory.rglob("*")]:
                shutil.chown(path, "rabbitmq", "rabbitmq")
            command = ["runuser", "-u", "rabbitmq", "--", *command]
        return subprocess.Popen(command, env=environment, cwd=directory, text=True, **options)

    def start(self):
        with open(self.directory / "out", "a") as out, ending.deferred():
            self._process = self._run("bash", "-c", RUNNER, stdin=subprocess.PIPE, stdout=out, stderr=out,
                                      start_new_session=True)
        ends = deadline(60)
        while not self._is_up():
            assert time.monotonic() < ends, (self.directory / "out").read_text()
            time.sleep(0.1)

    def _is_up(self):
        assert self._process.poll() is None, (self.directory / "out").read_text()
        try:
            with self.channel() as channel:
                channel.exchange_declare(EXCHANGE, "topic", durable=True)
                channel.queue_declare(QUEUE, durable=True)
                channel.queue_bind(QUEUE, EXCHANGE, "#")
        except (OSError, pika.exceptions.AMQPError):
            return False
        return True

    def kill(self):
        if self._process:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.stdin.close()
            self._process.wait()
        self._process = None

    def control(self, *arguments):
        """rabbitmqctl"""
        process = self._run("/usr/lib/rabbitmq/bin/rabbitmqctl", *arguments, stdin=subprocess.DEVNULL,
                            stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        output, _ = process.communicate(timeout=60)
        assert process.returncode == 0, output
        return output

    @contextlib.contextmanager
    def channel(self, vhost="/"):
        credentials = pika.PlainCredentials(self.user, self.password)
        connection = pika.BlockingConnection(pika.ConnectionParameters("127.0.0.1", self.port, vhost, credentials))
        try:
            yield connection.channel()
        finally:
            if connection.is_open:
                connection.close()

    def options(self):
        return {"host": "127.0.0.1", "port": self.port, "user": self.user, "password": self.password, "exchange": EXCHANGE}

    def wrong_credentials(self):
        return self.options() | {"password": "hunter2-hunter2"}

    def wrong_host(self):
        return self.options() | {"host": "nowhere.invalid"}

    def too_large(self):
        return MAX_MESSAGE_BYTES + 1

    def drain(self, queue=QUEUE):
        """(method, properties, body) of what is in a queue, which is empty afterwards."""
        found = []
        with self.channel() as channel:
            # Acknowledged by hand: what is on its way when the broker is slow would be gone with the consumer.
            while channel.queue_declare(queue, passive=True).method.message_count:
                last = None
                for method, properties, body in channel.consume(queue, inactivity_timeout=0.5):
                    if method is None:
                        break
                    found.append((method, properties, body))
                    last = method.delivery_tag
                if last:
                    channel.basic_ack(last, multiple=True)
                channel.cancel()
        return found

    def read(self):
        for _, properties, body in self.drain():
            attributes = {name.removeprefix(PREFIX): value for name, value in properties.headers.items() if name.startswith(PREFIX)}
            assert properties.message_id == attributes["id"] and properties.type == attributes["type"]
            self._messages.append(Message.of(attributes, body.decode() if properties.content_type else None))
        return list(self._messages)
