// This session's own entry among those that wait for events: see outbox_wait.
#pragma once

#include "pg/server.hpp"

namespace retrysafe::runtime {

enum class Joined {
  kNow,     // nobody rang for this session before
  kBefore,  // its bell tells what was committed since it was last taken
  kNot,     // there is no shared memory, or it has no room
};

// Enters the session until it ends, with the destinations that it publishes to.
Joined join_waiting(const int32 *destinations, int32 count);
// Has anything been committed since the bell was last taken?
bool take_waiting_bell();

// How many sessions publish to a destination of this database besides its workers.
int32 count_waiting(int32 destination);

}  // namespace retrysafe::runtime
