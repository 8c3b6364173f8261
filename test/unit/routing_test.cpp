#include "core/routing.hpp"

#include <gtest/gtest.h>

#include <string>
#include <vector>

namespace retrysafe {
namespace {

TEST(Routing, APatternIsATypeOrAPrefix) {
  EXPECT_TRUE(type_matches("order.placed", "order.placed"));
  EXPECT_FALSE(type_matches("order.placed", "order.placed.v2"));
  EXPECT_TRUE(type_matches("order.*", "order.placed"));
  EXPECT_TRUE(type_matches("order.*", "order."));
  EXPECT_FALSE(type_matches("order.*", "order"));
  EXPECT_FALSE(type_matches("order.*", "reorder.placed"));
  EXPECT_TRUE(type_matches("*", "anything"));
  EXPECT_FALSE(type_matches("*.placed", "order.placed"));
  EXPECT_FALSE(type_matches("", "order"));
}

// Progress is stored per shard: these values may never change.
TEST(Routing, ShardsAreTheSameForEver) {
  EXPECT_EQ(shard_of(std::string_view("customer-1"), 1000000), 940762);
  EXPECT_EQ(shard_of(std::string_view("\xc3\xa9"), 1000000), 482043);
  EXPECT_EQ(shard_of(std::int64_t{1}, 1000000), 106604);
}

TEST(Routing, ShardsAreEven) {
  std::vector<int> by_key(7), by_id(7);
  for (int i = 0; i < 7000; ++i) {
    ++by_key[shard_of("customer-" + std::to_string(i), 7)];
    ++by_id[shard_of(std::int64_t{i}, 7)];
  }
  for (int shard = 0; shard < 7; ++shard) {
    EXPECT_NEAR(by_key[static_cast<std::size_t>(shard)], 1000, 150);
    EXPECT_NEAR(by_id[static_cast<std::size_t>(shard)], 1000, 150);
  }
}

}  // namespace
}  // namespace retrysafe
