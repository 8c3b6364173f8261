// From a row of outbox_log or outbox_parked to an Event. Jumpable.
#pragma once

#include "outbox/engine.hpp"
#include "outbox/log_identity.hpp"
#include "pg/server.hpp"

namespace retrysafe::outbox {

// Reads the columns from `scope` to `created_at`, which both tables have in the same order, and makes the
// event id. Everything is copied. Without `body`, payload and headers are left out.
Event read_event(TupleTableSlot *slot, AttrNumber first_column, const Uuid &log, bool body);

// Bytes of payload and headers, as far as they were read.
int64 body_size(const Event &event);

}  // namespace retrysafe::outbox
