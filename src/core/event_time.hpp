// When an event was emitted, as it is published: RFC 3339 in UTC, with microseconds.
#pragma once

#include <cstddef>
#include <cstdint>

namespace retrysafe {

inline constexpr std::size_t kEventTimeSize = sizeof "2026-01-02T03:04:05.678901Z" - 1;

// Writes the time that is so many microseconds after the beginning of the year 2000 and returns its size: 0
// where RFC 3339 has no form for it, as for infinity.
std::size_t event_time(std::int64_t microseconds, char *out) noexcept;

}  // namespace retrysafe
