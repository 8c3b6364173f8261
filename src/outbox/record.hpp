// Recording, for callers that hold the lock of the shard row already. Internal to the engine.
#pragma once

#include "outbox/engine.hpp"
#include "outbox/shard.hpp"
#include "pg/server.hpp"

namespace retrysafe::outbox {

// What record() does after its checks. Inside pg::spi, with the destination as it is under that lock. Null
// `outcomes`: everything was delivered. Returns how many events were.
int32 record_locked(const Destination &destination, const Batch &batch, const Outcome *outcomes, bool away,
                    const ShardRow &row);

}  // namespace retrysafe::outbox
