// A batch that was handed out, found again when its client says what became of it.
#pragma once

#include <cstring>

#include "core/batch_handle.hpp"
#include "outbox/engine.hpp"
#include "outbox/range.hpp"
#include "outbox/shard.hpp"

#include "pg/server.hpp"

namespace retrysafe::outbox {

struct HandedOut {
  Destination *destination;
  ShardRow row;  // locked
  Batch batch;   // what of it is not recorded yet; its parked events come first
  Range range;   // its part of the log
};

// All of these are called inside of pg::spi. The first fills in `row`, the claim and the log; it and the
// second raise when the lease has ended.
void lock_handed_out(const BatchHandle &handle, HandedOut *out);
void find_handed_out(const BatchHandle &handle, HandedOut *out);

// Cuts a batch behind the event with that position, which may be settled already. False: all up to there is
// recorded.
bool cut_behind(const BatchHandle &handle, int64 up_to, HandedOut *out);

// Whether several events of a batch have that id, as far as it is known of those that were parked since. Then
// it may be named again: whoever does so means another one.
bool comes_twice(const HandedOut &out, const pg_uuid_t &id);

inline int compare_ids(const pg_uuid_t &a, const pg_uuid_t &b) {
  return memcmp(&a, &b, sizeof a);
}

}  // namespace retrysafe::outbox
