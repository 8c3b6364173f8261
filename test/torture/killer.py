"""Plays the schedule. An action that lasts goes on by itself while the next ones come."""
import os
import signal
import subprocess
import threading
import time

import psycopg2

from conftest import eventually, kill, run
from player import Player
from strikes import alive, children_of, kill_postmaster, starts


class Killer(Player):
    def __init__(self, db, destinations, actions, log):
        super().__init__("killer")
        self.db, self.destinations, self.actions = db, destinations, actions
        self.log = log
        self.played = 0
        self._lasting = []

    def play(self):
        start = time.monotonic()
        try:
            for action in self.actions:
                if self.stop.wait(max(0, start + action.at - time.monotonic())):
                    break
                self.log(f"{time.monotonic() - start:8.1f}  {action.name}")
                what = getattr(self, action.name.replace(" ", "_"))(action)
                self.counts[action.name] += what is not None
                self.played += 1
                self.log(f"{time.monotonic() - start:8.1f}      {what or 'nobody was there'}")
        finally:
            for thread in self._lasting:
                thread.join()

    @property
    def server(self):
        return self.db.server

    def lasts(self, action, begin, end):
        """`end` comes after the action's duration, or when all is to end."""
        begin()

        def later():
            self.stop.wait(action.duration)
            end()
        thread = threading.Thread(target=later, daemon=True)
        thread.start()
        self._lasting.append(thread)

    def sql(self, query, *parameters):
        connection = self.server.connect()
        try:
            return run(connection, query, *parameters)
        finally:
            connection.close()

    def one_of(self, action, found):
        found = sorted(found)
        return found[int(action.pick * len(found))] if found else None

    def process(self, action, where):
        """The process id of one of those sessions and processes; None while the server is not up."""
        try:
            return self.one_of(action, [pid for (pid,) in self.sql(
                f"SELECT pid FROM pg_stat_activity WHERE pid <> pg_backend_pid() AND {where}")])
        except psycopg2.Error:
            return None

    def worker(self, action):
        return self.process(action, "backend_type = 'retrysafe worker'")

    def backend(self, action):
        return self.process(action, "backend_type = 'client backend'")

    def up(self):
        def connects():
            try:
                self.server.connect().close()
                return True
            except psycopg2.Error:
                return False
        eventually(connects, timeout=60, message="the server does not come up")

    def send(self, function, pid):
        try:
            return pid and self.sql(f"SELECT {function}(%s)", pid)[0][0] and f"process {pid}"
        except psycopg2.Error:
            return None

    def kill(self, pid):
        """The server ends all sessions, recovers and goes on."""
        if pid is None:
            return None
        try:
            kill(pid)
        except ProcessLookupError:
            return None
        eventually(lambda: not alive(pid))
        self.up()
        return f"process {pid}"

    # --- the actions: what each did, None when there was nothing to do it to ---

    def terminate_worker(self, action):
        return self.send("pg_terminate_backend", self.worker(action))

    def cancel_worker(self, action):
        return self.send("pg_cancel_backend", self.worker(action))

    def kill_worker(self, action):
        return self.kill(self.worker(action))

    def pause_worker(self, action):
        return self.pause(action, self.worker(action))

    def pause(self, action, pid):
        if pid is None:
            return None

        def send(signal_number):
            try:
                os.kill(pid, signal_number)
            except ProcessLookupError:
                pass
        self.lasts(action, lambda: send(signal.SIGSTOP), lambda: send(signal.SIGCONT))
        return f"process {pid} for {action.duration:.1f} s"

    def terminate_backend(self, action):
        return self.send("pg_terminate_backend", self.backend(action))

    def cancel_backend(self, action):
        return self.send("pg_cancel_backend", self.backend(action))

    def kill_backend(self, action):
        return self.kill(self.backend(action))

    def kill_server_process(self, action):
        return self.kill(self.one_of(action, children_of(self.server.pid)))

    def kill_postmaster(self, _):
        kill_postmaster(self.server)
        self.up()
        return "done"

    def stop_immediately(self, _):
        return self.restart_with("immediate")

    def restart(self, _):
        return self.restart_with("fast")

    def restart_with(self, mode):
        try:
            self.server.pg_ctl("stop", "-m", mode)
        except subprocess.CalledProcessError:
            pass  # a process that stands still keeps it from ending in time
        eventually(lambda: starts(self.server), timeout=60)
        self.up()
        return "done"

    def hook(self, action):
        return self.destinations.hooks[self.one_of(action, self.destinations.hooks)]

    def outage(self, action):
        hook = self.hook(action)
        with hook.lock:
            if hook.away:
                return None
            hook.away = True

        def end():
            hook.come_back()
            hook.away = False
        self.lasts(action, hook.refuse, end)
        return f"{hook.name} for {action.duration:.1f} s"

    def bad_answers(self, action):
        hook = self.hook(action)
        self.lasts(action, lambda: hook.misbehave(0.5), hook.behave)
        return f"{hook.name} for {action.duration:.1f} s"
