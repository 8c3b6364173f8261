"""Where the bytes of a request go: dead rows, size and WAL of each table and index."""
from driver.cluster import execute
from driver.numbers import size
from driver.results import Table
from driver.subjects import SQL


def _relations(cluster, database, schema):
    """{name: (bytes, dead rows)} of the extension's tables, sequences and indexes, and of those in `schema`."""
    cluster.sql("CREATE EXTENSION IF NOT EXISTS pgstattuple", database=database)
    rows = cluster.sql((SQL / "footprint/relations.sql").read_text(), {"schema": schema}, database)
    return {name: (bytes_, dead) for name, bytes_, dead in rows}


def dead_rows(cluster, database, schema):
    """{table: dead rows}, counted."""
    return {name: dead for name, (_, dead) in _relations(cluster, database, schema).items() if dead is not None}


def table(run, cluster, subject, requests):
    """Sends more requests of `subject` and looks at what they leave behind. Dead rows are those of the whole benchmark."""
    def relations():
        return _relations(cluster, subject.name, subject.name)

    cluster.sql("CREATE EXTENSION IF NOT EXISTS pg_walinspect", database=subject.name)
    before, start = relations(), _flushed(cluster)
    count = requests(subject, run.size(full=1_000, quick=250)).count
    after, end = relations(), _flushed(cluster)
    wal = dict(cluster.sql((SQL / "footprint/wal.sql").read_text(), {"start": start, "end": end}, subject.name))

    rows = []
    for name, (bytes_, dead) in after.items():
        written, grown = wal.pop(name, 0), bytes_ - before[name][0]
        if written or grown or dead:
            rows.append([f"`{name}`", "" if dead is None else f"{dead:,}", size(bytes_), f"{grown / count:,.0f}",
                         f"{written / count:,.0f}"])
    for name, written in sorted(wal.items(), key=lambda item: -item[1]):
        if written / count >= 1:
            rows.append([name, "", "", "", f"{written / count:,.0f}"])
    rows.append(["sum", "", "", "", f"{sum(int(row[4].replace(',', '')) for row in rows):,}"])
    return Table(f"{subject.label}: what a request leaves behind",
                 ["table or index", "dead rows", "size", "bytes per request", "WAL per request"], rows,
                 note=f"Sizes and dead rows after the benchmark; bytes and WAL of {count:,} more requests. A record of WAL "
                      "counts for the relation that it touches first.")


def _flushed(cluster):
    """The end of WAL, all of it on disk so that it can be read."""
    with cluster.connect() as connection:
        execute(connection, "SET synchronous_commit = on")
        execute(connection, "SELECT pg_logical_emit_message(true, '', '')")
        return execute(connection, "SELECT pg_current_wal_flush_lsn()")[0][0]
