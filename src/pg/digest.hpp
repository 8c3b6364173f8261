// SHA-256 by the server's own implementation.
#pragma once

#include "core/event_id.hpp"
#include "pg/server.hpp"

namespace retrysafe::pg {

// Jumpable: the context is the server's and ends with the transaction on an error.
class Sha256 {
 public:
  Sha256() : context_(pg_cryptohash_create(PG_SHA256)) {
    if (!context_ || pg_cryptohash_init(context_) < 0) fail();
  }

  void update(const void *data, std::size_t size) {
    if (pg_cryptohash_update(context_, static_cast<const uint8 *>(data), size) < 0) fail();
  }
  void update(std::string_view bytes) { update(bytes.data(), bytes.size()); }

  Sha256Digest finish() {
    Sha256Digest digest;
    if (pg_cryptohash_final(context_, digest.data(), digest.size()) < 0) fail();
    pg_cryptohash_free(context_);
    return digest;
  }

 private:
  [[noreturn]] void fail() {
    elog(ERROR, "retrysafe: cannot compute SHA-256: %s",
         context_ ? pg_cryptohash_error(context_) : "out of memory");
    pg_unreachable();
  }

  pg_cryptohash_ctx *context_;
};

}  // namespace retrysafe::pg
