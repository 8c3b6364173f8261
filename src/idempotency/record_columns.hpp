// Columns of idem_records by number, for access without the planner.
#pragma once

#include "pg/server.hpp"

namespace retrysafe::idempotency::record_column {

enum : AttrNumber {
  kKey = 1,
  kScope,
  kRequestHash,
  kStatus,
  kResponse,
  kCreatedAt,
  kCompletedAt,
  kExpiresAt,
  kTxid
};

}  // namespace retrysafe::idempotency::record_column
