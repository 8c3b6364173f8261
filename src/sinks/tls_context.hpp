// What the TLS connections of a destination share, for sinks that speak TLS through OpenSSL themselves.
#pragma once

#include <openssl/ssl.h>

#include <memory>
#include <optional>

#include "sink/kit.hpp"

namespace retrysafe::sink {

// Certificates are always verified, against the system's authorities or those of ca_file.
class TlsContext {
 public:
  // By the options tls, ca_file, cert_file and key_file; nothing without tls. Throws std::invalid_argument
  // for files that cannot be used.
  static std::optional<TlsContext> of(const Options &options);

  SSL_CTX *get() const { return context_.get(); }

 private:
  explicit TlsContext(const Options &options);

  std::unique_ptr<SSL_CTX, void (*)(SSL_CTX *)> context_;
};

}  // namespace retrysafe::sink
