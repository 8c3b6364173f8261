#include "core/reachability.hpp"

#include <gtest/gtest.h>

namespace retrysafe {
namespace {

TEST(Reachability, TellsEachChangeOnce) {
  Reachability r;
  EXPECT_FALSE(r.back(0));
  EXPECT_TRUE(r.lost(0));
  EXPECT_FALSE(r.lost(10));
  EXPECT_EQ(r.back(500), 500);
  EXPECT_FALSE(r.back(501));
}

TEST(Reachability, IsQuietAboutOneThatComesAndGoes) {
  Reachability r;
  EXPECT_TRUE(r.lost(100));
  EXPECT_TRUE(r.back(200));
  EXPECT_FALSE(r.lost(300));
  EXPECT_FALSE(r.back(400)) << "its loss was not told";
  EXPECT_FALSE(r.lost(Reachability::kQuietFor));
  EXPECT_FALSE(r.back(Reachability::kQuietFor + 50));
  EXPECT_TRUE(r.lost(Reachability::kQuietFor + 100));
}

}  // namespace
}  // namespace retrysafe
