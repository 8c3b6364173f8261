// An idempotency key with its scope, as it comes in: 1 to 255 bytes, in a scope of 0 to 255 bytes, compared
// byte by byte.
#pragma once

#include <string_view>

#include "pg/text.hpp"
#include "pg/server.hpp"

namespace retrysafe::idempotency {

inline constexpr int kMaxKeyBytes = 255;
inline constexpr int kMaxScopeBytes = 255;

using pg::bytes_of;

struct Key {
  text *key;
  text *scope;

  std::string_view key_bytes() const { return bytes_of(key); }
  std::string_view scope_bytes() const { return bytes_of(scope); }
};

// Takes arguments number `key` and `scope`; raises kInvalidKey and kInvalidScope.
Key key_argument(FunctionCallInfo fcinfo, int key, int scope);

// What the lock on a key and the registry of claims go by. Two keys with one hash wait for each other, no
// worse.
uint64 hash_of(const Key &key);

}  // namespace retrysafe::idempotency
