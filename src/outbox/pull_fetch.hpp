// Where outbox_fetch begins.
#pragma once

#include "pg/server.hpp"

namespace retrysafe::outbox {

// The session's next fetch of the destination looks behind that shard first, so that a busy one does not
// starve the others.
void fetch_next_behind(int32 destination, int32 shard) noexcept;

}  // namespace retrysafe::outbox
