"""Somebody who takes part, in a thread of their own, until they are told to stop."""
import collections
import threading
import traceback


class Player(threading.Thread):
    def __init__(self, name):
        super().__init__(name=name, daemon=True)
        self.stop = threading.Event()
        self.counts = collections.Counter()
        self.unexpected = []  # what is a fault, if only of the rig

    def run(self):
        self.guarded(self.play)

    def guarded(self, play):
        try:
            play()
        except Exception:  # noqa: BLE001 - it is told at the end
            self.unexpected.append(f"{self.name}: {traceback.format_exc()}")
