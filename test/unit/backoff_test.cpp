#include "core/backoff.hpp"

#include <gtest/gtest.h>

#include <limits>

namespace retrysafe {
namespace {

TEST(Backoff, DoublesUpToTheCap) {
  EXPECT_EQ(backoff(1000, 60000, 1, 0), 1000);
  EXPECT_EQ(backoff(1000, 60000, 2, 0), 2000);
  EXPECT_EQ(backoff(1000, 60000, 5, 0), 16000);
  EXPECT_EQ(backoff(1000, 60000, 7, 0), 60000);
  EXPECT_EQ(backoff(1000, 60000, 1000000, 0), 60000);
}

TEST(Backoff, CapBelowTheBase) {
  EXPECT_EQ(backoff(1000, 10, 1, 0), 10);
}

TEST(Backoff, DoesNotOverflow) {
  const auto cap = std::numeric_limits<std::int64_t>::max();
  EXPECT_EQ(backoff(cap / 2 + 1, cap, 9, 0), cap);
}

TEST(Backoff, JitterShortensByAtMostAQuarter) {
  for (std::uint32_t random : {0U, 1U, 249U, 250U, 251U, 4294967295U}) {
    const std::int64_t delay = backoff(1000, 60000, 1, random);
    EXPECT_LE(delay, 1000);
    EXPECT_GE(delay, 750);
  }
  EXPECT_EQ(backoff(1000, 60000, 1, 250), 750);
  EXPECT_EQ(backoff(0, 60000, 3, 77), 0);
}

}  // namespace
}  // namespace retrysafe
