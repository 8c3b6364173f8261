// Transaction events. The server's callback lists only grow and are walked for every transaction, so
// retrysafe registers one callback of each kind, once per process, and hands the events to a fixed set of
// subscribers. Only a transaction that may be refused has more, until it ends.
#pragma once

#include "pg/server.hpp"

namespace retrysafe::pg {

struct XactSubscriber {
  // May raise: the transaction then fails.
  void (*before_commit)();
  void (*before_prepare)();
  // Must not raise, allocate or throw: the commit record is written, or the transaction is being taken apart.
  void (*after_commit)() noexcept;
  void (*after_prepare)() noexcept;
  void (*after_abort)() noexcept;
  void (*sub_commit)(SubTransactionId sub, SubTransactionId parent) noexcept;
  void (*sub_abort)(SubTransactionId sub, SubTransactionId parent) noexcept;
};

// Called from _PG_init; `subscriber` lives as long as the process. Null members are skipped.
void subscribe_to_transactions(const XactSubscriber *subscriber);

// The current transaction may be refused: before_commit or before_prepare is called before other extensions
// act on its end, as postgres_fdw does, which commits on the far side. An extension that registers later than
// this still comes first, unless a statement COMMIT or PREPARE TRANSACTION follows. Jumpable.
void ask_before_others();

}  // namespace retrysafe::pg
