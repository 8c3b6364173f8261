#include "core/hex.hpp"

#include <gtest/gtest.h>

#include <array>
#include <string>

namespace retrysafe {
namespace {

TEST(Hex, DecodesBothCases) {
  std::array<char, 3> bytes{};
  ASSERT_TRUE(decode_hex("00aBFf", bytes.data()));
  EXPECT_EQ(std::string(bytes.data(), 3), std::string("\x00\xab\xff", 3));
}

TEST(Hex, NothingIsNoBytes) {
  char untouched = 'x';
  EXPECT_TRUE(decode_hex("", &untouched));
  EXPECT_EQ(untouched, 'x');
}

TEST(Hex, RefusesWhatIsNotPairsOfDigits) {
  std::array<char, 4> bytes{};
  for (const char *bad : {"a", "abc", "0g", "g0", " 0", "0 ", "-1", "+1", "0x", "\\x"})
    EXPECT_FALSE(decode_hex(bad, bytes.data())) << bad;
}

}  // namespace
}  // namespace retrysafe
