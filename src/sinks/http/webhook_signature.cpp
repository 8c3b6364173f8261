#include "sinks/http/webhook_signature.hpp"

#include <openssl/core_names.h>
#include <openssl/crypto.h>

#include <stdexcept>

namespace retrysafe::http {

namespace {

constexpr std::string_view kPrefix = "whsec_";
constexpr size_t kDigestBytes = 32;

// Base64 with or without padding.
std::string decode(std::string_view base64) {
  std::string padded(base64);
  while (padded.size() % 4 != 0) padded += '=';
  std::string bytes(padded.size() / 4 * 3, '\0');
  const int size = EVP_DecodeBlock(reinterpret_cast<unsigned char *>(bytes.data()),
                                   reinterpret_cast<const unsigned char *>(padded.data()),
                                   static_cast<int>(padded.size()));
  if (size <= 0) throw std::invalid_argument("what follows \"whsec_\" in the secret is not base64");
  // EVP_DecodeBlock counts padding as bytes.
  size_t padding = 0;
  while (padding < 2 && padded[padded.size() - 1 - padding] == '=') ++padding;
  bytes.resize(static_cast<size_t>(size) - padding);
  OPENSSL_cleanse(padded.data(), padded.size());
  return bytes;
}

const unsigned char *bytes(std::string_view text) {
  return reinterpret_cast<const unsigned char *>(text.data());
}

}  // namespace

WebhookSigner::WebhookSigner(std::string_view secrets) {
  EVP_MAC *hmac = EVP_MAC_fetch(nullptr, "HMAC", nullptr);
  const std::unique_ptr<EVP_MAC, void (*)(EVP_MAC *)> free_hmac(hmac, EVP_MAC_free);
  char digest[] = "SHA256";
  const OSSL_PARAM parameters[] = {OSSL_PARAM_construct_utf8_string(OSSL_MAC_PARAM_DIGEST, digest, 0),
                                   OSSL_PARAM_construct_end()};
  while (!secrets.empty()) {
    const size_t blank = secrets.find(' ');
    const std::string_view secret = secrets.substr(0, blank);
    secrets.remove_prefix(blank == std::string_view::npos ? secrets.size() : blank + 1);
    if (secret.empty()) continue;
    std::string key =
        secret.starts_with(kPrefix) ? decode(secret.substr(kPrefix.size())) : std::string(secret);
    std::unique_ptr<EVP_MAC_CTX, Free> context(hmac ? EVP_MAC_CTX_new(hmac) : nullptr);
    const bool good = context && EVP_MAC_init(context.get(), bytes(key), key.size(), parameters) == 1;
    OPENSSL_cleanse(key.data(), key.size());
    if (!good) throw std::runtime_error("HMAC-SHA256 is not available");
    keys_.push_back(std::move(context));
  }
  // Or requests would go out without a signature.
  if (keys_.empty()) throw std::invalid_argument("the secret is blank");
}

void WebhookSigner::append_signature(std::string_view id, std::string_view timestamp, std::string_view body,
                                     std::string *out) {
  bool first = true;
  for (const auto &key : keys_) {
    unsigned char digest[kDigestBytes];
    size_t size = 0;
    bool good = EVP_MAC_init(key.get(), nullptr, 0, nullptr) == 1;  // the same key again
    for (std::string_view part : {id, std::string_view("."), timestamp, std::string_view("."), body})
      good = good && EVP_MAC_update(key.get(), bytes(part), part.size()) == 1;
    if (!good || EVP_MAC_final(key.get(), digest, &size, sizeof digest) != 1)
      throw std::runtime_error("the signature could not be computed");
    unsigned char base64[4 * ((kDigestBytes + 2) / 3) + 1];
    const int length = EVP_EncodeBlock(base64, digest, static_cast<int>(size));
    if (!first) *out += ' ';
    first = false;
    *out += "v1,";
    out->append(reinterpret_cast<const char *>(base64), static_cast<size_t>(length));
  }
}

}  // namespace retrysafe::http
