#include "sinks/postgres/event_queue.hpp"

#include <algorithm>

#include "sink/kit.hpp"

namespace retrysafe::sink {

namespace {

constexpr std::string_view kBehindFailure = "an earlier event of its ordering key failed";

}  // namespace

bool EventQueue::add(const retrysafe_event &event) {
  if (events_.size() >= kMaxEvents) return false;
  if (key_failed(event))
    settle(event, RETRYSAFE_FAILED_RETRY, kBehindFailure);
  else
    events_.push_back(event);
  return true;
}

size_t EventQueue::next_size() const {
  return std::min(limit_, events_.size());
}

void EventQueue::committed() {
  for (size_t i = 0; i < running_; ++i) settle(events_[i], RETRYSAFE_DELIVERED, {});
  events_.erase(events_.begin(), events_.begin() + static_cast<std::ptrdiff_t>(running_));
  limit_ = kNoLimit;
}

void EventQueue::rejected(size_t index, retrysafe_status status, std::string_view reason) {
  const retrysafe_event event = events_[index];
  settle(event, status, reason);
  events_.erase(events_.begin() + static_cast<std::ptrdiff_t>(index));
  if (event.ordering_key.data) {
    failed_keys_.emplace_back(view(event.ordering_key));
    const auto behind = events_.begin() + static_cast<std::ptrdiff_t>(index);
    events_.erase(
        std::remove_if(behind, events_.end(),
                       [&](const retrysafe_event &later) {
                         if (!later.ordering_key.data || view(later.ordering_key) != view(event.ordering_key))
                           return false;
                         settle(later, RETRYSAFE_FAILED_RETRY, kBehindFailure);
                         return true;
                       }),
        events_.end());
  }
  limit_ = index > 0 ? index : kNoLimit;
}

void EventQueue::conflicted(size_t index, std::string_view reason) {
  if (running_ == 1) return rejected(0, RETRYSAFE_FAILED_RETRY, reason);
  limit_ = std::max<size_t>(index, 1);
}

void EventQueue::not_committed(bool conflict, retrysafe_status status, std::string_view reason) {
  if (running_ == 1) return rejected(0, conflict ? RETRYSAFE_FAILED_RETRY : status, reason);
  limit_ = running_ / 2;
}

void EventQueue::unreachable(std::string_view reason) {
  for (const retrysafe_event &event : events_) settle(event, RETRYSAFE_UNREACHABLE, reason);
  events_.clear();
  limit_ = kNoLimit;
}

size_t EventQueue::take_outcomes(std::span<retrysafe_outcome> outcomes) {
  const size_t count = std::min(outcomes.size(), outcomes_.size());
  for (size_t i = 0; i < count; ++i) {
    report(&outcomes[i], outcomes_.front().tag, outcomes_.front().status, outcomes_.front().reason);
    outcomes_.pop_front();
  }
  if (outcomes_.empty()) failed_keys_.clear();
  return count;
}

void EventQueue::settle(const retrysafe_event &event, retrysafe_status status, std::string_view reason) {
  outcomes_.push_back({event.tag, status, std::string(reason)});
}

bool EventQueue::key_failed(const retrysafe_event &event) const {
  return event.ordering_key.data &&
         std::find(failed_keys_.begin(), failed_keys_.end(), view(event.ordering_key)) != failed_keys_.end();
}

}  // namespace retrysafe::sink
