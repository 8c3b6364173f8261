#include "pg/digest.hpp"

#include <openssl/evp.h>

#include "pg/server.hpp"

namespace retrysafe::pg {

namespace {

[[noreturn]] void fail() {
  elog(ERROR, "retrysafe: cannot compute SHA-256");
  pg_unreachable();
}

// One for the process, made at first use: finding the algorithm takes several times as long as the digest of
// a few bytes does, and the server's own functions look for it each time.
EVP_MD_CTX *started() {
  static constinit EVP_MD_CTX *context = nullptr;
  if (!context) {
    EVP_MD_CTX *fresh = EVP_MD_CTX_new();
    if (!fresh || EVP_DigestInit_ex(fresh, EVP_sha256(), nullptr) != 1) {
      EVP_MD_CTX_free(fresh);
      fail();
    }
    context = fresh;
  } else if (EVP_DigestInit_ex(context, nullptr, nullptr) != 1) {  // the same again
    fail();
  }
  return context;
}

}  // namespace

Sha256Digest sha256(std::initializer_list<std::string_view> parts) {
  EVP_MD_CTX *context = started();
  for (const std::string_view part : parts)
    if (EVP_DigestUpdate(context, part.data(), part.size()) != 1) fail();
  Sha256Digest digest;
  if (EVP_DigestFinal_ex(context, digest.data(), nullptr) != 1) fail();
  return digest;
}

}  // namespace retrysafe::pg
