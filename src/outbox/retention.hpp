// Removing what nobody needs any more: in batches, by plain DELETE.
#pragma once

#include "pg/server.hpp"

namespace retrysafe::outbox {

// Removes up to about `max_rows` rows of each kind: events that every destination has had for
// retrysafe.outbox_retention, and the progress rows that told so. Dead letters stay until somebody settles
// them. Returns how many rows went; call it again while that is much. For workers, in a READ COMMITTED
// transaction of its own.
int64 remove_old_events(int32 max_rows);

}  // namespace retrysafe::outbox
