// Table ring_pieces without the planner.
#pragma once

#include "pg/extension.hpp"
#include "pg/index_scan.hpp"
#include "storage/ring.hpp"

#include "pg/server.hpp"

namespace retrysafe::storage {

namespace ring_column {
enum : AttrNumber {
  kRing = 1,
  kGeneration,
  kSince,
  kSincePosition,
  kSealedAt,
  kSealedPosition,
  kNeededUntil,
  kRetired
};
}  // namespace ring_column

// The row of a generation.
inline pg::IndexScan begin_scan_for(RingName ring, int64 generation, Snapshot snapshot) {
  const pg::Extension &e = pg::extension();
  ScanKeyData keys[2];
  pg::text_equals(&keys[0], 1, CStringGetTextDatum(name_of(ring)));
  pg::int8_compares(&keys[1], 2, BTEqualStrategyNumber, F_INT8EQ, generation);
  return pg::begin_scan(e.ring_pieces, e.ring_pieces_pkey, snapshot, keys, 2);
}

// Where a generation lives.
inline int piece_of(int64 generation) {
  if (generation < 1) elog(ERROR, "retrysafe: ring_pieces has a generation below 1");
  return static_cast<int>((generation - 1) % pg::kRingPieces);
}

}  // namespace retrysafe::storage
