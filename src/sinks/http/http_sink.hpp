// Delivers events as HTTP POST requests. README.md tells how answers are judged.
#pragma once

#include <deque>
#include <memory>
#include <span>
#include <vector>

#include "core/outage_detector.hpp"
#include "sinks/http/endpoint.hpp"
#include "sinks/http/multi.hpp"
#include "sinks/http/tls_meter.hpp"
#include "sinks/http/transfer.hpp"

namespace retrysafe::http {

class HttpSink {
 public:
  explicit HttpSink(const sink::Options &options);
  ~HttpSink();
  HttpSink(const HttpSink &) = delete;
  HttpSink &operator=(const HttpSink &) = delete;

  int wait_fd() const { return multi_.fd(); }
  bool submit(const retrysafe_event &event);
  void flush() {}
  size_t collect(std::span<retrysafe_outcome> outcomes, int *timeout_ms);

 private:
  void end(Transfer *transfer, CURLcode code);

  Endpoint endpoint_;
  TlsMeter meter_;  // outlives the connections
  Multi multi_;
  std::vector<std::unique_ptr<Transfer>> transfers_;  // as many as were ever needed at once
  std::vector<Transfer *> free_;
  size_t in_flight_ = 0;
  OutageDetector outage_detector_;
  std::deque<retrysafe_outcome> outcomes_;
};

}  // namespace retrysafe::http
