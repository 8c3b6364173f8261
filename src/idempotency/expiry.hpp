// Removing what has expired. Nothing depends on it but space: look-ups decide expiry by themselves.
#pragma once

#include "storage/rotation.hpp"

#include "pg/server.hpp"

namespace retrysafe::idempotency {

// Removes up to `max_rows` expired records that had a ttl of their own and as many expired inbox messages;
// returns how many in all. Needs READ COMMITTED. Skips rows that another transaction is just replacing, and
// should be committed soon: the owner of a key that was removed here waits with its own record for that.
int64 remove_expired(int64 max_rows);

// The other records are in a ring, and go by the piece.
storage::Turn turn_record_ring();

}  // namespace retrysafe::idempotency
