#include "storage/ring.hpp"

#include <algorithm>
#include <cstring>

#include "pg/table_insert.hpp"
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
  for (int i = 0; i < count; ++i) {
    if (rows[i].retired) continue;
    if (ring.count == 0) ring.waiting_position = rows[i].sealed_position;
    ring.pieces[ring.count++] = piece_of(rows[i].generation);
  }
  if (ring.count == 0) ring.pieces[ring.count++] = 0;  // before the first turn
  return ring;
}

// Under one MVCC snapshot: a row that is just being updated must not be missed. A catalog snapshot can be had
// in every transaction, a parallel one included.
void read_state() {
  Row rows[kRings][pg::kRingPieces];
  int counts[kRings]{};
  Relation table = table_open(pg::extension().ring_pieces, AccessShareLock);
  SysScanDesc scan = systable_beginscan(table, InvalidOid, false, nullptr, 0, nullptr);
  for (HeapTuple tuple; HeapTupleIsValid(tuple = systable_getnext(scan));) {
    bool null;
    const auto column = [&](AttrNumber n) { return heap_getattr(tuple, n, RelationGetDescr(table), &null); };
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
  systable_endscan(scan);
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

// A turn of the ring between the two would show in the one and not in the other: rows of a new piece, or
// those that were copied out of a retired one.
RingView open_view(RingName name) {
  for (;;) {
    CHECK_FOR_INTERRUPTS();
    const RingView view{ring(name), RegisterSnapshot(GetLatestSnapshot())};
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

void insert_into_ring(RingName name, const Oid (&pieces)[pg::kRingPieces], const Datum *values,
                      const bool *nulls) {
  lock_rings();
  (void)pg::insert_row(pieces[ring(name).active()], values, nulls, InvalidOid);
  unlock_rings();
  CommandCounterIncrement();  // as after a statement
}

}  // namespace retrysafe::storage
