#include "sinks/redis/tls.hpp"

#include <openssl/err.h>
#include <openssl/x509v3.h>

#include <new>

namespace retrysafe::redis {

namespace {

std::string last_error() {
  const unsigned long code = ERR_peek_last_error();
  const char *reason = code ? ERR_reason_error_string(code) : nullptr;
  return reason ? reason : "unknown error";
}

}  // namespace

Tls::Tls(const sink::TlsContext &context, const std::string &host) : ssl_(SSL_new(context.get()), SSL_free) {
  BIO *const in = BIO_new(BIO_s_mem());
  BIO *const out = BIO_new(BIO_s_mem());
  if (!ssl_ || !in || !out) {
    BIO_free(in);
    BIO_free(out);
    throw std::bad_alloc();
  }
  SSL_set_bio(ssl_.get(), in, out);
  SSL_set_connect_state(ssl_.get());
  X509_VERIFY_PARAM *const verify = SSL_get0_param(ssl_.get());
  if (X509_VERIFY_PARAM_set1_ip_asc(verify, host.c_str()) == 1) return;
  ERR_clear_error();
  X509_VERIFY_PARAM_set_hostflags(verify, X509_CHECK_FLAG_NO_PARTIAL_WILDCARDS);
  if (SSL_set1_host(ssl_.get(), host.c_str()) != 1 ||
      SSL_ctrl(ssl_.get(), SSL_CTRL_SET_TLSEXT_HOSTNAME, TLSEXT_NAMETYPE_host_name,
               const_cast<char *>(host.c_str())) != 1)
    throw std::bad_alloc();
}

void Tls::feed(std::string_view bytes) {
  const int size = static_cast<int>(bytes.size());
  if (BIO_write(SSL_get_rbio(ssl_.get()), bytes.data(), size) != size) throw std::bad_alloc();
}

bool Tls::handshake() {
  ERR_clear_error();
  return goes_on(SSL_do_handshake(ssl_.get()));
}

bool Tls::decrypt(std::string *out) {
  char buffer[16 * 1024];
  ERR_clear_error();
  for (;;) {
    const int size = SSL_read(ssl_.get(), buffer, sizeof buffer);
    if (size <= 0) return goes_on(size);
    out->append(buffer, static_cast<size_t>(size));
  }
}

bool Tls::encrypt(std::string_view text) {
  size_t written = 0;
  ERR_clear_error();
  const int result = SSL_write_ex(ssl_.get(), text.data(), text.size(), &written);
  if (result == 1) return true;
  error_ = "TLS: the connection takes no data";
  (void)goes_on(result);
  return false;
}

void Tls::take_output(std::string *out) {
  BIO *const bio = SSL_get_wbio(ssl_.get());
  char *data = nullptr;
  const long size = BIO_get_mem_data(bio, &data);
  if (size <= 0) return;
  out->append(data, static_cast<size_t>(size));
  (void)BIO_reset(bio);
}

bool Tls::goes_on(int result) {
  const int status = SSL_get_error(ssl_.get(), result);
  if (status == SSL_ERROR_NONE || status == SSL_ERROR_WANT_READ) return true;
  const long verdict = SSL_get_verify_result(ssl_.get());
  if (status == SSL_ERROR_ZERO_RETURN)
    error_ = "the server closed the connection";
  else if (verdict != X509_V_OK)
    error_ = std::string("TLS: the server's certificate is not trusted: ") +
             X509_verify_cert_error_string(verdict);
  else
    error_ = "TLS: " + last_error();
  ERR_clear_error();
  return false;
}

}  // namespace retrysafe::redis
