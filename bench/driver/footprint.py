"""What a benchmark leaves behind: dead rows, size and WAL of each table and index of what was measured."""
import collections
import contextlib

from driver.cluster import execute
from driver.numbers import size
from driver.results import Table
from driver.subjects import SQL

_RELATIONS, _WAL = ((SQL / "footprint" / f"{name}.sql").read_text() for name in ("relations", "wal"))
_SMALL = 16_384         # bytes: what is not larger, and is not written to, is listed with the others


class Footprint:
    """Of `owners`, each a subject or a queue. Make it before they are measured."""

    def __init__(self, cluster, owners):
        self._cluster, self.owners = cluster, list(owners)
        self._steps = []
        self._wal = {owner: {} for owner in self.owners}                           # {step: {relation: bytes for each}}
        self._grown = {owner: collections.Counter() for owner in self.owners}      # {relation: bytes for each}
        for owner in self.owners:
            cluster.sql("CREATE EXTENSION pgstattuple; CREATE EXTENSION pg_walinspect", database=owner.database)

    @contextlib.contextmanager
    def stretch(self, owner, count, step=""):
        """The block does what the benchmark does, `count` times; a part of it where it would be much WAL to look through.
        Nothing else is done meanwhile."""
        before, start = self._sizes(owner), self._flushed()
        yield
        after, end = self._sizes(owner), self._flushed()
        if step not in self._steps:
            self._steps.append(step)
        wal = self._cluster.sql(_WAL, {"start": start, "end": end}, owner.database)
        self._wal[owner][step] = {name: written / count for name, written in wal}
        self._grown[owner].update({name: (bytes_ - before.get(name, 0)) / count for name, bytes_ in after.items()})

    def one_more_round(self, queue, connection, count):
        """A small one, since the WAL of a large one would take long to look through."""
        queue.hold(connection)
        with self.stretch(queue, count, "emitted"):
            queue.emit(connection, count, per_transaction=100)
        with self.stretch(queue, count, "drained"):
            queue.empty(self._cluster, connection)

    def dead_rows(self, owner):
        return sum(dead for _, kind, _, dead in self._relations(owner, count_dead=True) if kind == "r")

    def table(self, title, unit=""):
        """`unit`: what the stretches counted, such as a request."""
        header = ["", "table or index", "dead rows", "size"]
        if self._steps:
            header += [f"bytes per {unit}", *(f"WAL per {unit}" + (f", {step}" if step else "") for step in self._steps)]
        return Table(title, header, [row for owner in self.owners for row in self._rows(owner)])

    def _rows(self, owner):
        relations = self._relations(owner, count_dead=True)
        written = {name: [wal.pop(name, 0) for wal in self._wal[owner].values()] for name, *_ in relations}
        rows, others = [], []
        for name, _, bytes_, dead in relations:
            row = [f"`{name}`", dead, bytes_, self._grown[owner][name], *written[name]]
            (rows if dead or bytes_ > _SMALL or any(abs(n) >= 0.5 for n in row[3:]) else others).append(row)
        # What is left touches no relation, or one of the catalog.
        for name in dict.fromkeys(name for wal in self._wal[owner].values() for name in wal):
            row = [name, None, None, None, *(wal.get(name, 0) for wal in self._wal[owner].values())]
            (rows if max(row[4:]) >= 1 else others).append(row)
        tables = {f"`{name}`" for name, kind, *_ in relations if kind == "r"}
        total = ["sum", sum(row[1] or 0 for row in rows if row[0] in tables), *_sums(rows + others)]
        if others:
            rows.append([f"{len(others)} more", 0, *_sums(others)])
        for number, (name, dead, bytes_, *per_unit) in enumerate([*rows, total]):
            yield [owner.label if number == 0 else "", name, "" if dead is None else f"{dead:,}",
                   "" if bytes_ is None else size(bytes_), *map(_each, per_unit[:1 + len(self._steps)] if self._steps else [])]

    def _relations(self, owner, count_dead):
        return self._cluster.sql(_RELATIONS, {"schemas": list(owner.schemas), "count_dead": count_dead}, owner.database)

    def _sizes(self, owner):
        return {name: bytes_ for name, _, bytes_, _ in self._relations(owner, count_dead=False)}

    def _flushed(self):
        """The end of WAL, all of it on disk so that it can be read."""
        with self._cluster.connect() as connection:
            execute(connection, "SET synchronous_commit = on")
            execute(connection, "SELECT pg_logical_emit_message(true, '', '')")
            return execute(connection, "SELECT pg_current_wal_flush_lsn()")[0][0]


def _sums(rows):
    return [sum(value or 0 for value in column) for column in list(zip(*rows))[2:]]


def _each(value):
    if value is None:
        return ""
    return f"{value:,.0f}" if abs(value) >= 10 or value == 0 else f"{value:.2g}"
