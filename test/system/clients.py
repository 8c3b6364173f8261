"""Clients that send requests all the time, whatever happens to the server, and what has to hold in the end."""
import collections
import threading
import time

import psycopg2

import closing
from conftest import eventually, run


class Clients:
    """Each sends one request after the other, and each request again, with its key, until there is an answer; to `db`,
    which is another one after a failover."""

    def __init__(self, db, number=4):
        self.db, self.number = db, number
        self.answers = {}                        # order of each key
        self.sent = collections.Counter()
        self._stop = threading.Event()
        self._threads = [threading.Thread(target=self._work, args=(n,)) for n in range(number)]
        db.sql("CREATE TABLE public.orders (id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY, key text NOT NULL)")

    def __enter__(self):
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_):
        self._stop.set()
        for thread in self._threads:
            thread.join()

    def _work(self, n):
        session = Session(self)
        i = 0
        while not self._stop.is_set():
            i += 1
            self.answers[f"client{n}-{i:05}"] = session.answer(f"client{n}-{i:05}")
        session.close()

    def have(self, more):
        """Waits for so many more answers of each."""
        wanted = {n: self._answered(n) + more for n in range(self.number)}
        eventually(lambda: all(self._answered(n) >= wanted[n] for n in range(self.number)), timeout=60)

    def _answered(self, n):
        return sum(key.startswith(f"client{n}-") for key in list(self.answers))


class Session:
    def __init__(self, clients):
        self.clients, self.db, self.connection = clients, None, None

    def close(self):
        if self.connection:
            self.connection.close()
        self.connection = None

    def answer(self, key):
        until = time.monotonic() + 60
        while True:
            try:
                if self.db is not self.clients.db or not self.connection:
                    self.close()
                    self.db = self.clients.db
                    self.connection = self.db.server.connect(self.db.name, autocommit=False)
                return request(self.connection, key)[1]
            except psycopg2.Error:
                self.close()
                assert time.monotonic() < until, f"no answer to {key}"
                time.sleep(0.01)


def request(connection, key):
    """(outcome, order): one order and one event, of which the key alone decides the event key."""
    ((outcome, response),) = run(connection, "SELECT outcome, response FROM idem_begin(%s, 'h')", key)
    if outcome != "new":
        connection.rollback()
        return outcome, response
    ((order,),) = run(connection, "INSERT INTO public.orders (key) VALUES (%s) RETURNING id", key)
    run(connection, "SELECT outbox_emit(%s, %s, 'order.placed', to_jsonb(%s::text), ordering_key => %s)", key, f"{key}:placed",
        key, key.split("-")[0])
    run(connection, "SELECT idem_complete(%s, to_jsonb(%s::bigint))", key, order)
    connection.commit()
    return outcome, order


def repeat(db, keys):
    """Outcomes of requests that are sent again."""
    connection = db.connect(autocommit=False)
    outcomes = {key: request(connection, key) for key in keys}
    connection.close()
    return outcomes


def positions(db):
    """By event key."""
    return dict(db.sql("SELECT event_key, id FROM outbox_events"))


def published(receiver):
    """Event keys by id, of everything that arrived. An id that stood for two events would be dropped as a duplicate."""
    keys = collections.defaultdict(set)
    for r in receiver.requests:
        keys[r.id].add(r.header("ce-eventkey"))
    assert [k for k in keys.values() if len(k) > 1] == []
    return {i: k for i, (k,) in keys.items()}


def assert_in_order(receiver):
    """Of each client first copies came in the order in which it made its requests."""
    first = dict.fromkeys(r.header("ce-eventkey") for r in receiver.requests)
    for client in {key.split("-")[0] for key in first}:
        keys = [key for key in first if key.startswith(f"{client}-")]
        assert keys == sorted(keys)


def everything_is_sent(db):
    eventually(lambda: db.value("SELECT count(*) FROM outbox_events WHERE sent_at IS NULL") == 0, timeout=60)


def assert_complete(db, answers, receiver):
    """Each answer is kept, has one order and one event, and exactly these events were published."""
    orders = dict(db.sql("SELECT key, id FROM public.orders"))
    assert db.value("SELECT count(*) FROM public.orders") == len(orders)
    assert answers.items() <= orders.items()
    everything_is_sent(db)
    closing.balance(db, "hook", receiver.ids, committed=[f"{key}:placed" for key in orders])
