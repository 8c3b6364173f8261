// Beginning a key, and ending it with an answer: what the SQL functions are made of.
#pragma once

#include "idempotency/key.hpp"
#include "idempotency/lock.hpp"
#include "idempotency/request_hash.hpp"

namespace retrysafe::idempotency {

enum class Outcome { kNew, kReplay, kConflict, kInProgress, kUnknown };
const char *name_of(Outcome outcome);

struct Answer {
  Outcome outcome;
  Jsonb *response;  // kReplay only, like the status
  text *status;
};

struct Request {
  Key key;
  bytea *hash;
  HashList also_accept;  // digests by an older scheme
};

// Raises kInvalidTtl unless positive and finite.
void check_ttl(const Interval &ttl);

// kNew makes the current transaction the owner of the key. kInProgress only with Wait::kNo.
Answer begin(const Request &request, const Interval *ttl, Wait wait);

// Saves the answer of a key that this transaction owns.
void complete(const Key &key, Jsonb *response, text *status);

}  // namespace retrysafe::idempotency
