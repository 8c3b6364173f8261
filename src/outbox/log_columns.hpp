// Columns of the tables by number, for scans without the planner.
#pragma once

#include "pg/server.hpp"

namespace retrysafe::outbox {

namespace log_column {
enum : AttrNumber {
  kId = 1,
  kTxid,
  kCreatedAt,
  kDeliverAfter,
  kEventNumber,
  kScope,
  kIdempotencyKey,
  kEventKey,
  kEventType,
  kOrderingKey,
  kPayload,
  kHeaders
};
}  // namespace log_column

// From the scope on the same as in the log.
namespace scheduled_column {
enum : AttrNumber { kDeliverAfter = 1, kCreatedAt, kRequest, kEventNumber, kScope };
}  // namespace scheduled_column

namespace window_column {
enum : AttrNumber {
  kDestination = 1,
  kShard,
  kWindowNo,
  kEra,
  kFloor,
  kSnapshot,
  kNext,
  kCeiling,
  kTakenAt,
  kResumedAt
};
}  // namespace window_column

namespace batch_column {
enum : AttrNumber {
  kDestination = 1,
  kShard,
  kSeq,
  kWindowNo,
  kPosition,
  kToken,
  kDelivered,
  kParked,
  kTotalDelivered,
  kTotalParked,
  kPublishedAt
};
}  // namespace batch_column

namespace parked_column {
enum : AttrNumber {
  kDestination = 1,
  kShard,
  kId,
  kState,
  kAttempts,
  kGivenBack,
  kRetryAt,
  kReason,
  kParkedAt,
  kSettledAt,
  kTxid,
  kCreatedAt,
  kDeliverAfter,
  kScope,
  kIdempotencyKey,
  kEventKey,
  kEventType,
  kOrderingKey,
  kPayload,
  kHeaders
};
}  // namespace parked_column

}  // namespace retrysafe::outbox
