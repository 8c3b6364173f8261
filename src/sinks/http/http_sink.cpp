#include "sinks/http/http_sink.hpp"

#include <algorithm>

namespace retrysafe::http {

HttpSink::HttpSink(const sink::Options &options)
    : endpoint_(options),
      meter_(endpoint_.max_in_flight * Transfer::most_bytes(endpoint_)),
      multi_(static_cast<long>(endpoint_.max_in_flight), endpoint_.http2) {
  transfers_.reserve(endpoint_.max_in_flight);
  free_.reserve(endpoint_.max_in_flight);
}

HttpSink::~HttpSink() {
  for (const auto &transfer : transfers_) multi_.remove(transfer->handle());
}

bool HttpSink::submit(const retrysafe_event &event) {
  if (in_flight_ == endpoint_.max_in_flight) return false;
  try {
    if (free_.empty()) {
      transfers_.push_back(std::make_unique<Transfer>(endpoint_));
      if (TlsMeter::works()) meter_.watch(transfers_.back()->handle());
      free_.push_back(transfers_.back().get());
    }
    Transfer *transfer = free_.back();
    transfer->prepare(event);
    multi_.add(transfer->handle());
    free_.pop_back();
    ++in_flight_;
  } catch (const std::exception &error) {
    // Taken all the same: an event that is refused again and again would keep its batch from ending.
    sink::report(&outcomes_.emplace_back(), event.tag, RETRYSAFE_UNREACHABLE, error.what());
  }
  return true;
}

size_t HttpSink::collect(std::span<retrysafe_outcome> outcomes, int *timeout_ms) {
  multi_.work([&](CURL *handle, CURLcode code) { end(Transfer::of(handle), code); });
  if (in_flight_ == 0) outage_detector_.idle();
  outage_detector_.take([&](const retrysafe_outcome &outcome) { outcomes_.push_back(outcome); });

  const size_t count = std::min(outcomes.size(), outcomes_.size());
  std::copy_n(outcomes_.begin(), count, outcomes.begin());
  outcomes_.erase(outcomes_.begin(), outcomes_.begin() + static_cast<std::ptrdiff_t>(count));
  *timeout_ms = outcomes_.empty() ? multi_.timeout_ms() : 0;
  return count;
}

void HttpSink::end(Transfer *transfer, CURLcode code) {
  free_.push_back(transfer);
  --in_flight_;
  meter_.request_ended();
  bool open;
  const retrysafe_outcome outcome = transfer->judge(code, &open);
  if (open) {
    outage_detector_.failed(transfer->event_id(), outcome);
    return;
  }
  if (outcome.status != RETRYSAFE_UNREACHABLE) outage_detector_.answered();
  outcomes_.push_back(outcome);
}

}  // namespace retrysafe::http
