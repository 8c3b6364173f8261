// TLS as a transformation of bytes: what comes from the network goes in, and what has to go there comes out.
// It knows no socket, so that reading, writing and waiting are the same with and without it.
#pragma once

#include <memory>
#include <string>
#include <string_view>

#include <openssl/ssl.h>

#include "sinks/tls_context.hpp"

namespace retrysafe::redis {

class Tls {
 public:
  // `host` is what the certificate has to be good for: a name or an address.
  Tls(const sink::TlsContext &context, const std::string &host);

  // Bytes that came from the network.
  void feed(std::string_view bytes);
  // Goes on with the handshake. False: it failed, and error() tells why.
  bool handshake();
  bool is_ready() const { return SSL_is_init_finished(ssl_.get()); }
  // What the other side said, appended. False: it did not hold to the protocol, or said that it ends.
  bool decrypt(std::string *out);
  bool encrypt(std::string_view text);  // not empty
  // Bytes that have to go to the network, appended.
  void take_output(std::string *out);

  const std::string &error() const { return error_; }

 private:
  // After a call that returned `result`; else error() tells.
  bool goes_on(int result);

  std::unique_ptr<SSL, void (*)(SSL *)> ssl_;
  std::string error_;
};

}  // namespace retrysafe::redis
