"""The sink of kind redis through its C interface, against the real server, and against one that misbehaves."""
import contextlib
import json
import os
import re
import select
import signal
import socket
import struct
import subprocess
import time

import pytest

from brokers.redis import PASSWORD, Redis, free_port
from scripted_redis import ScriptedRedis
from sink import DELIVERED, FAILED_FINAL, FAILED_RETRY, TOP, UNREACHABLE, OpenError, Sink, event


@pytest.fixture(scope="module")
def server():
    with Redis() as one:
        yield one


@pytest.fixture(autouse=True)
def clean(server):
    server.cli("FLUSHALL")


@pytest.fixture
def sinks(server):
    """Opens sinks, whose calls must not block."""
    opened = []

    def open_sink(broker=server, allowed="127.0.0.1, ::1, localhost", **options):
        given = {name: value for name, value in broker.options(**options).items() if value is not None}
        opened.append(Timed("redis", given, allowed))
        return opened[-1]

    yield open_sink
    for one in opened:
        one.close()
        assert one.log_lines == []
        assert one.longest < 0.3, "a call blocked"


def eventually(condition, timeout=20):
    deadline = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


class Timed(Sink):
    longest = 0.0

    def timed(self, function, *arguments):
        begin = time.monotonic()
        result = function(*arguments)
        self.longest = max(self.longest, time.monotonic() - begin)
        return result

    def submit(self, an_event):
        return self.timed(super().submit, an_event)

    def collect(self):
        return self.timed(super().collect)

    def close(self):
        self.timed(super().close)

    def one(self, number=1, **parts):
        outcome, = self.send(event(number, **parts))
        return outcome.status, outcome.reason


def statuses(outcomes):
    return [outcome.status for outcome in outcomes]


def failure(sink, number=1, status=UNREACHABLE, **parts):
    got, reason = sink.one(number, **parts)
    assert got == status, reason
    return reason


# --- what arrives ----------------------------------------------------------------------------------------------

def test_fields(server, sinks):
    sink = sinks(source="shop")
    outcomes = sink.send(
        event(1, ordering_key="o 1", scope="s", payload='{"total": 1.50}',
              headers={"traceparent": "00-1", "X-Tenant": "Ö", "id": "not mine"}),
        event(2, payload=None))
    assert statuses(outcomes) == [DELIVERED, DELIVERED]
    assert [o.reason for o in outcomes] == ["", ""]
    assert server.entries() == [
        {"specversion": "1.0", "id": "00000000-0000-8000-8000-000000000001", "source": "shop", "type": "order.created",
         "time": "2026-01-02T03:04:05.678901Z", "partitionkey": "o 1", "eventkey": "order-1", "scope": "s",
         "traceparent": "00-1", "xtenant": "Ö", "datacontenttype": "application/json", "data": '{"total": 1.50}'},
        {"specversion": "1.0", "id": "00000000-0000-8000-8000-000000000002", "source": "shop", "type": "order.created",
         "time": "2026-01-02T03:04:05.678901Z", "eventkey": "order-2"}]


def test_the_stream_is_made_from_the_event(server, sinks):
    sink = sinks(stream="{type}:{header:tenant}")
    outcomes = sink.send(event(1, headers={"Tenant": "a"}), event(2), event(3, headers={"tenant": "b c"}))
    assert statuses(outcomes) == [DELIVERED, FAILED_FINAL, DELIVERED]
    assert outcomes[1].reason == 'the event has no header "tenant", which its route is made from'
    assert server.cli("XLEN", "order.created:a") == server.cli("XLEN", "order.created:b c") == "1"


def test_the_database(server, sinks):
    assert sinks(database=3).one() == (DELIVERED, "")
    assert server.cli("-n", "3", "XLEN", "events") == "1"
    assert server.cli("XLEN", "events") == "0"
    assert failure(sinks(database=99)) == "ERR DB index is out of range"


def test_old_entries_go(server, sinks):
    sink = sinks(max_length=100)
    assert set(statuses(sink.send(*map(event, range(1, 1001))))) == {DELIVERED}
    assert 100 <= int(server.cli("XLEN", "events")) < 300


def test_the_user_of_the_manual(server, sinks):
    line, = re.findall(r"`(ACL SETUSER [^`]*)`", (TOP / "docs/destinations.md").read_text())
    server.cli(*line.replace("…", "hunter2").split())
    try:
        assert sinks(user="courier", password="hunter2", stream="shop:{type}", database=1).one() == (DELIVERED, "")
        sink = sinks(user="courier", password="hunter2", stream="shop:{type}", replicas=1, timeout=100)
        assert "replica" in failure(sink), "WAIT is allowed, and nobody confirms"
    finally:
        server.cli("ACL", "DELUSER", "courier")


def test_a_user(server, sinks):
    server.cli("ACL", "SETUSER", "courier", "on", ">hunter2", "~events", "+xadd")
    try:
        assert sinks(user="courier", password="hunter2").one() == (DELIVERED, "")
        reason = failure(sinks(user="courier", password="hunter3"))
        assert reason == "WRONGPASS invalid username-password pair or user is disabled."
        # What it may not do is wrong with the destination, or with one stream of several.
        reason = failure(sinks(user="courier", password="hunter2", stream="other"))
        assert reason.startswith("NOPERM ") and reason.endswith(', stream "other"')
        sink = sinks(user="courier", password="hunter2", stream="{type}")
        outcomes = sink.send(event(1), event(2, type="events"))
        assert statuses(outcomes) == [FAILED_RETRY, DELIVERED] and "NOPERM" in outcomes[0].reason
        # Without the right to choose a database nothing goes to another one.
        reason = failure(sinks(user="courier", password="hunter2", database=1))
        assert reason.startswith("NOPERM ") and "select" in reason
        server.cli("ACL", "SETUSER", "courier", "-xadd")
        assert "NOPERM" in failure(sinks(user="courier", password="hunter2"))
    finally:
        server.cli("ACL", "DELUSER", "courier")


# --- how many at once ------------------------------------------------------------------------------------------

def test_many_are_pipelined_and_in_order(server, sinks):
    sink = sinks(max_in_flight=500)
    began = time.monotonic()
    assert set(statuses(sink.send(*(event(n, ordering_key=f"k{n}") for n in range(5000))))) == {DELIVERED}
    print(f"{5000 / (time.monotonic() - began):.0f} events/s")
    assert [json.loads(e["data"])["number"] for e in server.entries()] == list(range(5000))


def test_no_more_than_max_in_flight_are_taken(sinks):
    sink = sinks(max_in_flight=3)
    events = list(map(event, range(1, 6)))
    assert [sink.submit(e) for e in events] == [True, True, True, False, False]
    assert set(statuses(sink.send(*map(event, range(6, 6)), within=1))) == set()


def test_payloads_beyond_what_the_socket_takes_at_once(server, sinks):
    sink = sinks()
    big = json.dumps("x" * 900_000)
    assert set(statuses(sink.send(*(event(n, payload=big) for n in range(1, 33))))) == {DELIVERED}
    assert server.cli("XLEN", "events") == "32"


# --- what the server refuses -----------------------------------------------------------------------------------

def test_a_payload_that_is_too_large(server, sinks):
    sink = sinks()
    large = json.dumps("x" * server.too_large())
    for size in 0, 5_000_000:
        outcomes = sink.send(event(1), event(2), event(3, payload=json.dumps("x" * (server.too_large() + size))), event(4),
                             event(5, payload=large), event(6))
        assert statuses(outcomes) == [DELIVERED, DELIVERED, FAILED_FINAL, DELIVERED, FAILED_FINAL, DELIVERED]
        assert outcomes[2].reason == "too large for the server: ERR Protocol error: invalid bulk length"
    assert [e["eventkey"] for e in server.entries()] == ["order-1", "order-2", "order-4", "order-6"] * 2


def test_what_was_sent_behind_a_payload_that_is_too_large_is_sent_again(server, sinks):
    """A server that complains late: it has got all of them by then, and executed none."""
    seen = []

    def answer(words):
        if words[0] == b"AUTH":
            return b"+OK\r\n"
        seen.append(words[words.index(b"eventkey") + 1])
        if len(seen) < 3:
            return b""
        return b"-ERR Protocol error: invalid bulk length\r\n" if len(seen) == 3 else b"$3\r\n1-1\r\n"

    with ScriptedRedis(answer) as fake:
        large = json.dumps("x" * server.too_large())
        outcomes = sinks(fake).send(event(1, payload=large), event(2), event(3))
        assert statuses(outcomes) == [FAILED_FINAL, DELIVERED, DELIVERED]
    assert seen == [b"order-1", b"order-2", b"order-3", b"order-2", b"order-3"]


def test_a_key_of_another_type(server, sinks):
    server.cli("SET", "events", "1")
    assert failure(sinks()) == (
        'WRONGTYPE Operation against a key holding the wrong kind of value, stream "events"')
    # Other streams are not affected by one.
    outcomes = sinks(stream="{type}").send(*(event(n, type="events" if n % 2 else "other") for n in range(20)))
    assert statuses(outcomes) == [DELIVERED, FAILED_RETRY] * 10


def test_a_stream_that_takes_no_more(server, sinks):
    server.cli("XADD", "events", "18446744073709551615-18446744073709551615", "a", "b")
    assert "last possible ID" in failure(sinks())


def test_out_of_memory(server, sinks):
    sink = sinks()
    server.cli("CONFIG", "SET", "maxmemory", "1")
    try:
        outcomes = sink.send(event(1), event(2))
        assert statuses(outcomes) == [UNREACHABLE] * 2
        assert outcomes[0].reason == "OOM command not allowed when used memory > 'maxmemory'."
    finally:
        server.cli("CONFIG", "SET", "maxmemory", "0")
    assert sink.one(3) == (DELIVERED, "")


def test_a_read_only_server_is_left_for_another(server, sinks):
    sink = sinks()
    assert sink.one(1) == (DELIVERED, "")
    server.cli("CONFIG", "SET", "masterauth", PASSWORD)
    server.cli("REPLICAOF", "127.0.0.1", "1")
    try:
        connected = server.cli("INFO", "stats").split("total_connections_received:")[1].split()[0]
        assert failure(sink, 2) == "READONLY You can't write against a read only replica."
        assert failure(sink, 3).startswith("READONLY")
        now = server.cli("INFO", "stats").split("total_connections_received:")[1].split()[0]
        assert int(now) - int(connected) == 2, "one of redis-cli, one of the sink"
    finally:
        server.cli("REPLICAOF", "NO", "ONE")
    assert sink.one(4) == (DELIVERED, "")


def test_no_password_or_the_wrong_one(server, sinks):
    assert failure(sinks(password=None)) == "NOAUTH Authentication required."
    assert failure(sinks(password="hunter2")) == "WRONGPASS invalid username-password pair or user is disabled."


def test_a_password_that_nobody_wants(sinks):
    with Redis("--requirepass", "") as open_server:
        assert sinks(open_server, password=None).one() == (DELIVERED, "")
        assert "without any password configured" in failure(sinks(open_server))


def test_too_many_clients(server, sinks):
    server.cli("CONFIG", "SET", "maxclients", "1")
    holder = socket.create_connection(("127.0.0.1", server.port))
    try:
        assert "max number of clients reached" in failure(sinks())
    finally:
        holder.close()
        eventually(lambda: server.cli("CONFIG", "SET", "maxclients", "1000") == "OK")
    assert sinks().one() == (DELIVERED, "")


def test_members_of_a_cluster(sinks):
    def member():
        return Redis("--cluster-enabled", "yes", "--cluster-port", free_port(), "--requirepass", "")

    with member() as one, member() as other:
        assert failure(sinks(one, password=None)) == "CLUSTERDOWN Hash slot not served"
        one.cli("CLUSTER", "ADDSLOTSRANGE", "0", "8191")
        other.cli("CLUSTER", "ADDSLOTSRANGE", "8192", "16383")
        one.cli("CLUSTER", "MEET", "127.0.0.1", str(other.port), str(other.settings[3]))
        eventually(lambda: all("cluster_state:ok" in m.cli("CLUSTER", "INFO") for m in (one, other)))
        slot = int(one.cli("CLUSTER", "KEYSLOT", "events"))
        right, wrong = (one, other) if slot < 8192 else (other, one)
        assert sinks(right, password=None).one() == (DELIVERED, "")
        assert failure(sinks(wrong, password=None)) == (
            "the server is part of a Redis Cluster, which this kind does not support: "
            f"MOVED {slot} 127.0.0.1:{right.port}")


def test_a_server_that_is_loading(sinks):
    with Redis() as slow:
        slow.cli("EVAL", "for n = 1, 30000 do redis.call('INCR', 'n') end", "0")
        slow.kill()
        slow.settings = ("--key-load-delay", "100")  # microseconds for each of them
        slow.start(until="LOADING")
        assert failure(sinks(slow)) == "LOADING Redis is loading the dataset in memory"


# --- the connection --------------------------------------------------------------------------------------------

def test_nobody_listens(server, sinks):
    assert failure(sinks(port=free_port())) == "could not connect: Connection refused"
    # Refused at once, before anybody waits for an answer.
    broadcast = "255.255.255.255"
    assert failure(sinks(host=broadcast, allowed=broadcast)) == "could not connect: Network is unreachable"
    assert failure(sinks(host="no-such-host.invalid")).startswith('could not resolve host "no-such-host.invalid"')


def test_an_address_that_is_not_allowed(server, sinks):
    assert failure(sinks(allowed="")) == "address 127.0.0.1 is not allowed; see allowed_addresses, of the server or of the relay"
    assert sinks(host="localhost", allowed="localhost").one() == (DELIVERED, "")


@pytest.mark.skipif(not os.path.exists("/proc/net/if_inet6"), reason="there is no IPv6 here")
def test_an_address_of_ipv6(sinks):
    assert sinks(host="::1", allowed="::1").one() == (DELIVERED, "")


def test_an_idle_connection_that_the_server_closed_is_nobodys_failure(server, sinks):
    sink = sinks()
    for number in range(1, 4):
        assert sink.one(number) == (DELIVERED, "")
        server.cli("CLIENT", "KILL", "TYPE", "normal")
        poll = select.poll()
        poll.register(sink.module.wait_fd(sink.handle), select.POLLIN)
        assert poll.poll(5000)
        assert sink.collect() == ([], -1)


def test_killed_with_events_under_way(sinks):
    with Redis() as own:
        sink = sinks(own)
        assert sink.one(1) == (DELIVERED, "")
        os.kill(own.process.pid, signal.SIGSTOP)
        events = list(map(event, range(2, 12)))
        for e in events:
            assert sink.submit(e)
        assert sink.collect()[0] == []
        own.kill()
        outcomes = finish(sink, 10)
        assert {(o.status, o.reason) for o in outcomes} <= {
            (UNREACHABLE, reason) for reason in ("the server closed the connection",
                                                 "the connection is lost: Connection reset by peer")}
        assert "Connection refused" in failure(sink, 12)
        own.start()
        assert sink.one(13) == (DELIVERED, "")
        assert [e["eventkey"] for e in own.entries()][0] == "order-1"


def finish(sink, count, within=20):
    """What becomes of events that were submitted."""
    found = []
    poll = select.poll()
    poll.register(sink.module.wait_fd(sink.handle), select.POLLIN)
    deadline = time.monotonic() + within
    while len(found) < count:
        assert time.monotonic() < deadline
        outcomes, timeout = sink.collect()
        found += outcomes
        if not outcomes:
            poll.poll(timeout if timeout >= 0 else 1000)
    return found


def test_a_server_that_hangs(sinks):
    with Redis() as own:
        sink = sinks(own, timeout=300, connect_timeout=300)
        assert sink.one(1) == (DELIVERED, "")
        os.kill(own.process.pid, signal.SIGSTOP)
        began = time.monotonic()
        assert failure(sink, 2) == 'no answer within the time of option "timeout"'
        assert 0.3 <= time.monotonic() - began < 2
        # A hanging server still accepts connections, up to a point.
        assert failure(sink, 3) == "connecting took longer than connect_timeout"
        os.kill(own.process.pid, signal.SIGCONT)
        assert sink.one(4) == (DELIVERED, "")


def test_a_server_that_does_not_get_to_authentication(server, sinks):
    with ScriptedRedis(lambda words: b"") as fake:
        assert failure(sinks(fake, connect_timeout=200)) == "connecting took longer than connect_timeout"


def test_closing_with_events_under_way(server, sinks):
    with ScriptedRedis(lambda words: b"+OK\r\n" if words[0] != b"XADD" else b"") as fake:
        sink = sinks(fake)
        events = list(map(event, range(10)))
        for e in events:
            assert sink.submit(e)
        eventually(lambda: sink.collect() and fake.seen(b"XADD"))
        sink.close()


@pytest.mark.parametrize("answer, reason", [
    (b"HTTP/1.1 400 Bad Request\r\n\r\n", "the answer is not that of a Redis server"),
    (b":1\r\n", "the answer to XADD is not that of a Redis server"),
    (b"$-1\r\n", "the answer to XADD is not that of a Redis server"),
    (b"*3\r\n", "the answer is not that of a Redis server"),
    (b"$999999999\r\n" + b"x" * 70_000, "the answer is not that of a Redis server"),
    (b"-ERR unknown command 'XADD', with args beginning with: 'events' 'secret payload' \r\n", "ERR unknown command 'XADD'"),
    (b"-ERR Protocol error: invalid bulk length\r\n", "ERR Protocol error: invalid bulk length"),
    (b"-DENIED Redis is running in protected mode\r\n", "DENIED Redis is running in protected mode")])
def test_answers_of_other_servers(sinks, answer, reason):
    with ScriptedRedis(lambda words: answer if words[0] == b"XADD" else b"+OK\r\n") as fake:
        sink = sinks(fake)
        assert failure(sink) == reason
        assert failure(sink, 2) == reason


def test_an_error_of_which_nothing_is_known_is_the_events_own_unless_all_have_it(sinks):
    with ScriptedRedis(lambda words: b"+OK\r\n" if words[0] == b"AUTH" else b"-ERR strange\r\n" if b"order-7" in words else b"$3\r\n1-1\r\n") as fake:
        assert statuses(sinks(fake).send(*map(event, range(5, 10)))) == [
            DELIVERED, DELIVERED, FAILED_RETRY, DELIVERED, DELIVERED]
    with ScriptedRedis(lambda words: b"+OK\r\n" if words[0] == b"AUTH" else b"-ERR strange\r\n") as fake:
        assert statuses(sinks(fake).send(*map(event, range(4)))) == [UNREACHABLE] * 4
        assert sinks(fake).one() == (FAILED_RETRY, "ERR strange")


def test_a_server_that_speaks_first(sinks):
    with ScriptedRedis(lambda words: b"+OK\r\n", greeting=b"+hello\r\n") as fake:
        assert failure(sinks(fake, password=None)) in ("the server spoke without being asked",
                                                      "the answer to XADD is not that of a Redis server")


# --- replicas --------------------------------------------------------------------------------------------------

def test_replicas_are_waited_for(sinks):
    with Redis("--repl-diskless-sync-delay", "0") as master, Redis("--replicaof", f"127.0.0.1 {master.port}", "--masterauth", PASSWORD) as replica:
        eventually(lambda: "master_link_status:up" in replica.cli("INFO", "replication"))
        sink = sinks(master, replicas=1)
        assert set(statuses(sink.send(*map(event, range(1, 1001))))) == {DELIVERED}
        assert [e["id"] for e in replica.entries()] == [e["id"] for e in master.entries()]
        os.kill(replica.process.pid, signal.SIGSTOP)
        assert failure(sinks(master, replicas=1, timeout=300), 1001) == '0 of 1 replicas confirmed within the time of option "timeout"'
        os.kill(replica.process.pid, signal.SIGCONT)
        assert sink.one(1002) == (DELIVERED, "")
        large = json.dumps("x" * master.too_large())
        outcomes = sink.send(event(1), event(2, payload=large), event(3))
        assert (outcomes[1].status, outcomes[2].status) == (FAILED_FINAL, DELIVERED)


def test_a_server_that_is_lost_while_replicas_are_waited_for(sinks):
    """Nobody else may have the events."""
    def answer(words):
        if words[0] == b"WAIT":
            fake.connections[-1].shutdown(socket.SHUT_RDWR)
        return b"$3\r\n1-1\r\n" if words[0] == b"XADD" else b"+OK\r\n"

    with ScriptedRedis(answer) as fake:
        assert statuses(sinks(fake, replicas=1).send(event(1), event(2))) == [UNREACHABLE] * 2


# --- TLS -------------------------------------------------------------------------------------------------------

@pytest.fixture(scope="module")
def certificates(tmp_path_factory):
    """An authority, a certificate of it for localhost and 127.0.0.1, one for a client, and one of nobody."""
    folder = tmp_path_factory.mktemp("tls")

    def openssl(*words):
        subprocess.run(["openssl", *words], cwd=folder, check=True, capture_output=True)

    openssl("req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-keyout", "ca.key", "-out", "ca.pem", "-days", "2", "-subj", "/CN=ca")
    for name, extension in ("server", "subjectAltName=DNS:localhost,IP:127.0.0.1"), ("elsewhere", "subjectAltName=DNS:elsewhere"), \
            ("client", "subjectAltName=DNS:client"):
        openssl("req", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-keyout", f"{name}.key", "-out", f"{name}.csr", "-subj", f"/CN={name}")
        (folder / "extension").write_text(extension)
        openssl("x509", "-req", "-in", f"{name}.csr", "-CA", "ca.pem", "-CAkey", "ca.key", "-CAcreateserial", "-days", "2",
                "-out", f"{name}.pem", "-extfile", "extension")
    openssl("req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-keyout", "nobody.key", "-out", "nobody.pem", "-days", "2", "-subj", "/CN=x")
    return folder


@contextlib.contextmanager
def tls_server(certificates, certificate="server", clients="no"):
    port = free_port()
    with Redis("--tls-port", str(port), "--tls-cert-file", certificates / f"{certificate}.pem",
               "--tls-key-file", certificates / f"{certificate}.key", "--tls-ca-cert-file", certificates / "ca.pem",
               "--tls-auth-clients", clients) as one:
        one.tls_port = port
        yield one


def tls(server, certificates, ca="ca", **more):
    return {"port": server.tls_port, "tls": True, "ca_file": certificates / f"{ca}.pem"} | more


def test_tls(certificates, sinks):
    with tls_server(certificates) as server:
        for host in "localhost", "127.0.0.1":
            sink = sinks(server, host=host, **tls(server, certificates))
            assert set(statuses(sink.send(*(event(n, payload=json.dumps("x" * 20_000)) for n in range(500))))) == {DELIVERED}
        assert server.cli("XLEN", "events") == "1000"
        large = json.dumps("x" * server.too_large())
        assert statuses(sink.send(event(1), event(2, payload=large), event(3))) == [DELIVERED, FAILED_FINAL, DELIVERED]
        server.kill()
        assert failure(sink)
        server.start()
        assert sink.one(9)[0] == DELIVERED
        assert failure(sinks(server, **tls(server, certificates, ca="nobody"))).startswith(
            "TLS: the server's certificate is not trusted: ")
        # No authorities are named: those of the system do not know this one.
        assert failure(sinks(server, **tls(server, certificates, ca_file=None))).startswith(
            "TLS: the server's certificate is not trusted: ")
        assert "longer than connect_timeout" in failure(
            sinks(server, **tls(server, certificates, port=server.port, connect_timeout=200)))
        assert failure(sinks(server, port=server.tls_port, connect_timeout=200))


def test_a_certificate_of_another_host(certificates, sinks):
    with tls_server(certificates, "elsewhere") as server:
        assert failure(sinks(server, host="localhost", **tls(server, certificates))) == (
            "TLS: the server's certificate is not trusted: hostname mismatch")
        assert failure(sinks(server, **tls(server, certificates))) == (
            "TLS: the server's certificate is not trusted: IP address mismatch")


def test_a_certificate_of_our_own(certificates, sinks):
    with tls_server(certificates, clients="yes") as server:
        good = tls(server, certificates)
        assert sinks(server, **good, cert_file=certificates / "client.pem", key_file=certificates / "client.key").one() == (
            DELIVERED, "")
        assert "certificate required" in failure(sinks(server, **good))


@pytest.mark.parametrize("options, problem", [
    ({"host": "/run/redis"}, 'option "host" must be a name or an address'),
    ({"user": "me", "password": None}, 'option "user" needs option "password"'),
    ({"ca_file": "/x"}, 'option "ca_file" needs option "tls"'),
    ({"tls": True, "ca_file": "/does/not/exist"}, 'the file of option "ca_file" cannot be used: '),
    ({"tls": True, "cert_file": "/x"}, 'options "cert_file" and "key_file" need each other'),
    ({"stream": "{nope}"}, "not a template"),
    ({"stream": None}, 'option "stream" is missing')])
def test_what_can_never_work(server, options, problem):
    given = {name: value for name, value in server.options(**options).items() if value is not None}
    with pytest.raises(OpenError, match=problem.replace("{", "\\{")):
        Sink("redis", given)
