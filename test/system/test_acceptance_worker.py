"""What the worker promises when things die: nothing is lost, copies carry one id, a consumer has one effect."""
import os
import random
import signal
import subprocess
import threading
import time

import psycopg2
import pytest

from conftest import eventually, kill, make_database, run
from null_destination import NullDestination, worker_pids
from receiver import Receiver
from test_worker import can_connect, cluster, fault_of_the_next_worker


@pytest.fixture(scope="module")
def own():
    with cluster("retrysafe.poll_interval = 200ms", "fsync = off") as server:
        yield server


@pytest.fixture
def own_db(own):
    database = make_database(own)
    yield database
    database.close()


class Consumer:
    """A service with a database of its own: one row in `effects` for each event that it had not seen."""

    def __init__(self, database):
        self.database = database
        database.sql("CREATE TABLE public.effects (event_id text)")

    def take(self, request):
        connection = self.database.server.connect(self.database.name, autocommit=False)
        try:
            if run(connection, "SELECT retrysafe.inbox_accept('consumer', %s)", request.id)[0][0]:
                run(connection, "INSERT INTO public.effects VALUES (%s)", request.id)
            connection.commit()
        finally:
            connection.close()
        return 204

    def effects(self):
        return self.database.value("SELECT count(*) FROM public.effects")


def test_a6_the_worker_dies_between_ack_and_record(own_db, server):
    """The event arrives twice with one id, and the consumer has one effect."""
    consumer = Consumer(make_database(server))
    with Receiver() as receiver:
        receiver.behave(consumer.take)
        own_db.sql("SELECT outbox_create_destination('hook', 'http', %s)", f'{{"url": "{receiver.url}"}}')
        fault_of_the_next_worker(own_db, "worker.after_ack=kill")
        own_db.sql("SELECT outbox_emit(NULL, 'e1', 't', '1')")
        eventually(lambda: len(receiver.requests) == 2, timeout=30)
        eventually(lambda: can_connect(own_db.server))
        eventually(lambda: own_db.value("SELECT sent_at IS NOT NULL FROM outbox_events"))
        assert len(receiver.requests) == 2
        assert {request.id for request in receiver.requests} == {own_db.value("SELECT event_id::text FROM outbox_events")}
        assert consumer.effects() == 1
        assert own_db.server.log().count("was terminated by signal 9") >= 1


class Emitter(threading.Thread):
    """Emits about `rate` events a second, over whatever happens to the server. `committed` are those that it knows to
    be there; `asked` includes those whose COMMIT was not answered."""

    def __init__(self, db, rate):
        super().__init__(daemon=True)
        self.db, self.rate = db, rate
        self.committed, self.asked = [], []
        self.stop = threading.Event()

    def run(self):
        connection = None
        number = 0
        while not self.stop.is_set():
            try:
                if connection is None:
                    connection = self.db.server.connect(self.db.name)
                # A few per statement keep the rate up on a small machine.
                keys = [f"e{number + i}" for i in range(5)]
                number += 5
                self.asked += keys
                run(connection, "SELECT outbox_emit(NULL, k, 't', '1', 'o' || hashtext(k) %% 20) FROM unnest(%s) k", keys)
                self.committed += keys
                self.stop.wait(5 / self.rate)
            except psycopg2.Error:
                if connection is not None:
                    connection.close()
                connection = None
                self.stop.wait(0.05)


def test_case_21_twenty_rounds_of_dying(own_db):
    """Terminated, cancelled, killed workers, a killed postmaster, immediate stops: delivery resumes within 10 s of the
    server being up, nothing is lost, and what comes twice was in flight."""
    server = own_db.server
    batch = 200
    d = NullDestination(own_db, options='"delay_ms": 5', batch_events=batch)
    emitter = Emitter(own_db, 500)
    emitter.start()
    eventually(d.delivered)
    random_numbers = random.Random(21)
    rounds = ["terminate", "cancel", "kill worker", "kill postmaster", "immediate"] * 4
    random_numbers.shuffle(rounds)
    for action in rounds:
        if action in ("terminate", "cancel", "kill worker"):
            pid = eventually(lambda: worker_pids(own_db), timeout=15)[0]
            if action == "kill worker":
                kill(pid)
            else:
                kill(pid, signal.SIGTERM if action == "terminate" else signal.SIGINT)
        elif action == "kill postmaster":
            children = children_of(server.pid)
            kill(server.pid)
            # The new one may only start when the last process of the old one has noticed.
            eventually(lambda: not any(alive(pid) for pid in children), timeout=10,
                       message="a process outlived the postmaster")
            eventually(lambda: starts(server), timeout=10, message=server.log()[-2000:])
        else:
            server.pg_ctl("restart", "-m", "immediate")
        eventually(lambda: can_connect(server), timeout=30)
        before = len(d.delivered())
        began = time.monotonic()
        eventually(lambda: len(d.delivered()) > before, timeout=10,
                   message=f"delivery did not resume within 10 s of: {action}")
        assert time.monotonic() - began < 10
        time.sleep(random_numbers.random() * 0.3)
    emitter.stop.set()
    emitter.join()

    session = own_db.connect()
    there = {key for (key,) in run(session, "SELECT event_key FROM outbox_log")}
    assert set(emitter.committed) <= there <= set(emitter.asked)
    eventually(lambda: set(d.delivered()) >= there, timeout=30)
    delivered = d.delivered()
    assert set(delivered) == there, "something was delivered that is not there"
    assert len(delivered) - len(there) <= batch * len(rounds)
    order = {}
    for (key, ordering_key) in run(session, "SELECT event_key, ordering_key FROM outbox_log ORDER BY id"):
        order.setdefault(ordering_key, []).append(key)
    first = {key: i for i, key in reversed(list(enumerate(delivered)))}
    for keys in order.values():
        arrived = [first[key] for key in keys]
        assert arrived == sorted(arrived), "order within an ordering key"


def starts(server):
    try:
        server.pg_ctl("start")
        return True
    except subprocess.CalledProcessError:
        return False


def children_of(pid):
    found = []
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            try:
                with open(f"/proc/{entry}/stat") as stat:
                    if int(stat.read().rsplit(")", 1)[1].split()[1]) == pid:
                        found.append(int(entry))
            except (FileNotFoundError, ProcessLookupError):
                pass
    return found


def alive(pid):
    try:
        with open(f"/proc/{pid}/stat") as stat:
            return stat.read().rsplit(")", 1)[1].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False
