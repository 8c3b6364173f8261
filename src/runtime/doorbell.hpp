// Deciding, without a query, whether there may be anything new since a worker last looked.
//
// Sessions that emit ring the bell of the workers (wakeup.hpp). What nobody rings for: COMMIT PREPARED, and
// sessions without the shared memory. For those the worker compares counters every retrysafe.poll_interval.
// Only when transactions have ended since it last looked does it read the position of the log, in a short
// transaction; and only when that moved, or when transactions that might have drawn positions were still open
// at the last look, does it look again at once. What draws no position, as a destination that is altered, has
// to wait until the worker looks anyway.
#pragma once

#include "pg/server.hpp"

namespace retrysafe::runtime {

class Doorbell {
 public:
  // Jumpable; inside a transaction, before anything is read: what is committed from here on counts as new.
  void looked();
  // No transaction ended since the last look.
  bool silent() const { return pg::transactions_completed() == completed_; }
  // Jumpable; inside a transaction: whether another look is worth it. When not, silent() holds again.
  bool worth_a_look();

 private:
  uint64 completed_ = 0;
  int64 position_ = -1;
  bool open_transactions_ = true;
};

}  // namespace retrysafe::runtime
