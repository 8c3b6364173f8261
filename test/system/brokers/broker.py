"""What a broker has to offer to the tests, and what they read from it."""
import abc
from dataclasses import dataclass


@dataclass(frozen=True)
class Message:
    """As an independent client read it."""
    id: str
    event_key: str
    scope: str
    ordering_key: str | None
    type: str
    payload: str | None  # JSON text; none for an SQL null
    headers: dict  # those of the event, under the names that CloudEvents allows

    @classmethod
    def of(cls, attributes, payload):
        """`attributes`: of CloudEvents, decoded where the protocol's binding encodes them."""
        headers = dict(attributes)
        assert headers.pop("specversion") == "1.0" and headers.pop("source") and headers.pop("time")
        return cls(headers.pop("id"), headers.pop("eventkey"), headers.pop("scope", ""), headers.pop("partitionkey", None),
                   headers.pop("type"), payload, headers)


class Broker(abc.ABC):
    """A server with temporary data on a free port of loopback; it ends with the process of the test at the latest."""
    kind: str
    reader: str  # the client that messages are read back with
    keeps_ids = False  # whether it drops a copy of an event by itself, even one that another destination sent

    def __enter__(self):
        try:
            self.start()
        except BaseException:
            self.__exit__()
            raise
        return self

    @abc.abstractmethod
    def __exit__(self, *_):
        """Ends the server and removes its data."""

    @abc.abstractmethod
    def start(self):
        """Starts the server, with the data that a killed one left behind; returns when it takes messages."""

    @abc.abstractmethod
    def kill(self):
        """kill -9."""

    @abc.abstractmethod
    def options(self) -> dict:
        """Of a good destination."""

    def options_for_any_type(self) -> dict:
        """Of one that takes events of every type, however odd."""
        return self.options()

    @abc.abstractmethod
    def wrong_credentials(self) -> dict:
        """The same with others; every value of a secret option contains "hunter2"."""

    @abc.abstractmethod
    def wrong_host(self) -> dict:
        """The same with a host name that does not exist, or a port that nobody listens at."""

    @abc.abstractmethod
    def too_large(self) -> int:
        """Bytes of a payload that the broker does not take."""

    @abc.abstractmethod
    def read(self) -> list[Message]:
        """All messages so far; those of one ordering key in the order of their arrival."""
