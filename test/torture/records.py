"""What a far side wrote down, in order of arrival, copies included: a file for each destination."""
import collections
import json
import threading

Arrival = collections.namedtuple("Arrival", "id key type ordering_key n digest")


class Record:
    def __init__(self, path, alarm):
        self.path, self.alarm = path, alarm
        self._lock = threading.Lock()
        self._file = open(path, "w", buffering=1)
        self.count = 0

    def write(self, arrival):
        text = json.dumps(arrival) + "\n"
        with self._lock:
            self._file.write(text)
            self.count += 1
        self.alarm.hears(arrival)

    def read(self):
        with self._lock:
            self._file.flush()
        with open(self.path) as lines:
            for line in lines:
                yield Arrival(*json.loads(line))
