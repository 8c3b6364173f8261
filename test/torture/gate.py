"""A gate that somebody may close: who is inside is waited for, and nobody else gets in meanwhile."""
import contextlib
import threading


class Gate:
    def __init__(self):
        self._changed = threading.Condition()
        self._inside = self._closed = 0

    def enter(self):
        """False: it is closed."""
        with self._changed:
            if self._closed:
                return False
            self._inside += 1
            return True

    def leave(self):
        with self._changed:
            self._inside -= 1
            self._changed.notify_all()

    @contextlib.contextmanager
    def closed(self):
        with self._changed:
            self._closed += 1
            self._changed.wait_for(lambda: not self._inside)
        try:
            yield
        finally:
            with self._changed:
                self._closed -= 1
