#include "idempotency/key.hpp"

#include <cstring>

#include "pg/digest.hpp"
#include "pg/error.hpp"

namespace retrysafe::idempotency {

Key key_argument(FunctionCallInfo fcinfo, int key, int scope) {
  const char *const key_hint = "A key is 1 to 255 bytes that stay the same when the request is sent again.";
  const char *const scope_hint =
      "A scope is 0 to 255 bytes, for example the name of the operation or of the tenant.";
  if (PG_ARGISNULL(key)) pg::raise(kInvalidKey, key_hint, "idempotency key must not be null");
  if (PG_ARGISNULL(scope))
    pg::raise(kInvalidScope, scope_hint, "scope of an idempotency key must not be null");
  const Key result{PG_GETARG_TEXT_PP(key), PG_GETARG_TEXT_PP(scope)};
  const size_t key_size = result.key_bytes().size();
  const size_t scope_size = result.scope_bytes().size();
  if (key_size == 0) pg::raise(kInvalidKey, key_hint, "idempotency key must not be empty");
  if (key_size > kMaxKeyBytes)
    pg::raise(kInvalidKey, key_hint, "idempotency key is too long: %zu bytes", key_size);
  if (scope_size > kMaxScopeBytes)
    pg::raise(kInvalidScope, scope_hint, "scope of an idempotency key is too long: %zu bytes", scope_size);
  return result;
}

// A hash for tables would do, were it not for those who choose keys: of such a one they can make a key that
// waits for somebody else's.
uint64 hash_of(const Key &key) {
  const std::string_view scope = key.scope_bytes();
  // Its length goes first, so that ('a', 'bc') and ('ab', 'c') are different bytes.
  const char scope_size = static_cast<char>(scope.size());
  const Sha256Digest digest = pg::sha256({{&scope_size, 1}, scope, key.key_bytes()});
  uint64 hash;
  std::memcpy(&hash, digest.data(), sizeof hash);
  return hash;
}

}  // namespace retrysafe::idempotency
