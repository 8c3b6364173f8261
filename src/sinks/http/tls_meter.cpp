#include "sinks/http/tls_meter.hpp"

#include <stdexcept>
#include <string_view>

#include "sinks/handshake_limit.hpp"

namespace retrysafe::http {

bool TlsMeter::works() {
  const char *library = curl_version_info(CURLVERSION_NOW)->ssl_version;
  return library && std::string_view(library).starts_with("OpenSSL/");
}

void TlsMeter::watch(CURL *handle) {
  if (curl_easy_setopt(handle, CURLOPT_SSL_CTX_FUNCTION, &TlsMeter::on_context) != CURLE_OK ||
      curl_easy_setopt(handle, CURLOPT_SSL_CTX_DATA, this) != CURLE_OK)
    throw std::runtime_error("libcurl does not let its TLS connections be watched");
}

CURLcode TlsMeter::on_context(CURL *, void *context, void *self) {
  SSL_CTX_set_msg_callback(static_cast<SSL_CTX *>(context), &TlsMeter::on_record);
  SSL_CTX_set_msg_callback_arg(static_cast<SSL_CTX *>(context), self);
  return CURLE_OK;
}

// Called with the head of each record, among others.
void TlsMeter::on_record(int outgoing, int version, int type, const void *bytes, size_t size, SSL *connection,
                         void *self) {
  sink::limit_handshake(outgoing, version, type, bytes, size, connection, nullptr);
  if (outgoing != 0 || type != SSL3_RT_HEADER || size < SSL3_RT_HEADER_LENGTH) return;
  auto *meter = static_cast<TlsMeter *>(self);
  const auto *head = static_cast<const unsigned char *>(bytes);
  meter->received_ += size + (size_t{head[3]} << 8 | head[4]);
  if (meter->received_ > meter->allowance_)
    SSL_set_shutdown(connection, SSL_get_shutdown(connection) | SSL_RECEIVED_SHUTDOWN);
}

}  // namespace retrysafe::http
