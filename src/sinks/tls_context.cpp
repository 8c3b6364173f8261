#include "sinks/tls_context.hpp"

#include <openssl/err.h>

#include <new>
#include <stdexcept>
#include <string>

#include "sinks/handshake_limit.hpp"

namespace retrysafe::sink {

namespace {

[[noreturn]] void refuse(const std::string &option, const char *what) {
  throw std::invalid_argument("option \"" + option + "\" " + what);
}

void require(bool good, const char *option) {
  if (good) return;
  const unsigned long code = ERR_peek_last_error();
  const char *reason = code ? ERR_reason_error_string(code) : nullptr;
  throw std::invalid_argument("the file of option \"" + std::string(option) +
                              "\" cannot be used: " + (reason ? reason : "unknown error"));
}

}  // namespace

std::optional<TlsContext> TlsContext::of(const Options &options) {
  if (options.flag("tls", false)) return TlsContext(options);
  // Whoever names certificates wants TLS, and must not get a connection without it.
  for (const char *name : {"ca_file", "cert_file", "key_file"})
    if (options.has(name)) refuse(name, "needs option \"tls\"");
  return std::nullopt;
}

TlsContext::TlsContext(const Options &options) : context_(SSL_CTX_new(TLS_client_method()), SSL_CTX_free) {
  if (!context_) throw std::bad_alloc();
  ERR_clear_error();
  SSL_CTX *const context = context_.get();
  SSL_CTX_set_min_proto_version(context, TLS1_2_VERSION);
  SSL_CTX_set_options(context, SSL_OP_NO_RENEGOTIATION);  // so that writing never waits for reading
  SSL_CTX_set_msg_callback(context, limit_handshake);
  SSL_CTX_set_verify(context, SSL_VERIFY_PEER, nullptr);
  // Else a password of the key would be asked for on a terminal.
  SSL_CTX_set_default_passwd_cb(context, [](char *, int, int, void *) { return 0; });
  const std::string ca_file(options.text("ca_file")), cert_file(options.text("cert_file")),
      key_file(options.text("key_file"));
  if (ca_file.empty())
    SSL_CTX_set_default_verify_paths(context);
  else
    require(SSL_CTX_load_verify_locations(context, ca_file.c_str(), nullptr) == 1, "ca_file");
  if (cert_file.empty() != key_file.empty())
    throw std::invalid_argument("options \"cert_file\" and \"key_file\" need each other");
  if (cert_file.empty()) return;
  require(SSL_CTX_use_certificate_chain_file(context, cert_file.c_str()) == 1, "cert_file");
  require(SSL_CTX_use_PrivateKey_file(context, key_file.c_str(), SSL_FILETYPE_PEM) == 1, "key_file");
}

}  // namespace retrysafe::sink
