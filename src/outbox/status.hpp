// What became of an event at a destination, told from the stored windows and batches.
#pragma once

#include "core/snapshot.hpp"
#include "pg/server.hpp"

namespace retrysafe::outbox {

// True when a shard of the destination has not recorded, or has parked and not settled, an event that `upto`
// sees. `event_types` null: all. The caller holds the locks of all shard rows.
bool has_pending(int32 destination, int32 shards, ArrayType *event_types, const StoredSnapshot &upto);

}  // namespace retrysafe::outbox
