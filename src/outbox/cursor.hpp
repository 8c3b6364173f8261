// How far a shard has got: the newest row of outbox_batches.
#pragma once

#include "pg/server.hpp"

namespace retrysafe::outbox {

struct Cursor {
  int64 seq;
  int64 window_no;
  int64 position;  // all of the window up to here is recorded
  TransactionId
      writer;  // xmin of the row: a row of the same seq that another transaction wrote is another cursor
  int64 total_delivered;
  int64 total_parked;
};

// As committed now, or written by this transaction. Raises kCursorMissing: progress that is gone must not
// look like no progress yet.
Cursor load_cursor(int32 destination, int32 shard);

// The first position that was drawn in an era.
int64 first_id_of_era(int32 era);

}  // namespace retrysafe::outbox
