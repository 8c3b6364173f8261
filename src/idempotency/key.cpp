#include "idempotency/key.hpp"

#include <cstring>

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

uint64 hash_of(const Key &key) {
  // The length of the scope goes first, so that ('a', 'bc') and ('ab', 'c') are different bytes.
  unsigned char joined[1 + kMaxScopeBytes + kMaxKeyBytes];
  const std::string_view s = key.scope_bytes();
  const std::string_view k = key.key_bytes();
  joined[0] = static_cast<unsigned char>(s.size());
  std::memcpy(joined + 1, s.data(), s.size());
  std::memcpy(joined + 1 + s.size(), k.data(), k.size());
  return hash_bytes_extended(joined, static_cast<int>(1 + s.size() + k.size()), 0);
}

}  // namespace retrysafe::idempotency
