// This session's own entry among those that wait for events: see outbox_wait.
#pragma once

#include "pg/server.hpp"

namespace retrysafe::runtime {

enum class Joined {
  kNow,     // nobody rang for this session before
  kBefore,  // its bell tells what was committed since it was last taken
  kNot,     // there is no shared memory, or it has no room
};

// The session begins to wait for the destinations that it publishes to. Its bell rings from the first time on
// until it ends.
Joined join_waiting(const int32 *destinations, int32 count);
// It stops waiting.
void leave_waiting();
// Has anything been committed since the bell was last taken?
bool take_waiting_bell();

struct Publishers {
  int32 count;
  TimestampTz until;  // the first of them counts no longer, unless it waits again; infinity: all wait now
};
// Who publishes to a destination of this database besides its workers. A connection proves nothing: the
// program behind it may stand still, have lost its power, or have other things to do. One that publishes
// comes back to outbox_wait in bounded time, and whatever is committed makes it return; so a session counts
// while it waits, and for a few seconds after.
Publishers count_publishers(int32 destination);

}  // namespace retrysafe::runtime
