// Table ring_pieces by number.
#pragma once

#include "pg/extension.hpp"

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

// Where a generation lives.
inline int piece_of(int64 generation) {
  if (generation < 1) elog(ERROR, "retrysafe: ring_pieces has a generation below 1");
  return static_cast<int>((generation - 1) % pg::kRingPieces);
}

}  // namespace retrysafe::storage
