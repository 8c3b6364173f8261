"""Drives a sink library through its C interface (src/sink/abi.h), as a publisher does."""
import ctypes
import os
import pathlib
import select
import sys
import time
from ctypes import CFUNCTYPE, POINTER, c_char, c_char_p, c_int, c_int32, c_size_t, c_uint32, c_uint64, c_void_p

import preload

TOP = pathlib.Path(__file__).resolve().parents[2]

# A worker with many destinations has many descriptors: test_descriptors.py.
_descriptors = [os.open(os.devnull, os.O_RDONLY) for _ in range(int(os.environ.get("RETRYSAFE_DESCRIPTORS", 0)))]


def interpreter(*libraries, **more):
    """The environment of another interpreter that loads a sink."""
    return preload.behind_sanitizer({**os.environ, **more, "LD_PRELOAD": ":".join(map(str, libraries))})


DELIVERED, FAILED_RETRY, FAILED_FINAL, UNREACHABLE = range(4)


class Text(ctypes.Structure):
    _fields_ = [("data", c_char_p), ("size", c_size_t)]

    @classmethod
    def of(cls, value):
        data = None if value is None else value if isinstance(value, bytes) else value.encode()
        return cls(data, len(data or b""))


class Pair(ctypes.Structure):
    _fields_ = [("name", Text), ("value", Text)]


LOG = CFUNCTYPE(None, c_char_p)


class Config(ctypes.Structure):
    _fields_ = [("destination", Text), ("database", Text), ("options", POINTER(Pair)), ("option_count", c_size_t),
                ("allowed_addresses", Text), ("log", LOG)]


class Event(ctypes.Structure):
    _fields_ = [("tag", c_uint64), ("id", Text), ("type", Text), ("source", Text), ("time", Text),
                ("ordering_key", Text), ("event_key", Text), ("scope", Text), ("payload", Text),
                ("headers", POINTER(Pair)), ("header_count", c_size_t), ("attempt", c_int32)]


class Outcome(ctypes.Structure):
    _fields_ = [("tag", c_uint64), ("status", c_int32), ("retry_after_ms", c_int32), ("reason_bytes", c_char * 256)]

    @property
    def reason(self):
        return self.reason_bytes.decode()


class Module(ctypes.Structure):
    _fields_ = [("magic", c_uint32), ("abi_version", c_uint32), ("size", c_uint32), ("flags", c_uint32),
                ("kind", c_char_p),
                ("open", CFUNCTYPE(c_void_p, POINTER(Config), c_void_p, c_size_t)),
                ("wait_fd", CFUNCTYPE(c_int, c_void_p)),
                ("submit", CFUNCTYPE(c_int, c_void_p, POINTER(Event))),
                ("flush", CFUNCTYPE(None, c_void_p)),
                ("collect", CFUNCTYPE(c_size_t, c_void_p, POINTER(Outcome), c_size_t, POINTER(c_int))),
                ("close", CFUNCTYPE(None, c_void_p))]


def module(kind):
    library = ctypes.CDLL(str(TOP / f"retrysafe_{kind}.so"), mode=ctypes.RTLD_LOCAL)
    entry = library.retrysafe_sink_module
    entry.restype = POINTER(Module)
    return entry().contents


def pairs(items):
    return (Pair * len(items))(*(Pair(Text.of(name), Text.of(value)) for name, value in items.items()))


def event(number, **parts):
    """An event with the id that `number` makes; `parts` replace the fields of that name."""
    texts = {"id": f"00000000-0000-8000-8000-{number:012}", "type": "order.created", "source": "retrysafe/shop/",
             "time": "2026-01-02T03:04:05.678901Z", "ordering_key": None, "event_key": f"order-{number}", "scope": "",
             "payload": '{"number": %d}' % number}
    headers = parts.pop("headers", {})
    texts.update(parts)
    made = Event(tag=number, attempt=1, header_count=len(headers), headers=pairs(headers),
                 **{name: Text.of(value) for name, value in texts.items()})
    return made


class OpenError(Exception):
    pass


class Sink:
    def __init__(self, kind, options, allowed_addresses="127.0.0.1, ::1"):
        self.module = module(kind)
        self.log_lines = []
        self.longest = self.slowest = 0  # so long a turn of its calls kept the processor, and the caller
        self._log = LOG(lambda line: self.log_lines.append(line.decode()))
        options = {name: str(value).lower() if isinstance(value, bool) else str(value)
                   for name, value in options.items()}
        config = Config(Text.of("test"), Text.of("shop"), pairs(options), len(options), Text.of(allowed_addresses),
                        self._log)
        error = ctypes.create_string_buffer(512)
        self.handle = self.module.open(ctypes.byref(config), ctypes.addressof(error), len(error))
        if not self.handle:
            raise OpenError(error.value.decode())

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()

    def close(self):
        if self.handle:
            self.module.close(self.handle)
        self.handle = None

    def submit(self, an_event):
        return bool(self.module.submit(self.handle, ctypes.byref(an_event)))

    def collect(self):
        """What is there now, and when to come back."""
        outcomes, timeout = (Outcome * 16)(), c_int(-1)
        count = self.module.collect(self.handle, outcomes, 16, ctypes.byref(timeout))
        return [Outcome.from_buffer_copy(outcomes[i]) for i in range(count)], timeout.value

    def send(self, *events, within=20):
        """Sends all and returns their outcomes in the order of the events."""
        waiting, found = list(events), {}
        poll = select.poll()
        poll.register(self.module.wait_fd(self.handle), select.POLLIN)
        deadline = time.monotonic() + within
        while len(found) < len(events):
            assert time.monotonic() < deadline, "the sink does not come to an end"
            while waiting and self.submit(waiting[0]):
                waiting.pop(0)
            start, started = time.thread_time(), time.monotonic()
            self.module.flush(self.handle)
            outcomes, timeout = self.collect()
            self.longest = max(self.longest, time.thread_time() - start)
            self.slowest = max(self.slowest, time.monotonic() - started)
            for outcome in outcomes:
                assert outcome.tag not in found, "two outcomes for one event"
                found[outcome.tag] = outcome
            if not outcomes:
                left = 1000 * max(0, deadline - time.monotonic())
                poll.poll(left if timeout < 0 else min(timeout, left))  # a sink that asks for nothing is left alone
        return [found[e.tag] for e in events]
