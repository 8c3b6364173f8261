// Intervals that stand for a length of time.
#pragma once

#include "pg/server.hpp"

namespace retrysafe::pg {

// Microseconds. PG_INT64_MAX: it has months, whose length varies, or is beyond 1000 days and 1000 times 24
// hours, which nothing here allows.
inline int64 interval_us(const Interval &interval) {
  constexpr int64 kDays = 1000;
  constexpr int64 kTime = kDays * USECS_PER_DAY;
  if (interval.month != 0 || interval.day < -kDays || interval.day > kDays) return PG_INT64_MAX;
  if (interval.time < -kTime || interval.time > kTime) return PG_INT64_MAX;
  return interval.day * USECS_PER_DAY + interval.time;
}

}  // namespace retrysafe::pg
