#include "core/printable.hpp"

#include <gtest/gtest.h>

using retrysafe::printable;

TEST(Printable, GoodTextStays) {
  EXPECT_EQ(printable("caf\xc3\xa9 \xe2\x82\xac \xf0\x9f\x98\x80", 100),
            "caf\xc3\xa9 \xe2\x82\xac \xf0\x9f\x98\x80");
}

TEST(Printable, ControlCharactersBecomeOneBlank) {
  using namespace std::string_view_literals;
  EXPECT_EQ(printable("\r\n a\0\x01\x7f\tb\xc2\x85"
                      "c\xe2\x80\xae"
                      "d\n"sv,
                      100),
            "a b c d");
  EXPECT_EQ(printable("\x1b[31mred", 100), "[31mred");
}

TEST(Printable, BrokenUtf8BecomesQuestionMarks) {
  EXPECT_EQ(printable("a\xff\xfe"
                      "b",
                      100),
            "a??b");
  EXPECT_EQ(printable("\xc3", 100), "?");
  EXPECT_EQ(printable("\xe2\x82", 100), "??");
  EXPECT_EQ(printable("\xc0\x80", 100), "??") << "overlong";
  EXPECT_EQ(printable("\xed\xa0\x80", 100), "???") << "surrogate";
  EXPECT_EQ(printable("\xf4\x90\x80\x80", 100), "????") << "beyond Unicode";
}

TEST(Printable, FitsIntoGivenMemory) {
  char out[5] = "####";
  EXPECT_EQ(printable("ab\n\xe2\x82\xac", out, 4), 2u);
  EXPECT_EQ(std::string_view(out, 2), "ab");
  EXPECT_EQ(printable("\xff\xff\xff\xff\xff", out, 4), 4u);
  EXPECT_STREQ(out, "????");
}

TEST(Printable, CutBetweenCharacters) {
  EXPECT_EQ(printable("ab\xe2\x82\xac", 4), "ab");
  EXPECT_EQ(printable("ab\xe2\x82\xac", 5), "ab\xe2\x82\xac");
  EXPECT_EQ(printable("a b", 2), "a");
  EXPECT_EQ(printable("", 0), "");
}
