// The keys that the current transaction began, and what became of them. Process memory: the lock on the key
// is what other transactions see.
//
//   none ── begin ──> owned ── complete ──> completed
//                       │ rollback of the subtransaction that began it
//                       └──────────────────> lost ── begin ──> owned, or none when the answer was a saved one
//
// A rolled back subtransaction undoes its changes one by one: complete goes back to owned, begin to lost.
#pragma once

#include "idempotency/key.hpp"

namespace retrysafe::idempotency {

enum class ClaimState : uint8 {
  kNone,       // known from earlier in the transaction, but nothing is claimed now
  kOwned,      // begun here, not completed
  kCompleted,  // begun and completed here
  kLost,       // begun in a subtransaction that was rolled back: the key is free for others
};

// What a key was begun with.
struct Terms {
  TimestampTz begun_at;
  const Interval *ttl;  // null: retrysafe.idem_retention
  const bytea *request_hash;
};

struct Claim {
  ClaimState state;
  const Terms *terms;         // of the last begin that was not rolled back; null while there is none
  int32 events;               // that were numbered and not rolled back
  SubTransactionId begun_in;  // where it was begun; if it was lost and begun again, the first time
  Key key;
  uint64 hash;
  Claim *same_hash;  // chain of keys with one hash
  Claim *previous;   // chain of all claims of the transaction
};

// Null when the transaction never began the key.
const Claim *find_claim(const Key &key);

// For work that is allowed under a key only: raises kKeyNotOwned or kClaimLost unless the transaction owns
// the key or has completed it.
void require_claim(const Key &key);

// The number of the next event of the key: 1, 2, 3 … Raises as require_claim does. The numbers of what is
// rolled back are given again, so that they depend on nothing but what the transaction commits. They go on
// when the key is begun again in the same transaction.
int32 number_event(const Key &key);

// The changes. Each is undone when the current subtransaction is rolled back.
void claim_begun(const Key &key, const Terms &terms);
void claim_completed(const Key &key);
void claim_dropped(const Key &key);  // answered by somebody else's record, or forgotten

// The subtransaction `sub` was a piece of work of its own and has been rolled back as a whole: what it lost
// protects nothing that could be committed. To be called outside of subtransactions.
void forget_claims_lost_in(SubTransactionId sub);

// Called once from _PG_init.
void watch_claims();

}  // namespace retrysafe::idempotency
