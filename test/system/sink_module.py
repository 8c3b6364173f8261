"""Drives a sink module through its C interface, without a server around it: what the worker does, in Python."""
import collections
import ctypes as c
import select
import time
import uuid

from conftest import TOP

DELIVERED, FAILED_RETRY, FAILED_FINAL, UNREACHABLE = range(4)


class Text(c.Structure):
    _fields_ = [("data", c.c_char_p), ("size", c.c_size_t)]

    @classmethod
    def of(cls, value):
        raw = None if value is None else str(value).encode()
        return cls(raw, 0 if raw is None else len(raw))


class Pair(c.Structure):
    _fields_ = [("name", Text), ("value", Text)]


LOG = c.CFUNCTYPE(None, c.c_char_p)


class Config(c.Structure):
    _fields_ = [("destination", Text), ("database", Text), ("options", c.POINTER(Pair)), ("option_count", c.c_size_t),
                ("allowed_addresses", Text), ("log", LOG)]


class EventStruct(c.Structure):
    _fields_ = [("tag", c.c_uint64), ("id", Text), ("type", Text), ("source", Text), ("time", Text),
                ("ordering_key", Text), ("event_key", Text), ("scope", Text), ("payload", Text),
                ("headers", c.POINTER(Pair)), ("header_count", c.c_size_t), ("attempt", c.c_int32)]


class OutcomeStruct(c.Structure):
    _fields_ = [("tag", c.c_uint64), ("status", c.c_int32), ("retry_after_ms", c.c_int32), ("reason", c.c_char * 256)]


class Module(c.Structure):
    _fields_ = [("magic", c.c_uint32), ("abi_version", c.c_uint32), ("size", c.c_uint32), ("flags", c.c_uint32),
                ("kind", c.c_char_p),
                ("open", c.CFUNCTYPE(c.c_void_p, c.POINTER(Config), c.c_char_p, c.c_size_t)),
                ("wait_fd", c.CFUNCTYPE(c.c_int, c.c_void_p)),
                ("submit", c.CFUNCTYPE(c.c_int, c.c_void_p, c.POINTER(EventStruct))),
                ("flush", c.CFUNCTYPE(None, c.c_void_p)),
                ("collect", c.CFUNCTYPE(c.c_size_t, c.c_void_p, c.POINTER(OutcomeStruct), c.c_size_t,
                                        c.POINTER(c.c_int))),
                ("close", c.CFUNCTYPE(None, c.c_void_p))]


Outcome = collections.namedtuple("Outcome", "status reason")


def event_id(key):
    """The same key is the same event."""
    return str(uuid.uuid5(uuid.NAMESPACE_URL, str(key)))


def pairs(values):
    return (Pair * max(len(values), 1))(*[Pair(Text.of(k), Text.of(v)) for k, v in values.items()])


class Sink:
    def __init__(self, kind, options, allowed="127.0.0.1, ::1, localhost", destination="dest"):
        library = c.CDLL(str(TOP / f"retrysafe_{kind}.so"))
        library.retrysafe_sink_module.restype = c.POINTER(Module)
        self.module = library.retrysafe_sink_module().contents
        self.logged = []
        self._log = LOG(self.logged.append)
        self._options = pairs(options)
        config = Config(Text.of(destination), Text.of("db"), self._options, len(options), Text.of(allowed), self._log)
        error = c.create_string_buffer(512)
        self.handle = self.module.open(c.byref(config), error, len(error))
        if not self.handle:
            raise ValueError(error.value.decode())
        self.fd = self.module.wait_fd(self.handle)
        self.longest = 0.0  # seconds that one call took
        self._tag = 0
        self._kept = {}

    def _timed(self, function, *arguments):
        start = time.monotonic()
        result = function(self.handle, *arguments)
        self.longest = max(self.longest, time.monotonic() - start)
        return result

    def submit(self, key, payload="{}", ordering_key=None, type="t", headers=None, attempt=1, scope=""):
        """True when the event was taken."""
        self._tag += 1
        headers = headers or {}
        event = EventStruct(self._tag, Text.of(event_id(key)), Text.of(type), Text.of("retrysafe/db"),
                            Text.of("2026-01-02T03:04:05.000006Z"), Text.of(ordering_key), Text.of(key), Text.of(scope),
                            Text.of(payload), pairs(headers), len(headers), attempt)
        self._kept[self._tag] = (key, event)
        if self._timed(self.module.submit, c.byref(event)):
            return True
        del self._kept[self._tag]
        return False

    def flush(self):
        self._timed(self.module.flush)

    def collect(self, capacity=64):
        """(outcomes by event key, wanted timeout)"""
        outcomes = (OutcomeStruct * capacity)()
        timeout = c.c_int(-1)
        count = self._timed(self.module.collect, outcomes, capacity, c.byref(timeout))
        result = {}
        for outcome in outcomes[:count]:
            key, _ = self._kept.pop(outcome.tag)
            result[key] = Outcome(outcome.status, outcome.reason.decode())
        return result, timeout.value

    def wait(self, timeout=20):
        """Works until every event has its outcome."""
        result = {}
        deadline = time.monotonic() + timeout
        while self._kept:
            found, wanted = self.collect()
            result.update(found)
            if self._kept and not found:
                left = deadline - time.monotonic()
                assert left > 0, f"no outcome for {[k for k, _ in self._kept.values()]}"
                select.select([self.fd], [], [], left if wanted < 0 else min(left, wanted / 1000))
        return result

    def deliver(self, *keys, **fields):
        """One batch; {event key: outcome}."""
        for key in keys:
            assert self.submit(key, **fields)
        self.flush()
        return self.wait()

    def close(self):
        if self.handle:
            self._timed(self.module.close)
            self.handle = None
