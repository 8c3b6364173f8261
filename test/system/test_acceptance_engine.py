"""Acceptance A7 and A9: several workers, and events that commit late."""
import collections
import threading
import time

from conftest import eventually, run


def test_a7_several_workers_share_the_work_and_no_batch(db):
    """No event is in the hands of two within a valid lease, and all of them work."""
    workers, shards = 4, 8
    db.sql("SELECT outbox_create_destination('d', 'pull', shards => %s)", shards)
    stop = threading.Event()
    in_hand, lock = {}, threading.Lock()
    handled = collections.Counter()
    sent, errors = [], []

    def writer():
        c = db.connect()
        n = 0
        while not stop.is_set():
            n += 1
            run(c, "SELECT outbox_emit(NULL, %s || '-' || i, 't', '{}', 'k' || i) FROM generate_series(1, 16) i", f"e{n}")
            time.sleep(0.005)

    def worker(number):
        c = db.connect()
        while not errors and not (total and len(sent) >= total[0]):
            rows = run(c, "SELECT batch, event_key FROM outbox_fetch('d', 20, lease => '4 s')")
            if not rows:
                time.sleep(0.002)
                continue
            keys = [row[1] for row in rows]
            with lock:
                for key in keys:
                    if key in in_hand:
                        errors.append(f"{key} is with {in_hand[key]} and with {number}")
                    in_hand[key] = number
            time.sleep(0.002)  # the work
            sent.extend(keys)
            with lock:
                for key in keys:
                    del in_hand[key]
            run(c, "SELECT outbox_ack(%s)", rows[0][0])
            handled[number] += len(rows)

    def guarded(target, *arguments):
        try:
            target(*arguments)
        except Exception as error:
            errors.append(repr(error))
            stop.set()

    total = []
    threads = [threading.Thread(target=guarded, args=(writer,))]
    threads += [threading.Thread(target=guarded, args=(worker, n)) for n in range(workers)]
    for thread in threads:
        thread.start()
    try:
        eventually(lambda: errors or len([n for n in handled.values() if n > 100]) == workers, 30)
    finally:
        stop.set()
        threads[0].join()
        total.append(db.value("SELECT count(*) FROM outbox_log"))
        for thread in threads:
            thread.join()
    assert not errors, errors[:3]
    assert len(sent) == len(set(sent)) == total[0]


def test_a7_a_dead_workers_batch_is_worked_after_its_lease_only(db):
    db.sql("SELECT outbox_create_destination('d', 'pull')")
    db.sql("SELECT outbox_emit(NULL, 'a', 't', '{}')")
    dead, heir = db.connect(), db.connect()
    started = time.monotonic()
    assert run(dead, "SELECT event_key FROM outbox_fetch('d', lease => '1 s')") == [("a",)]
    dead.close()
    assert eventually(lambda: run(heir, "SELECT event_key FROM outbox_fetch('d')")) == [("a",)]
    assert time.monotonic() - started >= 1


def test_a9_an_event_that_commits_late_is_not_skipped(db):
    db.sql("SELECT outbox_create_destination('d', 'pull')")
    late, prepared, client = db.connect(autocommit=False), db.connect(), db.connect()

    def fetch():
        rows = run(client, "SELECT batch, id, event_key FROM outbox_fetch('d')")
        if rows:
            run(client, "SELECT outbox_ack(%s)", rows[0][0])
        return [(row[1], row[2]) for row in rows]

    first = run(late, "SELECT outbox_emit(NULL, 'late', 't', '{}')")[0][0]
    run(prepared, "BEGIN")
    second = run(prepared, "SELECT outbox_emit(NULL, 'prepared', 't', '{}')")[0][0]
    run(prepared, "PREPARE TRANSACTION 'p'")
    third = db.value("SELECT outbox_emit(NULL, 'early', 't', '{}')")
    assert first < second < third
    assert fetch() == [(third, "early")]
    for n in range(3):  # the windows go on meanwhile
        db.sql("SELECT outbox_emit(NULL, %s, 't', '{}')", f"more{n}")
        assert len(fetch()) == 1
    late.commit()
    assert fetch() == [(first, "late")]
    db.sql("COMMIT PREPARED 'p'")
    assert fetch() == [(second, "prepared")]
    assert fetch() == []
