"""Runs the whole: starts everything, lets the killer play its schedule, calms down, waits until every destination has had
everything, and checks the promises."""
import argparse
import collections
import contextlib
import os
import pathlib
import shutil
import signal
import sys
import tempfile
import time
import traceback

import psycopg2

import promises
import server_log
from conftest import eventually, folder_of_servers
from destinations import Destinations
from housekeeping import SIZE, Housekeeper, Watcher
from killer import SETTINGS as SETTINGS_THAT_CHANGE
from killer import Killer
from ledger import Ledger
from schedule import DECK, schedule
from place import Site
from writers import LIFETIME, SETUP, Messenger, Resolver, Straggler, Writer

SETTINGS = (server_log.PREFIX, "max_prepared_transactions = 50", "max_connections = 80", "deadlock_timeout = 200ms",
            "autovacuum_naptime = 5s", "restart_after_crash = on", "retrysafe.workers_per_database = 2",
            "retrysafe.poll_interval = 200ms", "retrysafe.outbox_retention = 2s", "retrysafe.outbox_rotation_age = 2s",
            "checkpoint_timeout = 30s", f"retrysafe.idem_retention = {LIFETIME}s", "retrysafe.idem_rotation_age = 1s",
            "wal_writer_delay = 2s", "wal_keep_size = 1GB")  # the standby finds what it missed
LITTLE = 20 << 20  # bytes that tables of retrysafe may have when they have nothing to keep
DRAIN = 300  # seconds in which everything has to arrive when nothing happens any more
STRAGGLERS = 4  # at most one for each hot key
STILL = 8    # seconds after which a ring that did not turn will not


def arguments():
    parser = argparse.ArgumentParser(prog="scripts/torture", description=__doc__.replace("\n", " "))
    parser.add_argument("--minutes", type=float, default=10, help="how long (default: %(default)s)")
    parser.add_argument("--seed", type=int, help="of the schedule and of everybody who takes part (default: a random one, printed)")
    parser.add_argument("--writers", type=int, default=8)
    parser.add_argument("--rate", type=float, default=5, help="transactions per second of each writer (default: %(default)s)")
    parser.add_argument("--list", action="store_true", help="print the schedule and end")
    parser.add_argument("--only", nargs="*", metavar="ACTION", help=f"of: {', '.join(DECK)}")
    parser.add_argument("--without", nargs="*", default=[], metavar="ACTION")
    parser.add_argument("--setting", action="append", default=[], help="of the server: 'name = value'")
    parser.add_argument("--clock", action=argparse.BooleanOptionalAction, help="set the servers' clock too (default: half of the seeds do)")
    parser.add_argument("--keep", action="store_true", help="keep the folder also when all is well")
    given = parser.parse_args()
    unknown = {*(given.only or []), *given.without} - set(DECK)
    if unknown:
        parser.error(f"unknown actions: {', '.join(sorted(unknown))}")
    if given.seed is None:
        given.seed = int.from_bytes(os.urandom(4))
    if given.clock is None:
        given.clock = given.seed // 2 % 2 == 1
    return given


class Torture:
    def __init__(self, given, actions, folder):
        self.given, self.actions, self.folder = given, actions, folder
        self.passed = self.failed = 0
        self._log = open(folder / "log", "w", buffering=1)

    def say(self, line):
        print(line, flush=True)
        self.note(line)

    def note(self, line):
        self._log.write(line + "\n")

    def run(self, at_end):
        self.site = Site(self.folder, [*SETTINGS, *self.given.setting], self.say,
                         "synchronous_standby" if self.given.seed % 2 else "local_flush", self.given.clock)
        if not self.given.clock:
            self.say("skipped: setting the clock (lifetimes of answers are checked in its place)")
        at_end.callback(self.site.stop)
        self.db = self.site.create_database()
        self.db.sql(SETUP)
        self.site.add_standby()
        self.ledger = Ledger(self.folder / "ledger")
        self.destinations = Destinations(self.site, self.folder / "received", self.given.seed)
        at_end.callback(self.destinations.stop)
        self.destinations.create(at_end, self.say)
        self.writers = [Writer(self.site, self.ledger, self.given.seed, number, self.given.rate) for number in range(self.given.writers)]
        self.resolver = Resolver(self.db, self.given.seed)
        self.messenger = Messenger(self.site, self.ledger, self.given.seed, "m", 1)
        self.killer = Killer(self.site, self.destinations, self.messenger, self.actions, self.note)
        self.destinations.start()
        self.housekeeper, self.watcher = Housekeeper(self.site), Watcher(self.db, self.folder / "samples.jsonl")
        self.players = [self.killer, *self.writers, self.resolver]
        self.lookers = [self.housekeeper, self.watcher]
        for player in (*self.players, *self.lookers):
            player.start()
        at_end.callback(self.stop_players)
        until = time.monotonic() + self.given.minutes * 60
        while time.monotonic() < until and not self.killer.unexpected:
            self.destinations.look()
            time.sleep(0.1)
        self.calm_down()
        self.wait_for_stragglers()
        self.drain()
        self.judge()

    def stop_players(self):
        self.killer.stop.set()
        self.killer.join()
        for player in (*self.players, *self.lookers):
            player.stop.set()

    def calm_down(self):
        self.killer.stop.set()
        self.killer.join()
        for player in self.players:
            player.stop.set()
        for player in self.players:
            player.join()
        self.destinations.calm()
        if self.site.clock:
            self.site.clock.set(0)
        for name, _ in SETTINGS_THAT_CHANGE:
            self.db.server.set(name, None)
        self.resolver.resolve()

    def wait_for_stragglers(self):
        """When they commit, the log has been emptied of everything else: those begin when nothing is left of the others, and
        would be the first whose part of the log goes."""
        self.drain()
        self.let_rings_turn()
        stragglers = [Straggler(self.site, self.ledger, self.given.seed, len(self.writers) + number, 1) for number in range(STRAGGLERS)]
        for straggler in stragglers:
            straggler.start()
            assert straggler.written.wait(60), "a transaction does not come to its end"
        self.drain()
        self.let_rings_turn()
        for straggler in stragglers:
            straggler.may_commit.set()
            straggler.join()
        self.lookers += stragglers

    def let_rings_turn(self):
        """Until they stand still."""
        status = since = None
        while time.monotonic() < (since or time.monotonic()) + STILL:
            new = self.db.sql("SELECT ring, generation, state FROM ring_status ORDER BY 1, 2")
            if new != status:
                status, since = new, time.monotonic()
            time.sleep(0.2)
        for row in self.db.sql("SELECT * FROM ring_status ORDER BY ring, generation"):
            self.note(f"stands still: {row}")

    def drain(self):
        # Positions that nobody committed, behind the last event, would look like backlog.
        eventually(lambda: self.messenger.send(waits=True), message="the last event cannot be committed")
        began, left, last = time.monotonic(), None, []
        while time.monotonic() < began + DRAIN:
            self.destinations.look()
            with contextlib.suppress(psycopg2.Error):
                left = self.destinations.unsettled()
                if not left:
                    break
                last = left
            time.sleep(0.2)
        self.drained = left
        self.say(f"drained in {time.monotonic() - began:.0f} s, at last {sorted({row[0] for row in last})}")
        self.note(f"at last: {last}")

    # --- the end ---

    def check(self, name, findings, counts=""):
        if findings:
            self.failed += 1
            self.say(f"  FAIL {name}: {counts}; {len(findings)} findings")
            for finding in findings[:10]:
                self.say(f"       {finding}")
            for finding in findings[10:]:
                self.note(f"       {finding}")
        else:
            self.passed += 1
            self.say(f"  ok   {name}: {counts}")

    def space(self):
        """When everything has arrived the rings empty themselves."""
        def small():
            return self.db.value(SIZE) <= LITTLE and self.db.value("SELECT count(*) FROM retrysafe.outbox_events") == 0
        try:
            eventually(small, timeout=60, message="the rings stay")
            findings = []
        except AssertionError as error:
            findings = [f"{error}: {self.db.sql('SELECT * FROM retrysafe.ring_status')}"]
        for player in self.lookers:
            player.stop.set()
            player.join()
        return findings, (f"{self.db.value(SIZE)} bytes in the end, at most {self.watcher.largest}"
                          f", {self.housekeeper.counts['outbox_cleanup']} + {self.housekeeper.counts['idem_cleanup']} steps of the rings")

    def judge(self):
        truth = promises.Truth(self.db, self.ledger)
        counts = sum((w.counts for w in self.writers), start=type(self.writers[0].counts)())
        self.say(f"writers: {dict(sorted(counts.items(), key=str))}")
        self.say(f"transactions: {dict(truth.counts)}, {len(truth.committed)} committed, {len(truth.events)} events;"
                 f" {self.resolver.resolved} prepared ones resolved, {truth.taken_by_crashes} that did not wait taken back by crashes")
        self.say(f"actions: {dict(self.killer.counts)}")
        self.say(f"pullers: {dict(sum((puller.counts for puller in self.destinations.pullers), start=collections.Counter()))}")
        self.check("everybody met only what they are told to expect",
                   [u for player in (*self.players, *self.lookers, *self.destinations.pullers, *self.destinations.keepers) for u in player.unexpected],
                   f"{self.killer.played} of {len(self.actions)} actions were played")
        self.check("P1 one key, one effect", *promises.one_effect(truth, self.db, self.killer.counts["set clock"] > 0))
        self.check("P2 conflicts write nothing", *promises.conflicts(truth, self.db))
        self.check("P3 every destination has had everything", [str(row) for row in self.drained or []])
        far_sides = self.destinations.far_sides
        for name, far in far_sides.items():
            self.check(f"P3 nothing lost, nothing invented: {name}", *promises.delivery(truth, far))
        self.check("P4 one id", *promises.one_id(self.db, far_sides.values()))
        for name, far in far_sides.items():
            if far.ordered:
                self.check(f"P5 order: {name}", *promises.order(far))
        self.check("P7 space", *self.space())
        self.check("P6 an outage costs no event an attempt", self.watcher.attempts, f"{self.watcher.counts['looks']} looks")
        self.check("P8 no transaction while events are sent", self.watcher.in_transaction,
                   f"{self.watcher.counts['looks']} looks, of which these met a transaction: {dict(self.watcher.met)}")
        self.check("P9 copies do not publish", [*self.killer.publishing_copies, *(o for hook in self.destinations.hooks_ever for o in hook.from_others)],
                   f"{self.killer.copies} restored dumps")
        self.check("P10 who writes waits for nobody but for who has the same key", [h for w in self.writers for h in w.held_up],
                   f"{counts['calls for keys of their own']} calls for keys of their own")
        codes, unexpected, crashes = server_log.look(self.site.logs())
        self.say(f"server log: {dict(sorted(codes.items()))}")
        self.check("no unexpected error in the server log", unexpected)
        self.check("no process died that nobody killed", crashes)


def main():
    given = arguments()
    actions = schedule(given.seed, given.minutes, given.only, given.without)
    if given.list:
        for action in actions:
            print(action)
        return 0
    print(f"seed {given.seed}, {given.minutes:g} minutes, {len(actions)} actions")
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    folder = pathlib.Path(tempfile.mkdtemp(prefix="retrysafe-torture-", dir=folder_of_servers()))
    folder.chmod(0o755)
    (folder / "schedule").write_text("".join(f"{action}\n" for action in actions))
    torture = Torture(given, actions, folder)
    well = False
    try:
        with contextlib.ExitStack() as at_end:
            torture.run(at_end)
            well = torture.failed == 0
    except KeyboardInterrupt:
        well = False
        print("interrupted")
    except Exception:  # noqa: BLE001 - what it was is said, and where to look
        well = False
        torture.check("the run", [traceback.format_exc()])
    if well and not given.keep:
        shutil.rmtree(folder)
    else:
        print(f"seed {given.seed}; schedule, ledger, records and server log are in {folder}")
    print(f"{torture.passed} passed, {torture.failed} failed")
    return 0 if well else 1


if __name__ == "__main__":
    sys.exit(main())
