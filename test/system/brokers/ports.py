"""Ports for servers that others than this program bind, a while after they were chosen, and again after a kill."""
import random
import socket

# Below those that the system gives to outgoing connections: one of them could take a port while its server is down.
FIRST, LAST = 15_000, 32_000

_reserved = []


def free_port():
    """Nobody listens there, and no other process that chooses by this function gets it until this one ends."""
    while True:
        port = random.randrange(FIRST, LAST)
        reservation, probe = socket.socket(socket.AF_UNIX), socket.socket()
        try:
            reservation.bind(f"\0retrysafe-port-{port}")
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as servers do
            probe.bind(("127.0.0.1", port))
        except OSError:
            reservation.close()
            continue
        finally:
            probe.close()
        _reserved.append(reservation)
        return port


def free_ports(count):
    return [free_port() for _ in range(count)]
