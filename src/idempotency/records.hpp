// The saved answers: finding, saving and removing a record.
#pragma once

#include "idempotency/claims.hpp"
#include "idempotency/key.hpp"

namespace retrysafe::idempotency {

// Copied into the memory context of the caller.
struct Record {
  bytea *request_hash;
  text *status;
  Jsonb *response;  // null: completed without an answer
  TimestampTz expires_at;

  // Expiry decides by itself, whether or not the clean-up has run.
  bool is_alive(TimestampTz now) const { return expires_at > now; }
};

// The newest committed record of the key, or the current transaction's own; null when there is none. Where no
// lock on the key is held, a record that was completed just now may be missed. Takes no predicate lock,
// writes nothing. A record that the snapshot of a REPEATABLE READ or SERIALIZABLE transaction cannot see is a
// serialization failure: its answer would name objects that the caller cannot read.
const Record *find_record(const Key &key);

// Writes the answer of a key that this transaction owns.
void save_record(const Claim &claim, TimestampTz completed_at, TimestampTz expires_at, const text *status,
                 const Jsonb *response);

bool remove_record(const Key &key);

}  // namespace retrysafe::idempotency
