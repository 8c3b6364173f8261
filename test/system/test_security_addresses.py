"""Ways into the network behind the server: by the spelling of an address, by a name, by a name that changes, by a
redirection, by another scheme, by a socket in the file system. One address is allowed, 127.0.0.2; a listener on the same
port of others tells of every connection, before a byte is sent."""
import contextlib
import itertools
import json
import socket
import threading
import time

import psycopg2
import pytest

from conftest import eventually, make_database, run
from names import cluster_with_names
from receiver import Answer, Receiver

ALLOWED = "127.0.0.2"


@pytest.fixture(scope="module")
def guarded():
    with cluster_with_names(f"retrysafe.allowed_addresses = '{ALLOWED}'") as (server, names):
        yield server, names


@pytest.fixture
def db(guarded):
    server, _ = guarded
    database = make_database(server)
    yield database
    database.close()
    admin = server.connect()
    run(admin, f"DROP DATABASE {database.name} WITH (FORCE)")
    admin.close()


class Forbidden:
    """Listens where nobody is to connect, and counts who does."""

    def __init__(self, port):
        self.connections = []
        self.sockets = []
        for family, address in ((socket.AF_INET, "127.0.0.1"), (socket.AF_INET, "127.0.0.3"), (socket.AF_INET6, "::1")):
            with contextlib.suppress(OSError):  # a machine without IPv6
                listener = socket.socket(family)
                listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                listener.bind((address, port))
                listener.listen(100)
                self.sockets.append(listener)
                threading.Thread(target=self._count, args=(listener,), daemon=True).start()
        assert self.sockets

    def _count(self, listener):
        with contextlib.suppress(OSError):
            while True:
                connection, peer = listener.accept()
                self.connections.append(peer)
                connection.close()

    def close(self):
        for listener in self.sockets:
            with contextlib.suppress(OSError):
                listener.shutdown(socket.SHUT_RDWR)
            listener.close()


@pytest.fixture
def far():
    """A receiver at the allowed address, and the forbidden ones at the same port."""
    with Receiver(host=ALLOWED) as receiver:
        forbidden = Forbidden(receiver.port)
        yield receiver, forbidden
        forbidden.close()


def create(db, name, kind, options, **parameters):
    parameters = {"backoff": "50 ms", "backoff_max": "100 ms"} | parameters
    names = "".join(f", {key} => %s" for key in parameters)
    db.sql(f"SELECT outbox_create_destination(%s, %s, %s, 'earliest'{names})", name, kind, json.dumps(options),
           *parameters.values())


def options(kind, host, port):
    bracketed = f"[{host}]" if ":" in host else host
    return {
        "http": {"url": f"http://{bracketed}:{port}/"},
        "postgres": {"host": host, "port": port, "dbname": "d", "user": "u", "password": "p", "connect_timeout": "2s"},
        "redis": {"host": host, "port": port, "stream": "s", "connect_timeout": "2s"},
        "nats": {"servers": f"{bracketed}:{port}", "subject": "s", "connect_timeout": "2s"},
        "rabbitmq": {"host": host, "port": port, "user": "u", "password": "p", "connect_timeout": "2s"},
        "kafka": {"brokers": f"{bracketed}:{port}", "topic": "t", "timeout": "1s"},
    }[kind]


KINDS = ("http", "postgres", "redis", "nats", "rabbitmq", "kafka")

SPELLINGS = ["127.0.0.1", "127.1", "127.0.1", "0177.0.0.1", "0x7f.1", "0x7f000001", "2130706433", "017700000001", "0", "0.0.0.0",
             "localhost", "LOCALHOST", "localhost.", "::1", "::", "::ffff:127.0.0.1", "::ffff:7f00:1", "::127.0.0.1",
             "0:0:0:0:0:0:0:1", "64:ff9b::7f00:1", "2002:7f00:1::", "fe80::1", "fd00::1", "ff02::1", "10.0.0.1", "172.16.0.1",
             "192.168.0.1", "169.254.169.254", "100.64.0.1", "168.63.129.16", "224.0.0.1", "255.255.255.255", "127.0.0.3",
             "inner.test"]


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_no_spelling_of_an_address_leads_inside(guarded, db, far, kind):
    _, names = guarded
    receiver, forbidden = far
    names.say("inner.test", "127.0.0.1")
    db.sql("SELECT outbox_emit(NULL, 'e', 't', '{}')")
    made = []
    for number, host in enumerate(SPELLINGS):
        with contextlib.suppress(psycopg2.Error):  # refused at once is good as well
            create(db, f"d{number}", kind, options(kind, host, receiver.port))
            made.append(f"d{number}")
    assert len(made) > len(SPELLINGS) / 2
    eventually(lambda: db.value("SELECT bool_and(failures > 0 OR dead > 0) FROM outbox_status"), timeout=60)
    assert forbidden.connections == [] and receiver.requests == []
    assert db.value("SELECT sum(delivered) FROM outbox_status") == 0
    # The address itself is the reason wherever there is one.
    reasons = dict(db.sql("SELECT name, last_error FROM outbox_status"))
    for host in ("127.0.0.1", "127.1", "2130706433", "localhost", "inner.test"):
        assert "address 127.0.0.1 is not allowed" in reasons[f"d{SPELLINGS.index(host)}"] or host == "localhost", reasons


@pytest.mark.parametrize("url", ["http://１２７.０.０.１:{port}/", "http://①②⑦.⓪.⓪.①:{port}/", "http://127。0。0。1:{port}/",
                                 "http://127.0.0.1%2f@127.0.0.2:{port}/", "http://127.0.0.2#@127.0.0.1:{port}/",
                                 "http://127.0.0.1:{port}\\@127.0.0.2/", "http://127.0.0.1:{port};127.0.0.2/",
                                 "http://[::ffff:7f00:1%25lo]:{port}/", "http://inner.test:{port}/?u=http://127.0.0.2/",
                                 "http:127.0.0.1:{port}/", "http:///127.0.0.1:{port}/", "http://0x7f.0x0.0x0.0x1:{port}/"])
def test_urls_that_are_read_in_two_ways(guarded, db, far, url):
    """By who checks them and by who connects: the check is of the address that is connected to."""
    _, names = guarded
    receiver, forbidden = far
    names.say("inner.test", "127.0.0.1")
    db.sql("SELECT outbox_emit(NULL, 'e', 't', '{}')")
    try:
        create(db, "d", "http", {"url": url.format(port=receiver.port)})
    except psycopg2.Error as error:
        assert error.pgcode == "RS203"
        return
    eventually(lambda: db.value("SELECT failures > 0 FROM outbox_status"))
    assert forbidden.connections == []


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_a_name_that_changes_between_two_look_ups(guarded, db, far, kind):
    """It is the allowed address at one moment and another one at the next, again and again."""
    _, names = guarded
    receiver, forbidden = far
    stop = threading.Event()
    reasons = set()

    def flip():
        for answer in itertools.cycle((ALLOWED, "127.0.0.1", "127.0.0.3", "::1")):
            names.say("flips.test", answer)
            if stop.wait(0.003):
                return
    flipping = threading.Thread(target=flip)
    flipping.start()
    try:
        for number in range(5):
            create(db, f"d{number}", kind, options(kind, "flips.test", receiver.port), max_attempts=1000000)
        deadline = time.monotonic() + 6
        for number in itertools.count():
            db.sql("SELECT outbox_emit(NULL, %s, 't', '{}')", f"e{number}")
            # A URL that is set again is looked up again; otherwise libcurl remembers for a minute.
            db.sql("SELECT outbox_alter_destination(name, options => '{}') FROM outbox_status")
            reasons |= {reason for reason, in db.sql("SELECT last_error FROM outbox_status")}
            if time.monotonic() > deadline:
                break
    finally:
        stop.set()
        flipping.join()
    assert forbidden.connections == []
    assert "is not allowed" in str(reasons)


@pytest.mark.parametrize("status", [300, 301, 302, 303, 305, 307, 308])
@pytest.mark.parametrize("location", ["http://127.0.0.1:{port}/", "//127.0.0.1:{port}/", "file:///etc/passwd", "/again"])
def test_redirections_are_not_followed(guarded, db, far, status, location):
    receiver, forbidden = far
    target = location.format(port=receiver.port)
    receiver.behave(Answer(status, {"Location": target, "Refresh": f"0; url={target}", "Content-Location": target,
                                    "Alt-Svc": f'h2="127.0.0.1:{receiver.port}"', "Strict-Transport-Security": "max-age=9999"}))
    create(db, "d", "http", {"url": receiver.url})
    db.sql("SELECT outbox_emit(NULL, 'e', 't', '{}')")
    eventually(lambda: db.sql("SELECT reason FROM outbox_dead_letters") == [(f"HTTP {status}: redirects are not followed",)])
    assert len(receiver.requests) == 1 and forbidden.connections == []


def test_an_alternative_that_a_server_offers_is_not_taken(guarded, db, far):
    receiver, forbidden = far
    receiver.behave(Answer(200, {"Alt-Svc": f'h2="127.0.0.1:{receiver.port}", clear', "Connection": "close",
                                 "Strict-Transport-Security": "max-age=9999"}))
    create(db, "d", "http", {"url": receiver.url})
    for number in range(3):
        db.sql("SELECT outbox_emit(NULL, %s, 't', '{}')", f"e{number}")
        eventually(lambda: len(receiver.requests) == number + 1)
    assert forbidden.connections == []


@pytest.mark.parametrize("url", [
    "file:///etc/passwd", "ftp://127.0.0.2/", "gopher://127.0.0.2/_x", "dict://127.0.0.2/d:x", "ldap://127.0.0.2/", "smb://127.0.0.2/x",
    "telnet://127.0.0.2/", "tftp://127.0.0.2/x", "imap://127.0.0.2/", "rtsp://127.0.0.2/", "ws://127.0.0.2/", "unix:///tmp/socket",
    "http+unix://%2Ftmp%2Fsocket/", "javascript:alert(1)", "data:text/plain,x", "//127.0.0.2/", "127.0.0.2", "http:/127.0.0.2/",
    "http://", "http:///x", "http://:80/", "http://user@127.0.0.2/", "http://user:password@127.0.0.2/", "http://a@b@127.0.0.2/",
    "http://127.0.0.2/\r\nHost: x", "http://127.0.0.2/ x", "http://127.0.0.2/\t", " http://127.0.0.2/", "http://127.0.0.2\\x",
    "http://127.0.0.2/<>", 'http://127.0.0.2/"', "http://" + "a" * 3000])
def test_other_schemes_and_urls_with_more_in_them_are_refused(guarded, db, url):
    with pytest.raises(psycopg2.Error) as error:
        create(db, "d", "http", {"url": url})
    assert error.value.pgcode == "RS203"


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "http"])
def test_sockets_of_the_file_system_and_other_things_in_place_of_a_host(guarded, db, kind):
    """A server of the same machine may trust whoever comes through its socket. A folder has to be listed."""
    server, _ = guarded
    db.sql("SELECT outbox_emit(NULL, 'e', 't', '{}')")
    for number, host in enumerate((str(server.directory), "/tmp", "/var/run/postgresql", "@abstract", "unix:/tmp/s", "./socket",
                                   "127.0.0.1/../x", "a,/tmp", "postgresql:///d", "file:///etc/passwd")):
        try:
            create(db, f"d{number}", kind, options(kind, host, 5432 if host != str(server.directory) else server.port) | (
                {"user": "postgres", "dbname": db.name} if kind == "postgres" else {}))
        except psycopg2.Error as error:
            assert error.pgcode == "RS203"
    eventually(lambda: db.value("SELECT coalesce(bool_and(last_error IS NOT NULL), true) FROM outbox_status"), timeout=40)
    assert db.value("SELECT coalesce(sum(delivered), 0) FROM outbox_status") == 0


@pytest.mark.parametrize("values", [{"dbname": "host=127.0.0.1 dbname=x"}, {"dbname": "postgresql://127.0.0.1/x"}, {"user": "u host=127.0.0.1"},
                                    {"password": "p' hostaddr='127.0.0.1"}, {"application_name": "a hostaddr=127.0.0.1"},
                                    {"host": "127.0.0.2 hostaddr=127.0.0.1"}, {"host": "127.0.0.2,127.0.0.1"}])
def test_values_do_not_bring_parameters_of_a_connection(guarded, db, far, values):
    receiver, forbidden = far
    db.sql("SELECT outbox_emit(NULL, 'e', 't', '{}')")
    create(db, "d", "postgres", options("postgres", ALLOWED, receiver.port) | values)
    eventually(lambda: db.value("SELECT failures > 0 FROM outbox_status"))
    assert forbidden.connections == []


@pytest.mark.parametrize("option", ["hostaddr", "service", "passfile", "sslcert", "sslkey", "options", "target_session_attrs", "proxy",
                                    "unix_socket", "interface", "dns_servers", "resolve", "netrc", "socks", "krbsrvname", "require_password"])
def test_options_that_would_go_around_the_check_do_not_exist(guarded, db, option):
    for kind in KINDS:
        with pytest.raises(psycopg2.Error) as error:
            create(db, "d", kind, options(kind, ALLOWED, 1) | {option: "127.0.0.1"})
        assert error.value.pgcode == "RS203" and f'unknown option "{option}"' in str(error.value)


def test_the_environment_does_not_send_requests_elsewhere(guarded, far):
    """A proxy in the environment of the server, or a list of hosts that need none."""
    receiver, forbidden = far
    with pytest.MonkeyPatch.context() as patch:
        for name in ("http_proxy", "HTTP_PROXY", "https_proxy", "all_proxy", "ALL_PROXY"):
            patch.setenv(name, f"http://127.0.0.1:{receiver.port}")
        patch.setenv("PGHOSTADDR", "127.0.0.1")
        patch.setenv("PGPORT", str(receiver.port))
        with cluster_with_names(f"retrysafe.allowed_addresses = '{ALLOWED}'") as (server, _):
            database = make_database(server)
            create(database, "d", "http", {"url": receiver.url})
            create(database, "p", "postgres", options("postgres", ALLOWED, receiver.port))
            database.sql("SELECT outbox_emit(NULL, 'e', 't', '{}')")
            eventually(lambda: database.value("SELECT delivered FROM outbox_status WHERE name = 'd'") == 1)
            eventually(lambda: database.value("SELECT failures FROM outbox_status WHERE name = 'p'") > 0)
            database.close()
    assert forbidden.connections == []
