// Removing what no destination needs any more and is older than retrysafe.outbox_retention.
#pragma once

#include "storage/rotation.hpp"

#include "pg/server.hpp"

namespace retrysafe::outbox {

// The next step of the rings of progress and of the log. Needs READ COMMITTED and a commit soon after.
storage::Turn turn_outbox_rings();

// Removes up to `max_rows` parked events that were settled and whose event is gone; returns how many.
int64 remove_settled(int32 max_rows);

}  // namespace retrysafe::outbox
