// Digests of requests, as they come in: 1 to 64 bytes, which tell whether two requests with one key are the
// same.
#pragma once

#include "pg/server.hpp"

namespace retrysafe::idempotency {

// How a digest is given: as bytes, or as text that stands for its UTF-8 bytes or, after \x, for bytes in
// hexadecimal.
enum class HashForm { kBytes, kText };

// Argument number `argument`, checked; raises kInvalidRequestHash.
bytea *request_hash_argument(FunctionCallInfo fcinfo, int argument, HashForm form);

// Digests that count as the same request; none for null.
struct HashList {
  bytea **hashes;
  int count;
};
HashList request_hash_list_argument(FunctionCallInfo fcinfo, int argument, HashForm form);

bool same_bytes(const bytea *a, const bytea *b);

// SHA-256 of the canonical form: what jsonb's text output is in UTF-8. Order of keys and white space are gone
// by then, and every digit of a number is there.
bytea *hash_request(Jsonb *request);

}  // namespace retrysafe::idempotency
