// Delayed events: kept apart from the log until they are due. A claim moves due ones into the log
// (move_due_events in engine.hpp), where they get their position and their place in key order.
#pragma once

#include <compare>

#include "pg/server.hpp"

namespace retrysafe::outbox {

// When the first delayed event comes due, of those that do later than `after`, as this statement sees it;
// infinity when there is none.
TimestampTz next_scheduled_due(TimestampTz after = DT_NOBEGIN);

// What is due for so long is not left to a worker any more: it may be busy with a function.
inline constexpr int64 kWorkerPatienceUs = 1000 * 1000;

// The order in which delayed events are moved.
struct Turn {
  TimestampTz deliver_after;
  TimestampTz created_at;
  auto operator<=>(const Turn &) const = default;  // NOLINT(modernize-use-nullptr): compares with 0
};

// Of the first delayed event of the ordering key, by what is committed now: one that another
// transaction is moving, or cancelling, is still there. At infinity when there is none. Takes no predicate
// locks, and neither does waits_by.
Turn first_turn(Datum ordering_key);
// Whether any event that comes due at that time or before has not been moved yet.
bool waits_by(TimestampTz due);

// For who is about to sleep. True, once, after a move that ran out of time and met only events that stay: the
// next one goes on behind them. Otherwise the next one begins anew.
bool take_unfinished_move();

}  // namespace retrysafe::outbox
