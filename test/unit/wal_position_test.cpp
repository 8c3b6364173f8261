#include "core/wal_position.hpp"

#include <gtest/gtest.h>

namespace retrysafe {
namespace {

constexpr WalLayout kLayout{8192, 16 * 1024 * 1024, 24, 40};
constexpr std::uint64_t kSegment = kLayout.segment_size;

TEST(WalPosition, WithinAPageItIsTheEnd) {
  EXPECT_EQ(end_of_wal(5 * kSegment + 8192 + 25, kLayout), 5 * kSegment + 8192 + 25);
  EXPECT_EQ(end_of_wal(5 * kSegment + 41, kLayout), 5 * kSegment + 41);
}

TEST(WalPosition, BehindAPageHeaderItIsThePageBefore) {
  EXPECT_EQ(end_of_wal(5 * kSegment + 8192 + 24, kLayout), 5 * kSegment + 8192);
  EXPECT_EQ(end_of_wal(6 * kSegment - 8192 + 24, kLayout), 6 * kSegment - 8192);
}

TEST(WalPosition, BehindTheHeaderOfASegmentItIsTheSegmentBefore) {
  EXPECT_EQ(end_of_wal(5 * kSegment + 40, kLayout), 5 * kSegment);
}

// 40 bytes into an ordinary page there are 16 bytes of a record.
TEST(WalPosition, AnOrdinaryPageHasTheShortHeader) {
  EXPECT_EQ(end_of_wal(5 * kSegment + 8192 + 40, kLayout), 5 * kSegment + 8192 + 40);
}

}  // namespace
}  // namespace retrysafe
