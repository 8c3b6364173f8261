// The row of a shard: who works it. Internal to the engine.
#pragma once

#include "core/routing.hpp"
#include "outbox/engine.hpp"
#include "pg/text.hpp"

#include "pg/server.hpp"

namespace retrysafe::outbox {

constexpr int64 kShortestLeaseUs = 100'000;
constexpr int64 kLongestLeaseUs = USECS_PER_DAY;

struct ShardKey {
  int32 destination;
  int32 shard;
};

struct ShardRow {
  int32 shard;
  int64 token;
  const char *holder;  // null: free
  int32 holder_pid;    // 0: a pull client
  TimeLineID timeline;
  TimestampTz lease_until;
  int32 failures;
  TimestampTz retry_at;  // the destination was unreachable: not before then; the beginning of time: at once
};

// By the UTF-8 of the key: a shard keeps its keys, and its progress with them, when the database moves to a
// server with another encoding.
inline uint32 shard_of_key(std::string_view ordering_key, uint32 shards) {
  return shard_of(pg::to_utf8(ordering_key), shards);
}

// Names a session: unlike its pid it does not come again. `kind` is "worker" or "session".
const char *session_name(const char *kind);

// Can the shard be taken at this time? Free, lease over, held by a worker that is dead, or since before the
// server was promoted or recovered: what was handed out then cannot be recorded here.
bool is_free(const ShardRow &row, TimestampTz now);

// --- inside pg::spi ----------------------------------------------------------------------------------------

// Locks the row until the end of the transaction. False: it is gone, or `wait` is false and somebody has it
// locked.
bool lock_shard(int32 destination, int32 shard, bool wait, ShardRow *row);

// Waits for all rows of a destination and locks them.
void lock_all_shards(int32 destination);

// All shards of a destination, by number.
int32 list_shards(int32 destination, MemoryContext memory, ShardRow **rows);

// Whether the destination was away when it was tried last.
bool is_backing_off(int32 destination, int32 shard);

// A new holder, with a new token.
Claim take_shard(int32 destination, const ShardRow &row, const Holder &holder, TimestampTz lease_until);
void extend_lease(int32 destination, int32 shard, TimestampTz lease_until);
void free_shard(int32 destination, int32 shard);

// Is the claim good, going by the locked row?
bool is_valid(const ShardRow &row, const Claim &claim, TimestampTz now);
[[noreturn]] void raise_stale(const Claim &claim);

}  // namespace retrysafe::outbox
