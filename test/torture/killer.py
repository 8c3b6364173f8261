"""Plays the schedule. An action that lasts goes on by itself while the next ones come."""
import contextlib
import os
import signal
import subprocess
import threading
import time

import psycopg2

from conftest import eventually, in_spite_of_crashes, kill, run
from keepers import RedisKeeper, RelayKeeper
from player import Player
from strikes import alive, children_of, kill_postmaster, lose_power, start_again, starts

SETTINGS = [("retrysafe.workers_per_database", (0, 1, 2, 3)), ("retrysafe.outbox_retention", ("0", "2s", "5s")),
            ("retrysafe.outbox_rotation_age", ("1s", "2s", "10s")), ("retrysafe.poll_interval", ("50ms", "200ms", "2s"))]


class Killer(Player):
    def __init__(self, site, destinations, messenger, actions, log):
        super().__init__("killer")
        self.site, self.db, self.destinations, self.actions = site, site.db, destinations, actions
        self.messenger = messenger
        self.log = log
        self.played = 0
        self.far_is_up, self.standby_is_up, self.disk_is_full = True, True, False
        self.copy_is_there, self.copies, self.publishing_copies = False, 0, []
        self._lasting = []

    def play(self):
        start = time.monotonic()
        try:
            for action in self.actions:
                if self.stop.wait(max(0, start + action.at - time.monotonic())):
                    break
                self.log(f"{time.monotonic() - start:8.1f}  {action.name}")
                what = self.act(action)
                self.counts[action.name] += what is not None
                self.played += 1
                self.log(f"{time.monotonic() - start:8.1f}      {what or 'nobody was there'}")
        except Exception:
            # Perhaps no standby is left, and commits would wait for it for ever: those of what lasts, too.
            self.site.wait_for_no_standby()
            raise
        finally:
            for thread in self._lasting:
                thread.join()

    def act(self, action):
        try:
            return getattr(self, action.name.replace(" ", "_"))(action)
        except psycopg2.Error as error:
            if not self.disk_is_full:
                raise
            self.log(f"the disk is full: {error}")

    @property
    def server(self):
        return self.db.server

    def lasts(self, action, begin, end, times=1):
        """`end` comes after the action's duration, or when all is to end."""
        begin()

        def later():
            self.stop.wait(action.duration * times)
            self.guarded(end)
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
                # That ends a server whose recovery needs room. Somebody has to start it again.
                if not alive(self.server.pid) and "No space left on device" in self.server.log()[-10000:]:
                    starts(self.server)
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

    def lose_power(self, action):
        """When an event arrives whose transaction waited for nothing: in silence, or while others keep the disk busy."""
        alarm, server, in_silence = self.destinations.alarm, self.server, action.duration < 4.5
        with self.silence(action) if in_silence else contextlib.nullcontext() as alone:
            processes = children_of(server.pid)
            alarm.arm(f"w{self.messenger.number}", lambda: lose_power(server, processes))
            with contextlib.suppress(psycopg2.Error):
                self.messenger.send(waits=False)
            arrived = alarm.went_off.wait(5)
            alarm.goes_off()
            start_again(server, processes)
        self.up()
        return f"{'when' if arrived else 'before'} an event arrived, {f'at {alone} alone' if alone else 'among others'}"

    @contextlib.contextmanager
    def silence(self, action):
        """Nobody writes, and only one destination is published to: so what made WAL reach the disk was its publisher."""
        def others(what):
            eventually(lambda: in_spite_of_crashes(lambda: self.db.sql(
                f"SELECT retrysafe.outbox_{what}(name) FROM retrysafe.outbox_status WHERE name <> %s", alone)), timeout=60)

        alone = self.one_of(action, self.destinations.quiet_ones())
        self.site.quiet.set()
        others("pause")
        self.wait_for_rest()
        try:
            yield alone
        finally:
            others("resume")
            self.site.quiet.clear()

    def wait_for_rest(self):
        """No WAL reaches the disk for a moment."""
        until = time.monotonic() + 5
        rests = last = None
        with contextlib.suppress(psycopg2.Error), contextlib.closing(self.server.connect()) as connection:
            while time.monotonic() < until and (rests is None or time.monotonic() < rests + 0.3):
                flushed = run(connection, "SELECT pg_current_wal_flush_lsn()")
                if flushed != last:
                    rests, last = time.monotonic(), flushed
                time.sleep(0.02)

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

    # --- the standby, and the disk ---

    def promote(self, _):
        if not self.standby_is_up:
            return None
        return f"{self.site.promote()} is the primary"

    def crash_standby(self, action):
        """Commits wait meanwhile."""
        if not self.standby_is_up:
            return None
        standby, self.standby_is_up = self.site.standby, False

        def end():
            eventually(lambda: starts(standby), timeout=60)
            self.standby_is_up = True
        self.lasts(action, lambda: standby.pg_ctl("stop", "-m", "immediate"), end)
        return f"for {action.duration:.1f} s"

    def fill_disk(self, action):
        if not self.site.mounted or self.disk_is_full:
            return None
        self.disk_is_full = True
        filler = self.site.fill()

        def end():
            with contextlib.suppress(FileNotFoundError):  # a new standby is in its place
                os.unlink(filler)
            self.disk_is_full = False
        self.lasts(action, lambda: None, end)
        return f"for {action.duration:.1f} s"

    def set_clock(self, action):
        """Up to 20 seconds off, ahead or behind, from now on."""
        if not self.site.clock:
            return None
        seconds = (action.pick - 0.5) * 40
        self.site.clock.set(seconds)
        return f"{seconds:+.1f} s"

    # --- the far sides, and the programs beside the server ---

    def hook(self, action):
        return self.destinations.hooks[self.one_of(action, self.destinations.hooks)]

    def outage(self, action):
        hook = self.hook(action)
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
        if not hook.kinds:
            return None
        self.lasts(action, lambda: hook.misbehave(0.5), hook.behave)
        return f"{hook.name} for {action.duration:.1f} s"

    def keeper(self, action, kind):
        """One that runs, and its process id."""
        running = {keeper.name: (keeper, pid) for keeper in self.destinations.keepers
                   if isinstance(keeper, kind) and (pid := keeper.pid)}
        return running[self.one_of(action, running)] if running else (None, None)

    def end_program(self, action, kind, signal_number):
        keeper, pid = self.keeper(action, kind)
        if pid is None:
            return None
        keeper.away_until = time.monotonic() + action.duration
        os.kill(pid, signal_number)
        return f"{keeper.name}, for {action.duration:.1f} s"

    def kill_relay(self, action):
        return self.end_program(action, RelayKeeper, signal.SIGKILL)

    def stop_relay(self, action):
        return self.end_program(action, RelayKeeper, signal.SIGTERM)

    def pause_relay(self, action):
        return self.pause(action, self.keeper(action, RelayKeeper)[1])

    def kill_redis(self, action):
        return self.end_program(action, RedisKeeper, signal.SIGKILL)

    def crash_far_server(self, action):
        far = self.destinations.far
        if not self.far_is_up:
            return None
        self.far_is_up = False

        def end():
            eventually(lambda: starts(far), timeout=60)
            self.far_is_up = True
        self.lasts(action, lambda: far.pg_ctl("stop", "-m", "immediate"), end)
        return f"for {action.duration:.1f} s"

    # --- what administrators do ---

    def recreate_destination(self, _):
        return self.destinations.brief()

    def destination(self, action):
        return self.one_of(action, [name for (name,) in self.db.sql("SELECT name FROM retrysafe.outbox_status")])

    def pause_destination(self, action):
        name = self.destination(action)

        def resume():
            eventually(lambda: in_spite_of_crashes(lambda: self.db.sql("SELECT retrysafe.outbox_resume(%s)", name)), timeout=60)
        self.lasts(action, lambda: self.db.sql("SELECT retrysafe.outbox_pause(%s)", name), resume)
        return f"{name} for {action.duration:.1f} s"

    def change_destination(self, action):
        name, events = self.destination(action), 1 + int(action.duration * 50)
        self.db.sql("SELECT retrysafe.outbox_alter_destination(%s, batch_events => %s)", name, events)
        return f"{name}: {events} events"

    def retry_dead_letters(self, _):
        return f"{self.db.value('SELECT sum(retrysafe.outbox_retry(name)) FROM retrysafe.outbox_status')} events"

    def change_settings(self, action):
        name, values = SETTINGS[int(action.pick * len(SETTINGS))]
        value = values[int(action.duration * 100) % len(values)]
        self.server.set(name, value)
        return f"{name} = {value}"

    def hold_snapshot(self, action):
        """Half of them have looked at the log, and keep it from being emptied."""
        connection = self.server.connect(self.db.name, autocommit=False)
        connection.set_session(isolation_level="REPEATABLE READ")
        run(connection, "SELECT count(*) FROM retrysafe.outbox_events" if action.pick < 0.5 else "SELECT")
        self.lasts(action, lambda: None, connection.close, times=3)
        return f"for {action.duration * 3:.1f} s"

    def dump(self, action):
        """What is restored from it on the far server must not publish. It may well fail when something else happens."""
        if self.copy_is_there:
            return None
        self.copy_is_there = True
        file = self.destinations.folder.parent / "dump"
        dump = subprocess.Popen([self.server.bindir() / "pg_dump", "-Fc", "-d", self.server.dsn(self.db.name), "-f", file],
                                stderr=subprocess.DEVNULL)

        def end():
            try:
                if dump.wait() == 0:
                    self.restore(file)
            except psycopg2.Error:
                pass  # the far server has crashed
            self.copy_is_there = False
        self.lasts(action, lambda: None, end)
        return "begun"

    def restore(self, file):
        far = self.destinations.far
        admin = far.connect()
        try:
            run(admin, "CREATE DATABASE copy")
            restore = subprocess.run([far.bindir() / "pg_restore", "--no-tablespaces", "-d", far.dsn("copy"), file], stderr=subprocess.DEVNULL)
            if restore.returncode == 0:
                copy = far.connect("copy")
                try:
                    eventually(lambda: run(copy, """SELECT 1 FROM pg_stat_activity WHERE datname = 'copy' AND backend_type = 'retrysafe worker'
                                                    AND xact_start IS NULL AND backend_start < clock_timestamp() - interval '1 s'"""), 60)
                except AssertionError:
                    self.publishing_copies.append("no worker came to a copy: it had no chance to publish")
                reasons = {reason for (reason,) in run(copy, "SELECT retrysafe.outbox_suspended_reason()")}
                states = {state for (state,) in run(copy, "SELECT state FROM retrysafe.outbox_status")}
                copy.close()
                self.copies += 1
                if None in reasons or states != {"suspended"}:
                    self.publishing_copies.append(f"{reasons} {states}")
        finally:
            if not admin.closed:
                run(admin, "DROP DATABASE IF EXISTS copy WITH (FORCE)")
                admin.close()
