#include "core/outage_detector.hpp"

#include <algorithm>

namespace retrysafe {

void OutageDetector::failed(std::string_view event_id, const retrysafe_outcome &outcome) {
  undecided_.push_back(outcome);
  const bool known = std::find(in_a_row_.begin(), in_a_row_.end(), event_id) != in_a_row_.end();
  if (!known && in_a_row_.size() < kEvents) in_a_row_.emplace_back(event_id);
  if (in_a_row_.size() == kEvents) decide(RETRYSAFE_UNREACHABLE);
}

void OutageDetector::answered() {
  in_a_row_.clear();
  decide(RETRYSAFE_FAILED_RETRY);
}

void OutageDetector::idle() {
  decide(RETRYSAFE_FAILED_RETRY);
}

void OutageDetector::decide(retrysafe_status status) {
  for (retrysafe_outcome &outcome : undecided_) {
    outcome.status = status;
    decided_.push_back(outcome);
  }
  undecided_.clear();
}

}  // namespace retrysafe
