"""A signal ends the demos and benchmarks as an exception does: whoever started a server or a program, or made a folder, takes it
away again on its way out."""
import contextlib
import signal
import socket
import threading
import time

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
connections = set()             # of psycopg2, which wait for the server, perhaps


class Ended(BaseException):
    """No Exception: what goes on after a failure does not go on after this."""

    def __init__(self, number):
        super().__init__(f"ended by {signal.Signals(number).name}")
        self.exit_code = 128 + number


class _State:
    deferring = 0
    pending = None              # a signal that came meanwhile
    raised = False
    wakeup = None               # (reading, writing): a byte for each signal


def by_signals():
    """From now on signals raise Ended, once: nothing interrupts the way out. Python is started with SIGINT blocked (env
    --block-signal), which would end it with a traceback before it gets here."""
    for number in _SIGNALS:
        signal.signal(number, _handle)
    # While a statement runs the interpreter does not get to its handlers: a thread cancels the statement.
    reading, writing = _State.wakeup = socket.socketpair()
    writing.setblocking(False)
    signal.set_wakeup_fd(writing.fileno(), warn_on_full_buffer=False)
    threading.Thread(target=_cancel_statements, args=(reading,), daemon=True).start()
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)


def ignored():
    """In a child that is told to end by other means."""
    signal.set_wakeup_fd(-1)
    for number in _SIGNALS:
        signal.signal(number, signal.SIG_IGN)


@contextlib.contextmanager
def deferred():
    """For what must not be left half done, such as a process that is started and not known yet to who will end it,
    or an import: a module in C may swallow what is raised while it is loaded."""
    _State.deferring += 1
    try:
        yield
    finally:
        _State.deferring -= 1
        if _State.pending and not _State.deferring:
            number, _State.pending = _State.pending, None
            _raise(number)


def _handle(number, _):
    if _State.deferring:
        _State.pending = number
    else:
        _raise(number)


def _raise(number):
    if not _State.raised:
        _State.raised = True
        raise Ended(number)


def _cancel_statements(reading):
    while reading.recv(1)[0] not in _SIGNALS:
        pass
    while True:                 # the next statement of a thread, too
        for connection in tuple(connections):
            with contextlib.suppress(Exception):            # it has been closed meanwhile
                connection.cancel()
        time.sleep(0.2)
