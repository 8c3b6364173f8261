// Signatures by Standard Webhooks: HMAC-SHA256 over "ID.TIMESTAMP.BODY".
#pragma once

#include <openssl/evp.h>

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

namespace retrysafe::http {

class WebhookSigner {
 public:
  // One secret, or several separated by blanks, each of which signs: consumers accept any, so that a secret
  // can be changed without a gap. A secret is "whsec_" and base64, or else its bytes as they are. Throws
  // std::invalid_argument for bad base64.
  explicit WebhookSigner(std::string_view secrets);

  // The value of the header webhook-signature, appended: "v1,BASE64", one for each secret.
  void append_signature(std::string_view id, std::string_view timestamp, std::string_view body,
                        std::string *out);

 private:
  struct Free {
    void operator()(EVP_MAC_CTX *context) const { EVP_MAC_CTX_free(context); }
  };
  std::vector<std::unique_ptr<EVP_MAC_CTX, Free>> keys_;
};

}  // namespace retrysafe::http
