// Many transfers at once without waiting: libcurl's multi interface on an epoll descriptor of our own, which
// has no limit on descriptor numbers as select has.
#pragma once

#include <curl/curl.h>

#include <chrono>
#include <optional>

namespace retrysafe::http {

class Multi {
 public:
  Multi(long max_connections, bool multiplex);
  ~Multi();
  Multi(const Multi &) = delete;
  Multi &operator=(const Multi &) = delete;

  int fd() const { return epoll_; }
  void add(CURL *transfer);
  void remove(CURL *transfer);

  // Does what can be done now; then calls `ended(CURL *, CURLcode)` for each transfer that has ended and was
  // removed.
  template <class Ended>
  void work(Ended &&ended) {
    advance();
    int left;
    while (CURLMsg *message = curl_multi_info_read(multi_, &left)) {
      if (message->msg != CURLMSG_DONE) continue;
      CURL *transfer = message->easy_handle;
      const CURLcode code = message->data.result;  // the message goes with the handle
      remove(transfer);
      ended(transfer, code);
    }
  }

  // Milliseconds until work() is due even if the descriptor stays silent; -1: it is not.
  int timeout_ms() const;

 private:
  using Clock = std::chrono::steady_clock;
  void advance();

  static int on_socket(CURL *, curl_socket_t socket, int what, void *self, void *known);
  static int on_timer(CURLM *, long timeout_ms, void *self);

  int epoll_ = -1;
  CURLM *multi_ = nullptr;
  std::optional<Clock::time_point> deadline_;
};

}  // namespace retrysafe::http
