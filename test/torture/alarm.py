"""Something is to happen at the very moment when an event arrives, before the answer to it."""
import threading


class Alarm:
    def __init__(self):
        self._lock = threading.Lock()
        self._prefix = self._action = None
        self.went_off = threading.Event()

    def arm(self, prefix, action):
        """For the first event, at whichever destination, whose key begins so."""
        with self._lock:
            self.went_off.clear()
            self._prefix, self._action = prefix, action

    def hears(self, arrival):
        if self._action and arrival.key.startswith(self._prefix):
            self.goes_off()

    def goes_off(self):
        """Once."""
        with self._lock:
            if self._action:
                self._action()
                self._action = None
                self.went_off.set()
