// Writing events: outbox_emit.
#pragma once

#include "pg/server.hpp"

namespace retrysafe::outbox {

// True when this transaction has written an event, also when a savepoint has taken it back since.
bool transaction_has_emitted();

// Wakes the workers when this transaction commits: for whatever gives them work besides an event.
void announce_at_commit();

// Called once from _PG_init.
void watch_emitting_transactions();

}  // namespace retrysafe::outbox
