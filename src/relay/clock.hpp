// Milliseconds of a clock that only goes forward.
#pragma once

#include <chrono>
#include <cstdint>

namespace retrysafe::relay {

using Milliseconds = std::int64_t;
inline constexpr Milliseconds kNever = INT64_MAX;

inline Milliseconds now_ms() {
  using namespace std::chrono;
  return duration_cast<milliseconds>(steady_clock::now().time_since_epoch()).count();
}

}  // namespace retrysafe::relay
