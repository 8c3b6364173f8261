// One request after the other on one handle of the library. Nothing is allocated per request once the buffers
// have grown: the payload is sent from where it lies, the list of headers is our own and points into one
// buffer.
#pragma once

#include <curl/curl.h>

#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "sinks/http/endpoint.hpp"

namespace retrysafe::http {

class Transfer {
 public:
  explicit Transfer(Endpoint &endpoint);
  ~Transfer() = default;
  Transfer(const Transfer &) = delete;
  Transfer &operator=(const Transfer &) = delete;

  CURL *handle() const { return easy_.get(); }
  static Transfer *of(CURL *handle);

  // As much as an answer is read of.
  static size_t most_bytes(const Endpoint &endpoint);

  // Makes the request for this event, which stays until the transfer has ended.
  void prepare(const retrysafe_event &event);

  uint64_t tag() const { return tag_; }
  std::string_view event_id() const { return event_id_; }

  // What came of it. `open`: the answer may speak of the event or of everything, see OutageDetector.
  retrysafe_outcome judge(CURLcode code, bool *open);

 private:
  static constexpr long kNone = -1;

  void add_header(std::string_view name, std::string_view value, bool encode);
  void link_headers();
  std::string shown_answer() const;
  std::string failure(CURLcode code) const;

  static size_t on_head(char *data, size_t size, size_t count, void *self);
  static size_t on_body(char *data, size_t size, size_t count, void *self);
  static curl_socket_t on_open_socket(void *self, curlsocktype, curl_sockaddr *address);

  Endpoint &endpoint_;
  std::unique_ptr<CURL, void (*)(CURL *)> easy_;
  std::string header_text_;  // lines, each ending with NUL
  std::vector<curl_slist> header_list_;
  std::string body_;  // structured mode only
  std::string signature_;

  uint64_t tag_ = 0;
  std::string event_id_;
  long status_ = kNone;  // of the head that is being read, or was read last
  bool head_complete_ = false;
  size_t head_bytes_ = 0;
  size_t answer_bytes_ = 0;
  std::string answer_;           // its beginning
  std::string refused_address_;  // why we did not connect
  char error_[CURL_ERROR_SIZE] = "";
};

}  // namespace retrysafe::http
