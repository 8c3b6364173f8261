#include "storage/ring.hpp"

#include <algorithm>
#include <cstring>

#include "pg/fault_point.hpp"
#include "pg/lock_owner.hpp"
#include "storage/ring_columns.hpp"

#include "pg/server.hpp"

namespace retrysafe::storage {

namespace {

struct State {
  uint64 generation;  // of the extension's objects; 0: nothing is known
  Ring rings[kRings];
};

struct Row {
  int64 generation;
  int64 sealed_position;  // 0: not sealed
  bool retired;
};

constinit State state{};

Ring ring_of(Row *rows, int count) {
  std::sort(rows, rows + count, [](const Row &a, const Row &b) { return a.generation < b.generation; });
  Ring ring{};
  ring.begun = count > 0;
  for (int i = 0; i < count; ++i) {
    if (rows[i].retired) continue;
    if (ring.count == 0) ring.waiting_position = rows[i].sealed_position;
    ring.pieces[ring.count++] = piece_of(rows[i].generation);
  }
  if (ring.count == 0) ring.pieces[ring.count++] = 0;  // before the first turn
  return ring;
}

// As one MVCC snapshot sees them: a row that is just being updated must not be missed. The rows are compared
// with it one by one, since a scan under it would take predicate locks in a SERIALIZABLE transaction. A
// catalog snapshot can be had in every transaction, a parallel one included.
void read_state() {
  Row rows[kRings][pg::kRingPieces];
  int counts[kRings]{};
  Relation table = table_open(pg::extension().ring_pieces, AccessShareLock);
  const Snapshot snapshot = RegisterSnapshot(GetCatalogSnapshot(RelationGetRelid(table)));
  TupleTableSlot *slot = table_slot_create(table, nullptr);
  TableScanDesc scan = pg::begin_table_scan(table, SnapshotAny);
  while (table_scan_getnextslot(scan, ForwardScanDirection, slot)) {
    if (!table_tuple_satisfies_snapshot(table, slot, snapshot)) continue;
    bool null;
    const auto column = [&](AttrNumber n) { return slot_getattr(slot, n, &null); };
    const char *name = TextDatumGetCString(column(ring_column::kRing));
    for (int i = 0; i < kRings; ++i) {
      if (std::strcmp(name, name_of(RingName{static_cast<uint8>(i)})) != 0) continue;
      if (counts[i] == pg::kRingPieces) elog(ERROR, "retrysafe: ring \"%s\" has too many pieces", name);
      Row &row = rows[i][counts[i]++];
      row.generation = DatumGetInt64(column(ring_column::kGeneration));
      const Datum sealed = column(ring_column::kSealedPosition);
      row.sealed_position = null ? 0 : DatumGetInt64(sealed);
      row.retired = DatumGetBool(column(ring_column::kRetired));
    }
  }
  table_endscan(scan);
  ExecDropSingleTupleTableSlot(slot);
  UnregisterSnapshot(snapshot);
  table_close(table, AccessShareLock);
  for (int i = 0; i < kRings; ++i) state.rings[i] = ring_of(rows[i], counts[i]);
}

}  // namespace

const char *name_of(RingName ring) {
  switch (ring) {
    case RingName::kRecords:
      return "records";
    case RingName::kLog:
      return "log";
    case RingName::kProgress:
      return "progress";
  }
  pg_unreachable();
}

RingTables tables_of(RingName ring) {
  const pg::Extension &e = pg::extension();
  switch (ring) {
    case RingName::kRecords:
      return {1, {&e.idem_records_pieces, nullptr}};
    case RingName::kLog:
      return {1, {&e.outbox_log_pieces, nullptr}};
    case RingName::kProgress:
      return {2, {&e.outbox_windows_pieces, &e.outbox_batches_pieces}};
  }
  pg_unreachable();
}

// What was read is good until the server's invalidation message about ring_pieces, which every change of it
// sends and which is delivered here, as for the server's own copies of its catalogs. The changer sends it
// before it releases its lock, so whoever holds the ring lock has heard of all changes.
const Ring &ring(RingName name) {
  AcceptInvalidationMessages();
  const uint64 generation = pg::extension().generation;
  if (state.generation != generation) {
    state.generation = 0;
    read_state();
    state.generation = generation;
  }
  return state.rings[static_cast<int>(name)];
}

namespace {

// As for latest_snapshot_of.
void lock_for_reading(RingName name, const Ring &ring) {
  const RingTables tables = tables_of(name);
  for (int i = 0; i < tables.count; ++i)
    for (int n = 0; n < ring.count; ++n)
      LockRelationOid((*tables.pieces[i])[ring.pieces[n]], AccessShareLock);
}

}  // namespace

// A turn of the ring between the two would show in the one and not in the other: rows of a new piece, or
// those that were copied out of a retired one. That is not emptied while somebody has a snapshot that does
// not see the copies (rotation.hpp).
RingView open_view(RingName name) {
  for (;;) {
    CHECK_FOR_INTERRUPTS();
    const Ring pieces = ring(name);
    lock_for_reading(name, pieces);
    RETRYSAFE_FAULT_POINT("ring.before_snapshot");
    const RingView view{pieces, RegisterSnapshot(GetLatestSnapshot())};
    const uint64 generation = state.generation;
    (void)ring(name);
    if (state.generation == generation) return view;
    close_view(view);
  }
}

void close_view(const RingView &view) {
  UnregisterSnapshot(view.snapshot);
}

void lock_rings() {
  LockRelationOid(pg::extension().ring_pieces, RowExclusiveLock);
}

void unlock_rings() {
  UnlockRelationOid(pg::extension().ring_pieces, RowExclusiveLock);
}

namespace {

// The first row of a ring brings its generation 1 along, so that both are there or neither. It is not for
// those who turn the ring to make up for it: a ring that is just being restored from a dump has rows for a
// while before ring_pieces arrives.
void begin_ring(RingName name) {
  const pg::Extension &e = pg::extension();
  const int64 generation = 1;
  // One of the transactions that insert first is enough.
  SnapshotData dirty;
  InitDirtySnapshot(dirty);
  pg::IndexScan scan = begin_scan_for(name, generation, &dirty);
  const bool found = scan.next();
  scan.end();
  if (found) return;

  Datum values[ring_column::kRetired]{};
  bool nulls[ring_column::kRetired]{};
  values[ring_column::kRing - 1] = CStringGetTextDatum(name_of(name));
  values[ring_column::kGeneration - 1] = Int64GetDatum(generation);
  values[ring_column::kSince - 1] = TimestampTzGetDatum(GetCurrentTimestamp());
  values[ring_column::kSincePosition - 1] = Int64GetDatum(0);
  nulls[ring_column::kSealedAt - 1] = nulls[ring_column::kSealedPosition - 1] = true;
  nulls[ring_column::kNeededUntil - 1] = true;
  values[ring_column::kRetired - 1] = BoolGetDatum(false);
  if (pg::insert_row(e.ring_pieces, pg::new_row(values, nulls), e.ring_pieces_pkey))
    CacheInvalidateRelcacheByRelid(e.ring_pieces);
  unlock_rings();  // which the insertion would keep to the end of the transaction
}

}  // namespace

// Also locks the piece for as long as the row that is about to be written may be in doubt: what seals it goes
// by that. The lock of the insertion itself can be a cursor's.
int active_piece(RingName name) {
  if (!ring(name).begun) begin_ring(name);
  const int piece = ring(name).active();
  const RingTables tables = tables_of(name);
  pg::in_subtransaction([&] {
    for (int i = 0; i < tables.count; ++i) LockRelationOid((*tables.pieces[i])[piece], RowExclusiveLock);
  });
  return piece;
}

bool insert_into_ring(RingName name, const Oid (&pieces)[pg::kRingPieces], const pg::NewRow &row,
                      const Oid (*unique)[pg::kRingPieces]) {
  lock_rings();
  const int piece = active_piece(name);
  const bool inserted = pg::insert_row(pieces[piece], row, unique ? (*unique)[piece] : InvalidOid);
  unlock_rings();
  CommandCounterIncrement();  // as after a statement
  return inserted;
}

}  // namespace retrysafe::storage
