// Tells "this event cannot be processed" from "nothing can be processed" where a far side answers both alike,
// as HTTP servers do with status 500.
//
// A failure waits for what happens to other events: when one of them gets through, it was the event's own;
// when several events in a row fail and none gets through, it is the destination's, and no attempt of any
// event is burnt. When there is nothing to wait for it counts as the event's own.
#pragma once

#include <cstddef>
#include <string>
#include <string_view>
#include <vector>

#include "sink/abi.h"

namespace retrysafe {

class OutageDetector {
 public:
  // So many different events must fail in a row.
  static constexpr size_t kEvents = 3;

  // An event failed; the status of `outcome` is decided here, now or later.
  void failed(std::string_view event_id, const retrysafe_outcome &outcome);
  // The far side dealt with an event.
  void answered();
  // No other event is under way.
  void idle();

  // Hands over what was decided.
  template <class Consumer>
  void take(Consumer &&consumer) {
    for (const retrysafe_outcome &outcome : decided_) consumer(outcome);
    decided_.clear();
  }

 private:
  void decide(retrysafe_status status);

  std::vector<std::string> in_a_row_;
  std::vector<retrysafe_outcome> undecided_;
  std::vector<retrysafe_outcome> decided_;
};

}  // namespace retrysafe
