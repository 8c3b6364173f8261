// The events that the sink has taken, and how they are cut into transactions of the far side.
//
// All of them go in one transaction. When one fails, what ran before it is sent again without it and
// committed, and then what comes behind it: no event is run more than twice on account of a neighbour, and
// the order is kept. Where it cannot be told which one failed (the commit itself did), the transaction is
// halved until it can. Knows no network.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "sink/abi.h"

namespace retrysafe::sink {

struct EventOutcome {
  uint64_t tag;
  retrysafe_status status;
  std::string reason;
};

class EventQueue {
 public:
  static constexpr size_t kMaxEvents = 1000;

  // False: full. The event stays valid until its outcome was taken.
  bool add(const retrysafe_event &event);
  bool empty() const { return events_.empty(); }

  // The events of the next transaction; the same ones until one of the functions below was called.
  size_t next_size() const;
  const retrysafe_event &next(size_t index) const { return events_[index]; }
  void begin() { running_ = next_size(); }

  // What became of the transaction that began.
  void committed();
  // Its event `index` failed. Later ones of the same ordering key do not go out.
  void rejected(size_t index, retrysafe_status status, std::string_view reason);
  // Another transaction was in the way of the event `index`: tried again, on its own if it has to be.
  void conflicted(size_t index, std::string_view reason);
  // The commit failed.
  void not_committed(bool conflict, retrysafe_status status, std::string_view reason);

  // All that are not known to be committed.
  void unreachable(std::string_view reason);

  size_t take_outcomes(std::span<retrysafe_outcome> outcomes);
  bool has_outcomes() const { return !outcomes_.empty(); }

 private:
  static constexpr size_t kNoLimit = SIZE_MAX;

  void settle(const retrysafe_event &event, retrysafe_status status, std::string_view reason);
  bool key_failed(const retrysafe_event &event) const;

  std::deque<retrysafe_event> events_;
  size_t running_ = 0;       // events of the transaction under way
  size_t limit_ = kNoLimit;  // events of the next one at most
  std::deque<EventOutcome> outcomes_;
  // Keys of failed events whose outcomes may not have been taken yet: until then later events can still come.
  std::vector<std::string> failed_keys_;
};

}  // namespace retrysafe::sink
