#include "runtime/doorbell.hpp"

#include "outbox/snapshot.hpp"
#include "pg/extension.hpp"

#include "pg/server.hpp"

namespace retrysafe::runtime {

void Doorbell::looked() {
  // The counter first: a transaction that ends after it was read makes the next poll look again.
  completed_ = pg::transactions_completed();
  position_ = pg::as_owner([] { return outbox::last_log_position(); });
  const Snapshot snapshot = GetLatestSnapshot();
  // A transaction gets its number before it draws a position. So if none is open now, whatever comes later
  // draws positions above this one.
  open_transactions_ = snapshot->xcnt > 0 || snapshot->takenDuringRecovery ||
                       snapshot->xmax != XidFromFullTransactionId(ReadNextFullTransactionId());
}

bool Doorbell::worth_a_look() {
  const uint64 completed = pg::transactions_completed();
  const int64 position = pg::as_owner([] { return outbox::last_log_position(); });
  if (open_transactions_ || position != position_) return true;
  completed_ = completed;
  return false;
}

}  // namespace retrysafe::runtime
