"""Destinations of kind `redis`: the real server, a real worker."""
import psycopg2
import pytest

from brokers.contract import (Contract, assert_complete_and_in_order, await_delivery, create, emit, emit_many, messages,
                              status)
from brokers.redis import Redis
from conftest import eventually


@pytest.fixture(scope="module")
def broker():
    with Redis() as one:
        yield one


class TestRedis(Contract):
    pass


def test_out_of_memory_is_shown_and_nothing_is_lost(db, broker):
    create(db, "d", "redis", broker.options())
    emit_many(db, 0, 500, keys=10)
    await_delivery(db, "d", 500)
    broker.cli("CONFIG", "SET", "maxmemory", "1")
    try:
        emit_many(db, 500, 500, keys=10)
        eventually(lambda: status(db, "d")["state"] == "backing off")
        assert status(db, "d")["last_error"] == "OOM command not allowed when used memory > 'maxmemory'."
    finally:
        broker.cli("CONFIG", "SET", "maxmemory", "0")
    await_delivery(db, "d", 1000)
    received = messages(db, broker)
    assert len(received) == 1000, "what was refused was not stored"
    assert_complete_and_in_order(db, received)


def test_events_go_where_the_template_says(db, broker):
    with pytest.raises(psycopg2.Error) as refused:
        create(db, "d", "redis", broker.options(stream="{kind}"))
    assert refused.value.pgcode == "RS203" and "{header:NAME}" in refused.value.diag.message_hint
    create(db, "d", "redis", broker.options(stream="{type}:{header:tenant}"))
    emit(db, "1", '{"n": 1}', "k", "paid", {"Tenant": "a"})
    emit(db, "2", '{"n": 2}', "k", "paid")
    emit(db, "3", '{"n": 3}', "k", "shipped", {"tenant": "a"})
    await_delivery(db, "d", 2)
    assert db.sql("SELECT event_key, attempts, reason FROM outbox_dead_letters") == [
        ("2", 1, 'the event has no header "tenant", which its route is made from')]
    for stream, data in ("paid:a", '{"n": 1}'), ("shipped:a", '{"n": 3}'):
        entry, = broker.entries(stream)
        assert entry["data"] == data


def test_a_stream_keeps_about_max_length(db, broker):
    create(db, "d", "redis", broker.options(stream="short", max_length=100))
    emit_many(db, 0, 2000)
    await_delivery(db, "d", 2000)
    assert 100 <= len(broker.entries("short")) < 400
