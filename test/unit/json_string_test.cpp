#include "core/json_string.hpp"

#include <random>
#include <string>

#include <gtest/gtest.h>

namespace retrysafe {
namespace {

std::string json(std::string_view text) {
  std::string out;
  write_json_string(out, text);
  return out;
}

TEST(JsonStringTest, EscapesWhatJsonDoesNotTakeAsItIs) {
  EXPECT_EQ(json(""), R"("")");
  EXPECT_EQ(json("a\"b\\c/d"), R"("a\"b\\c/d")");
  EXPECT_EQ(json("\b\f\n\r\t"), R"("\b\f\n\r\t")");
  EXPECT_EQ(json(std::string_view("\0\x01\x0b\x1f", 4)), R"("\u0000\u0001\u000b\u001f")");
  EXPECT_EQ(json("\x20\x21\x7f\x80\xa2\xdcé€😀"), "\"\x20\x21\x7f\x80\xa2\xdcé€😀\"");
}

TEST(JsonStringTest, FindsEveryEscapedByteWhereverItStands) {
  std::mt19937 random(1);
  for (size_t size = 0; size < 40; ++size)
    for (int round = 0; round < 300; ++round) {
      std::string text(size, ' ');
      for (char &c : text) c = static_cast<char>(random() % 8 == 0 ? random() : 0x20 + 0x80 * (random() % 2));
      size_t expected = 0;
      while (expected < size && static_cast<unsigned char>(text[expected]) >= 0x20 && text[expected] != '"' &&
             text[expected] != '\\')
        ++expected;
      ASSERT_EQ(plain_in_json(text), expected) << json(text);
    }
}

}  // namespace
}  // namespace retrysafe
