// Taking snapshots of the log, and the rows of outbox_windows that keep them. Jumpable; needs a transaction.
#pragma once

#include "core/snapshot.hpp"
#include "outbox/engine.hpp"
#include "pg/server.hpp"

namespace retrysafe::outbox {

// What the log holds now. Events that this very transaction emits, before or after, are not in it.
// `era` and `first_id` are those of the era that the snapshot belongs to.
StoredSnapshot take_snapshot(int32 era, int64 first_id);

// The last id that was drawn; 0 before the first. For callers that act as the owner of the extension.
int64 last_log_position();

// A copy in one piece of memory, list included; pfree gives it back.
StoredSnapshot *copy_snapshot(const StoredSnapshot &snapshot, MemoryContext memory);

// Whether two are the same one.
bool same_snapshot(const StoredSnapshot &a, const StoredSnapshot &b);

struct StoredWindow {
  StoredSnapshot snapshot;
  TimestampTz taken_at;
  int64 resumed_at;  // how far the window before it had been read; -1: to its end
};

// Null when there is no such row.
StoredWindow *load_window(int32 destination, int32 shard, int64 window_no);

// `resumed_at` -1: the window before it was read to its end.
void store_window(int32 destination, int32 shard, int64 window_no, const StoredSnapshot &snapshot,
                  int64 resumed_at);
// The window of a batch that opens it, in the place of a row of its number, if there is one. The caller holds
// the lock of the shard row, and the cursor is the one that the batch continues.
void store_window(const Batch &batch);

// One step of a shard: the row that becomes its cursor. The caller holds the lock of the shard row.
struct BatchRow {
  int32 destination, shard;
  int64 seq, window_no, position, token;
  int32 delivered, parked;  // of this batch
  int64 total_delivered, total_parked;
};
void store_batch(const BatchRow &batch);

// Window 0 and the cursor of every shard of a new destination, which then gets what `start` does not see. For
// a start at "now" that is take_snapshot(), for a start at a position start_at(), see core/snapshot.hpp.
void store_start(int32 destination, const StoredSnapshot &start);

// The same for new shards in the place of others that had done all that `done` sees: that is window 1 of
// each. So what they did stays told apart from what was before the start of the destination, and counted (by
// shard 0).
void store_continuation(int32 destination, const StoredSnapshot &start, const StoredSnapshot &done,
                        int64 total_delivered, int64 total_parked);

// The first window of a new era, for one shard: `snapshot` was taken when the log was locked against writers
// and `first_id` of its era was drawn. What the shard had done before is told by the old era's arithmetic
// alone. The caller holds the lock of the shard row.
void begin_era_for_shard(int32 destination, int32 shard, const StoredSnapshot &snapshot);

}  // namespace retrysafe::outbox
