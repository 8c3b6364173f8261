"""A clock of the servers that can be set: libfaketime, which reads how far it is off from a file. Time intervals that programs
measure stay right, as they do when an administrator sets the clock."""
import pathlib

LIBRARY = pathlib.Path("/usr/lib/x86_64-linux-gnu/faketime/libfaketime.so.1")


class Clock:
    def __init__(self, path):
        self.path = path
        self.set(0)

    def set(self, seconds):
        new = self.path.with_suffix(".new")
        new.write_text(f"{seconds:+.1f}")
        new.chmod(0o644)
        new.rename(self.path)

    @property
    def environment(self):
        return {"LD_PRELOAD": str(LIBRARY), "FAKETIME_TIMESTAMP_FILE": str(self.path), "FAKETIME_CACHE_DURATION": "1",
                "FAKETIME_DONT_FAKE_MONOTONIC": "1"}
