#include "core/event_time.hpp"

#include <limits>
#include <string>

#include <gtest/gtest.h>

namespace retrysafe {
namespace {

constexpr std::int64_t kSecond = 1'000'000;
constexpr std::int64_t kDay = 86'400 * kSecond;

std::string text(std::int64_t microseconds) {
  char out[kEventTimeSize];
  return {out, event_time(microseconds, out)};
}

TEST(EventTimeTest, IsRfc3339) {
  EXPECT_EQ(text(0), "2000-01-01T00:00:00.000000Z");
  EXPECT_EQ(text(9498 * kDay + 11'045 * kSecond + 678'901), "2026-01-02T03:04:05.678901Z");
  EXPECT_EQ(text(59 * kDay), "2000-02-29T00:00:00.000000Z");
  EXPECT_EQ(text(-1), "1999-12-31T23:59:59.999999Z");
}

TEST(EventTimeTest, IsEmptyWhereTheYearHasNoFourDigits) {
  constexpr std::int64_t end = 2'921'940 * kDay, first = -730'485 * kDay;
  EXPECT_EQ(text(end - 1), "9999-12-31T23:59:59.999999Z");
  EXPECT_EQ(text(end), "");
  EXPECT_EQ(text(first), "0000-01-01T00:00:00.000000Z");
  EXPECT_EQ(text(first - 1), "");
  EXPECT_EQ(text(std::numeric_limits<std::int64_t>::max()), "");
  EXPECT_EQ(text(std::numeric_limits<std::int64_t>::min()), "");
}

}  // namespace
}  // namespace retrysafe
