// Delayed events: kept apart from the log until they are due. A claim moves due ones into the log
// (move_due_events in engine.hpp), where they get their position and their place in key order.
#pragma once

#include "pg/server.hpp"

namespace retrysafe::outbox {

// When the first delayed event comes due, of those that do later than `after`, as this statement sees it;
// infinity when there is none.
TimestampTz next_scheduled_due(TimestampTz after = DT_NOBEGIN);

// What is due for so long is not left to a worker any more: it may be busy with a function.
inline constexpr int64 kWorkerPatienceUs = 1000 * 1000;

// Whether one that comes due at that time or before has not been moved yet. For emits: takes no predicate
// locks.
bool waits_by(TimestampTz due);

// Called once from _PG_init.
void watch_moving_transactions();

}  // namespace retrysafe::outbox
