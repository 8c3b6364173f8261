// Over HTTP/2 libcurl reads for as long as something comes, in one call. Of frames that are no part of an
// answer, or an empty one, it tells nobody, and it looks at no time limit meanwhile: with a far side that
// sends them without end it would stay for ever, and all other destinations would wait. So the bytes of its
// TLS connections are counted. Where more comes than all requests under way can be answered with, the
// connection counts as closed by the far side.
#pragma once

#include <curl/curl.h>
#include <openssl/ssl.h>

#include <cstddef>

namespace retrysafe::http {

class TlsMeter {
 public:
  // Whether this libcurl lets one look: one with OpenSSL does.
  static bool works();

  // `allowance`: bytes that may come until a request has ended.
  explicit TlsMeter(size_t allowance) : allowance_(allowance) {}

  // All connections that are opened for the handle, for as long as they last.
  void watch(CURL *handle);

  void request_ended() { received_ = 0; }

 private:
  static CURLcode on_context(CURL *, void *context, void *self);
  static void on_record(int outgoing, int, int type, const void *bytes, size_t size, SSL *connection,
                        void *self);

  size_t allowance_;
  size_t received_ = 0;
};

}  // namespace retrysafe::http
