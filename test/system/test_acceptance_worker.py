"""What the worker promises when things die: nothing is lost, copies carry one id, a consumer has one effect."""
import bisect
import itertools
import json
import os
import random
import threading
import time
from urllib.parse import unquote

import psycopg2
import pytest

import closing
from conftest import cluster, eventually, in_spite_of_crashes, kill, make_database, run
from null_destination import emit, worker_pids
from receiver import Answer, Receiver
from strikes import broken, kill_postmaster
from workers import can_connect, fault_of_the_next_worker


@pytest.fixture(scope="module")
def own():
    with cluster("retrysafe.poll_interval = 200ms", "fsync = off") as server:
        yield server


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
        in_spite_of_crashes(lambda: own_db.sql("SELECT outbox_emit(NULL, 'e1', 't', '1')"))
        eventually(lambda: len(receiver.requests) == 2, timeout=30)
        eventually(lambda: can_connect(own_db.server))
        eventually(lambda: own_db.value("SELECT sent_at IS NOT NULL FROM outbox_events"))
        assert len(receiver.requests) == 2
        assert {request.id for request in receiver.requests} == {own_db.value("SELECT event_id::text FROM outbox_events")}
        assert consumer.effects() == 1
        closing.balance(own_db, "hook", receiver.ids, committed=["e1"])
        assert own_db.server.log().count("was terminated by signal 9") >= 1


class Emitter(threading.Thread):
    """Commits about `rate` events a second, five in a transaction, over whatever happens to the server. Others are
    taken back by a ROLLBACK, to a savepoint or of all. `committed` are those that it knows to be there; `asked` includes
    those whose COMMIT was not answered."""

    def __init__(self, db, rate):
        super().__init__(daemon=True)
        self.db, self.rate = db, rate
        self.committed, self.asked, self.taken_back = [], [], []
        self.stop = threading.Event()

    def run(self):
        connection = None
        due = time.monotonic()
        for number in itertools.count():
            if self.stop.wait(max(0, due - time.monotonic())):
                break
            try:
                if connection is None:
                    connection = self.db.server.connect(self.db.name, autocommit=False)
                    due = time.monotonic()
                if number % 2 == 0:
                    self.take_back(connection, number, to_savepoint=number % 4 == 0)
                keys = [f"e{number}-{i}" for i in range(5)]
                self.emit(connection, keys)
                self.asked += keys
                connection.commit()
                self.committed += keys
                due += 5 / self.rate
            except psycopg2.Error:
                if connection is not None:
                    connection.close()
                connection = None
                due = time.monotonic() + 0.05
        if connection is not None:
            connection.close()

    def take_back(self, connection, number, to_savepoint):
        keys = [f"r{number}-{i}" for i in range(2)]
        self.taken_back += keys
        if to_savepoint:
            run(connection, "SAVEPOINT s")
        self.emit(connection, keys)
        if to_savepoint:
            run(connection, "ROLLBACK TO SAVEPOINT s")
        else:
            connection.rollback()

    @staticmethod
    def emit(connection, keys):
        run(connection, "SELECT outbox_emit(NULL, k, 't', to_jsonb(k), 'o' || hashtext(k) %% 20, '{\"h\": \"v\"}')"
                        " FROM unnest(%s) k", keys)


@pytest.mark.slow
def test_case_21_twenty_rounds_of_dying(own_db):
    """Terminated, cancelled, killed workers, a killed postmaster, immediate stops: delivery resumes within 10 s of the
    server being up, nothing is lost or invented, and what comes twice was in flight and is the same."""
    server = own_db.server
    batch = 50
    log_before = len(server.log())
    random_numbers = random.Random(21)
    rounds = list(STRIKES) * 4
    random_numbers.shuffle(rounds)
    begins = []
    with Receiver() as receiver:
        receiver.behave(Answer(204, delay=0.005))
        own_db.sql("SELECT outbox_create_destination('d', 'http', %s, batch_events => %s)",
                   json.dumps({"url": receiver.url}), batch)
        emitter = Emitter(own_db, 500)
        emitter.start()
        eventually(lambda: receiver.requests)
        for action in rounds:
            before = worker_pids(own_db)
            assert len(before) == 1
            received, asked = len(receiver.requests), len(emitter.asked)
            STRIKES[action](server, before[0])
            eventually(lambda: can_connect(server), timeout=30)
            up = time.monotonic()
            if action == "cancel":  # the worker survives that: what shows that it goes on is an event from afterwards
                resumed = eventually(lambda: next((r for r in receiver.requests[received:]
                                                   if key_of(r) in emitter.asked[asked:]), None),
                                     timeout=10, message="delivery ended with pg_cancel_backend")
                begins.append(received)
            else:
                resumed = eventually(lambda: next(iter(sent_by(set(worker_pids(own_db)) - set(before),
                                                               receiver.requests[received:])), None),
                                     timeout=10, message=f"no new worker delivered within 10 s of: {action}")
                begins.append(receiver.requests.index(resumed))  # what is before may be a copy that the old one still sent
            assert resumed.at - up < 10
            time.sleep(random_numbers.random() * 0.3)
        emitter.stop.set()
        emitter.join()
        emit(own_db, "last")  # positions that nobody committed, behind the last event, would look like backlog
        eventually(lambda: status(own_db)["backlog"] == 0 and "last" in map(key_of, receiver.requests), timeout=30)
        requests = receiver.requests

    events = own_db.sql("SELECT event_id::text, event_key, ordering_key FROM outbox_events ORDER BY id")
    there = {key for (_, key, _) in events}
    assert there <= set(emitter.asked) | {"last"} and len(emitter.taken_back) > 100
    closing.balance(own_db, "d", [request.id for request in requests], committed=[*emitter.committed, "last"],
                    rolled_back=emitter.taken_back)
    assert {(r.id, key_of(r)) for r in requests} == {(event_id, key) for event_id, key, _ in events}
    assert status(own_db) == {"backlog": 0, "delivered": len(events), "parked_retry": 0, "parked_blocked": 0, "dead": 0}

    # Copies: at most a batch of them by each worker that follows another, and each like the first but for the time of sending.
    copies, first = [0] * len(rounds), {}
    for number, request in enumerate(requests):
        same = [request.method, request.path, request.body,
                [(name, value) for name, value in request.headers if name.lower() != "webhook-timestamp"]]
        if first.setdefault(request.id, (number, same))[0] != number:
            copies[bisect.bisect_right(begins, number) - 1] += 1
            assert first[request.id][1] == same
    assert max(copies) <= batch, list(zip(rounds, copies))

    order = {}
    for event_id, _, ordering_key in events:
        order.setdefault(ordering_key, []).append(first[event_id][0])
    assert all(arrived == sorted(arrived) for arrived in order.values()), "order within an ordering key"

    log = server.log()[log_before:]
    assert log.count("was terminated by signal 9") == rounds.count("kill worker")


def status(db):
    columns = ("backlog", "delivered", "parked_retry", "parked_blocked", "dead")
    return dict(zip(columns, db.sql(f"SELECT {', '.join(columns)} FROM outbox_status WHERE name = 'd'")[0]))


def key_of(request):
    return unquote(request.header("ce-eventkey"))


def sent_by(pids, requests):
    """Those of the requests that came over connections which these processes hold."""
    sockets = set()
    for pid in pids:
        try:
            sockets |= {os.readlink(entry.path) for entry in os.scandir(f"/proc/{pid}/fd")}
        except OSError:
            pass  # the process, or one of its descriptors, is gone
    with open("/proc/net/tcp") as connections:
        fields = [line.split() for line in connections][1:]
    ports = {int(local.rsplit(":", 1)[1], 16) for _, local, *_, inode in (f[:10] for f in fields)
             if f"socket:[{inode}]" in sockets}
    return [request for request in requests if request.port in ports]


# --- the strikes of case 21: each returns when the server is up again, or about to be -------------------------------

def terminate(server, pid):
    signal_from_sql(server, "pg_terminate_backend", pid)


def cancel(server, pid):
    signal_from_sql(server, "pg_cancel_backend", pid)


def signal_from_sql(server, function, pid):
    connection = server.connect()
    assert run(connection, f"SELECT {function}(%s)", pid) == [(True,)]
    connection.close()


def kill_worker(server, pid):
    witness = server.connect()  # the server ends all sessions when it notices
    kill(pid)
    eventually(lambda: broken(witness))


def kill_postmaster_of(server, _):
    kill_postmaster(server)


def stop_immediately(server, _):
    server.pg_ctl("restart", "-m", "immediate")


STRIKES = {"terminate": terminate, "cancel": cancel, "kill worker": kill_worker, "kill postmaster": kill_postmaster_of,
           "stop immediately": stop_immediately}
