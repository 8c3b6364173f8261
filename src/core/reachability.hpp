// Whether a destination can be reached, as far as somebody ought to be told: one line per change of its
// state, not per attempt, and of one that comes and goes no more than one a minute.
#pragma once

#include <cstdint>
#include <optional>

namespace retrysafe {

class Reachability {
 public:
  using Milliseconds = std::int64_t;  // of a clock that only goes forward
  static constexpr Milliseconds kQuietFor = 60'000;

  // It did not answer. True: say so.
  bool lost(Milliseconds now) {
    if (away_) return false;
    away_ = true;
    since_ = now;
    said_ = !last_said_ || now - *last_said_ >= kQuietFor;
    if (said_) last_said_ = now;
    return said_;
  }

  // It did. Where its loss was told: for how long it was away.
  std::optional<Milliseconds> back(Milliseconds now) {
    if (!away_) return std::nullopt;
    away_ = false;
    return said_ ? std::optional(now - since_) : std::nullopt;
  }

 private:
  bool away_ = false;
  bool said_ = false;
  Milliseconds since_ = 0;
  std::optional<Milliseconds> last_said_;
};

}  // namespace retrysafe
