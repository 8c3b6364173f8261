"""How long tests wait for what other processes do in their own time."""
import os
import time


def deadline(seconds):
    """The monotonic time in so many seconds. Below a sanitizer everything takes longer: RETRYSAFE_SLOWNESS."""
    return time.monotonic() + seconds * float(os.environ.get("RETRYSAFE_SLOWNESS", 1))


def eventually(condition, timeout=20, message="the condition did not come true"):
    """Polls `condition` until it is true: for what other processes do in their own time. Often at first, then less so: a
    look may well cost more than what it waits for. `message` may be a function, called when it was in vain."""
    ends = deadline(timeout)
    pause = 0.01
    while True:
        value = condition()
        if value:
            return value
        assert time.monotonic() < ends, message() if callable(message) else message
        time.sleep(pause)
        pause = min(pause * 1.3, 0.1)
