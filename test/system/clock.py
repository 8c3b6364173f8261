"""A clock of servers that can be set (preload/clock.c). Time intervals that programs measure stay right, as they do when an
administrator sets the clock."""
import struct

import preload


class Clock:
    def __init__(self, folder):
        self.path = folder / "clock"
        self.set(0)
        self.path.chmod(0o644)
        library = preload.build("clock", folder)
        self.environment = {"LD_PRELOAD": str(library), "RETRYSAFE_TEST_CLOCK": str(self.path)}

    def set(self, seconds):
        """So far ahead of the machine's clock, or behind it."""
        with open(self.path, "r+b" if self.path.exists() else "wb", buffering=0) as file:
            file.write(struct.pack("=q", int(seconds)))
