// From a row of outbox_log or outbox_parked to an Event. Jumpable.
#pragma once

#include "outbox/engine.hpp"
#include "outbox/log_columns.hpp"
#include "outbox/log_identity.hpp"
#include "pg/server.hpp"

namespace retrysafe::outbox {

// Both tables have the columns from `scope` to `headers` in the same order.
struct EventColumns {
  AttrNumber created_at;
  AttrNumber event_number;  // 0: none, the event key is there
  AttrNumber scope;
};
inline constexpr EventColumns kLogColumns{log_column::kCreatedAt, log_column::kEventNumber,
                                          log_column::kScope};
inline constexpr EventColumns kParkedColumns{parked_column::kCreatedAt, 0, parked_column::kScope};

// Reads a row and makes the event id. Everything is copied. Without `body`, payload and headers are left out.
Event read_event(TupleTableSlot *slot, const EventColumns &columns, const Uuid &log, bool body);

// Bytes of payload and headers, as far as they were read.
int64 body_size(const Event &event);

}  // namespace retrysafe::outbox
