#include "sinks/http/transfer.hpp"

#include <sys/socket.h>

#include <algorithm>
#include <charconv>
#include <ctime>
#include <new>
#include <stdexcept>

#include "core/cloud_event.hpp"
#include "core/printable.hpp"

#ifndef RETRYSAFE_VERSION
#define RETRYSAFE_VERSION "unreleased"
#endif

namespace retrysafe::http {

namespace {

constexpr size_t kKeptAnswerBytes = 1024;
constexpr size_t kShownAnswerBytes = 180;
// Heads of interim answers and what follows a body included, which the library keeps as well.
constexpr size_t kHeadBytes = 512 * 1024;
constexpr int64_t kLongestRetryAfter = 24 * 3600;  // seconds; a far side does not park events for years
constexpr long kLongestConnection = 10 * 60;       // seconds; then a changed address of the name is noticed

template <class Value>
void set(CURL *easy, CURLoption option, Value value) {
  if (curl_easy_setopt(easy, option, value) != CURLE_OK)
    throw std::runtime_error("libcurl does not know an option that is needed; it is too old");
}

// Fit for a header as it is.
bool is_plain(std::string_view value) {
  return std::all_of(value.begin(), value.end(), [](char c) { return c >= ' ' && c <= '~'; });
}

// "HTTP/1.1 202 Accepted", 0 for anything else. The library is not to be asked: it takes whatever follows
// "http/" for a 200, and an event would be delivered that nobody has accepted.
long status_in(std::string_view line) {
  const auto digit = [&](size_t i) { return i < line.size() && line[i] >= '0' && line[i] <= '9'; };
  if (!line.starts_with("HTTP/") || !digit(5)) return 0;
  const size_t blank = line.size() > 6 && line[6] == '.' && digit(7) ? 8 : 6;
  const size_t end = blank + 4;
  if (line.size() <= end || line[blank] != ' ' || !digit(blank + 1) || !digit(blank + 2) ||
      !digit(blank + 3) || std::string_view(" \r\n").find(line[end]) == std::string_view::npos)
    return 0;
  long status = 0;
  std::from_chars(line.data() + blank + 1, line.data() + end, status);
  return status;
}

// Seconds or a date; -1 when there is neither. Newer versions of libcurl know the header as well, and cut it
// to six hours.
int32_t retry_after_ms(CURL *easy) {
  curl_header *header;
  if (curl_easy_header(easy, "Retry-After", 0, CURLH_HEADER, -1, &header) != CURLHE_OK) return -1;
  const std::string_view value(header->value);
  int64_t seconds = 0;
  const auto [end, error] = std::from_chars(value.data(), value.data() + value.size(), seconds);
  if (error == std::errc::result_out_of_range) {
    seconds = value.front() == '-' ? 0 : kLongestRetryAfter;
  } else if (error != std::errc{} || end != value.data() + value.size()) {
    const time_t date = curl_getdate(header->value, nullptr);
    seconds = date == -1 ? 0 : date - std::time(nullptr);
  }
  return seconds > 0 ? static_cast<int32_t>(std::min(seconds, kLongestRetryAfter) * 1000) : -1;
}

}  // namespace

Transfer::Transfer(Endpoint &endpoint) : endpoint_(endpoint), easy_(curl_easy_init(), curl_easy_cleanup) {
  CURL *easy = easy_.get();
  if (!easy) throw std::bad_alloc();
  set(easy, CURLOPT_PRIVATE, this);
  set(easy, CURLOPT_URL, endpoint.url.c_str());
  set(easy, CURLOPT_POST, 1L);
  set(easy, CURLOPT_USERAGENT, "retrysafe/" RETRYSAFE_VERSION);
  set(easy, CURLOPT_TIMEOUT_MS, endpoint.timeout_ms);
  set(easy, CURLOPT_CONNECTTIMEOUT_MS, endpoint.connect_timeout_ms);
  set(easy, CURLOPT_MAXLIFETIME_CONN, kLongestConnection);
  set(easy, CURLOPT_ERRORBUFFER, error_);

  // Nothing of the surroundings decides where a request goes: no proxy from the environment, no redirect, no
  // other protocol, no .netrc. Cookies, HSTS and Alt-Svc are off unless asked for.
  set(easy, CURLOPT_PROXY, "");
  set(easy, CURLOPT_FOLLOWLOCATION, 0L);
  set(easy, CURLOPT_PROTOCOLS_STR, "http,https");
  set(easy, CURLOPT_NETRC, static_cast<long>(CURL_NETRC_IGNORED));
  set(easy, CURLOPT_OPENSOCKETFUNCTION, &Transfer::on_open_socket);
  set(easy, CURLOPT_OPENSOCKETDATA, this);

  set(easy, CURLOPT_SSL_VERIFYPEER, 1L);
  set(easy, CURLOPT_SSL_VERIFYHOST, 2L);
  if (!endpoint.ca_file.empty()) {
    set(easy, CURLOPT_CAINFO, endpoint.ca_file.c_str());
    set(easy, CURLOPT_CAPATH, static_cast<char *>(nullptr));
  }
  if (!endpoint.cert_file.empty()) {
    set(easy, CURLOPT_SSLCERT, endpoint.cert_file.c_str());
    set(easy, CURLOPT_SSLKEY, endpoint.key_file.c_str());
    set(easy, CURLOPT_KEYPASSWD, endpoint.key_password.c_str());  // not given, a terminal would be asked
  }
  if (endpoint.tls && endpoint.http2) {
    set(easy, CURLOPT_HTTP_VERSION, static_cast<long>(CURL_HTTP_VERSION_2TLS));
    set(easy, CURLOPT_PIPEWAIT, 1L);  // rather share a connection than open one
  } else {
    set(easy, CURLOPT_HTTP_VERSION, static_cast<long>(CURL_HTTP_VERSION_1_1));
  }

  set(easy, CURLOPT_HEADERFUNCTION, &Transfer::on_head);
  set(easy, CURLOPT_HEADERDATA, this);
  set(easy, CURLOPT_WRITEFUNCTION, &Transfer::on_body);
  set(easy, CURLOPT_WRITEDATA, this);
  set(easy, CURLOPT_HTTP_CONTENT_DECODING, 0L);

  // No signals, and a look-up that is under way does not hold up close.
  set(easy, CURLOPT_NOSIGNAL, 1L);
  set(easy, CURLOPT_QUICK_EXIT, 1L);
}

size_t Transfer::most_bytes(const Endpoint &endpoint) {
  return kHeadBytes + endpoint.response_bytes;
}

Transfer *Transfer::of(CURL *handle) {
  char *self = nullptr;
  curl_easy_getinfo(handle, CURLINFO_PRIVATE, &self);
  return reinterpret_cast<Transfer *>(self);
}

void Transfer::prepare(const retrysafe_event &event) {
  tag_ = event.tag;
  event_id_.assign(event.id.data, event.id.size);
  status_ = kNone;
  head_complete_ = false;
  head_bytes_ = 0;
  answer_bytes_ = 0;
  answer_.clear();
  refused_address_.clear();
  error_[0] = '\0';
  header_text_.clear();

  const CloudEvent cloud_event(event, endpoint_.source);
  std::string_view body(event.payload.data ? event.payload.data : "", event.payload.size);
  if (endpoint_.structured) {
    body_.clear();
    cloud_event.append_json(&body_);
    body = body_;
    add_header("Content-Type", "application/cloudevents+json; charset=utf-8", false);
  } else {
    // Without a value libcurl leaves its default away.
    if (cloud_event.has_data())
      add_header("Content-Type", "application/json", false);
    else
      header_text_.append("Content-Type:").push_back('\0');
    for (const CloudEvent::Attribute &attribute : cloud_event.attributes())
      add_header("ce-" + attribute.name, attribute.value, true);
  }
  // Tracing tools look for the W3C headers themselves.
  for (const CloudEvent::Attribute &attribute : cloud_event.attributes())
    if ((attribute.name == "traceparent" || attribute.name == "tracestate") && is_plain(attribute.value))
      add_header(attribute.name, attribute.value, false);

  char timestamp[24];
  const auto [end, unused] = std::to_chars(timestamp, timestamp + sizeof timestamp, std::time(nullptr));
  const std::string_view now(timestamp, static_cast<size_t>(end - timestamp));
  add_header("webhook-id", event_id_, true);
  add_header("webhook-timestamp", now, false);
  if (endpoint_.signer) {
    signature_.clear();
    endpoint_.signer->append_signature(event_id_, now, body, &signature_);
    add_header("webhook-signature", signature_, false);
  }
  // A large body must not wait for the far side to say "100 Continue".
  header_text_.append("Expect:").push_back('\0');
  link_headers();

  CURL *easy = easy_.get();
  set(easy, CURLOPT_HTTPHEADER, header_list_.data());
  set(easy, CURLOPT_POSTFIELDSIZE_LARGE, static_cast<curl_off_t>(body.size()));
  set(easy, CURLOPT_POSTFIELDS, body.data());
}

// `encode`: the value comes from an event and may hold any character.
void Transfer::add_header(std::string_view name, std::string_view value, bool encode) {
  header_text_ += name;
  if (value.empty()) {
    header_text_ += ';';
  } else {
    header_text_ += ": ";
    if (encode)
      CloudEvent::append_header_value(value, &header_text_);
    else
      header_text_ += value;
  }
  header_text_ += '\0';
}

void Transfer::link_headers() {
  header_list_.clear();
  for (std::string &line : endpoint_.header_lines) header_list_.push_back({line.data(), nullptr});
  for (size_t at = 0; at < header_text_.size(); at = header_text_.find('\0', at) + 1)
    header_list_.push_back({header_text_.data() + at, nullptr});
  for (size_t i = 1; i < header_list_.size(); ++i) header_list_[i - 1].next = &header_list_[i];
}

retrysafe_outcome Transfer::judge(CURLcode code, bool *open) {
  retrysafe_outcome outcome;
  *open = false;
  // The status is the answer. Whether the rest of the body came through changes nothing.
  const long status = status_;
  const bool answered = head_complete_ && status >= 200;
  if (!answered) {
    sink::report(&outcome, tag_, RETRYSAFE_UNREACHABLE, failure(code));
    return outcome;
  }
  if (status < 300) {
    sink::report(&outcome, tag_, RETRYSAFE_DELIVERED);
    return outcome;
  }
  std::string reason = "HTTP " + std::to_string(status);
  if (status < 400)
    reason += ": redirects are not followed";
  else if (const std::string shown = shown_answer(); !shown.empty())
    reason += ": " + shown;
  if (status == 429 || status == 503) {
    sink::report(&outcome, tag_, RETRYSAFE_UNREACHABLE, reason, retry_after_ms(easy_.get()));
  } else if (status == 408 || status == 425 || status >= 500) {
    *open = true;
    sink::report(&outcome, tag_, RETRYSAFE_FAILED_RETRY, reason, retry_after_ms(easy_.get()));
  } else {
    sink::report(&outcome, tag_, RETRYSAFE_FAILED_FINAL, reason);
  }
  return outcome;
}

// An answer may give back what we sent.
std::string Transfer::shown_answer() const {
  std::string text = answer_;
  for (const std::string &secret : endpoint_.confidential)
    for (size_t at; (at = text.find(secret)) != std::string::npos;) text.replace(at, secret.size(), "***");
  return printable(text, kShownAnswerBytes);
}

std::string Transfer::failure(CURLcode code) const {
  if (code == CURLE_COULDNT_CONNECT && !refused_address_.empty()) return refused_address_;
  if (code == CURLE_OK) return "the far side answered with something that is not HTTP";
  return printable(error_[0] ? error_ : curl_easy_strerror(code), sizeof retrysafe_outcome::reason - 1);
}

size_t Transfer::on_head(char *data, size_t size, size_t count, void *self) {
  auto *transfer = static_cast<Transfer *>(self);
  const std::string_view line(data, size * count);
  // Of an interim answer (1xx) there is a head as well; the real one begins anew.
  if (transfer->head_complete_ && transfer->status_ < 200) {
    transfer->head_complete_ = false;
    transfer->status_ = kNone;
  }
  if (transfer->status_ == kNone) transfer->status_ = status_in(line);
  if (line == "\r\n" || line == "\n") transfer->head_complete_ = true;
  transfer->head_bytes_ += line.size();
  return transfer->head_bytes_ > kHeadBytes ? CURL_WRITEFUNC_ERROR : line.size();
}

size_t Transfer::on_body(char *data, size_t size, size_t count, void *self) {
  auto *transfer = static_cast<Transfer *>(self);
  const size_t bytes = size * count;
  const size_t room = kKeptAnswerBytes - transfer->answer_.size();
  try {
    transfer->answer_.append(data, std::min(bytes, room));
  } catch (const std::bad_alloc &) {
    return CURL_WRITEFUNC_ERROR;
  }
  transfer->answer_bytes_ += bytes;
  // Ends the transfer, and with it the connection: an answer without end fills no memory.
  return transfer->answer_bytes_ > transfer->endpoint_.response_bytes ? CURL_WRITEFUNC_ERROR : bytes;
}

// The one place where a connection begins, with the address that it goes to.
curl_socket_t Transfer::on_open_socket(void *self, curlsocktype, curl_sockaddr *address) {
  auto *transfer = static_cast<Transfer *>(self);
  try {
    if (!transfer->endpoint_.addresses.allows(transfer->endpoint_.host, &address->addr)) {
      transfer->refused_address_ = AddressFilter::refusal(&address->addr);
      return CURL_SOCKET_BAD;
    }
  } catch (const std::exception &) {
    return CURL_SOCKET_BAD;
  }
  return socket(address->family, address->socktype | SOCK_CLOEXEC, address->protocol);
}

}  // namespace retrysafe::http
