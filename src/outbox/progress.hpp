// The record of deliveries: what the rows of outbox_batches tell about the past of a shard. Their numbers
// have no gaps and everything in them grows, so that whatever is asked is found by bisection.
#pragma once

#include "pg/server.hpp"

namespace retrysafe::outbox {

struct BatchEnd {
  int64 seq;
  int64 window_no;
  int64 position;
  TimestampTz published_at;

  bool covers(int64 window, int64 id) const {
    return window_no > window || (window_no == window && position >= id);
  }
};

// The newest batch; false when the shard has none.
bool last_batch(int32 destination, int32 shard, BatchEnd *batch);

// The batch that recorded the event of a window; false while none has.
bool batch_covering(int32 destination, int32 shard, int64 window_no, int64 id, BatchEnd *batch);

// The newest batch from before a time. The start of a destination counts, however new it is: what was before
// it was never recorded. What a change of shards begins with was, and the rows that told when are gone. False
// when there is none, or the older ones have been removed.
bool last_batch_before(int32 destination, int32 shard, TimestampTz time, BatchEnd *batch);

}  // namespace retrysafe::outbox
