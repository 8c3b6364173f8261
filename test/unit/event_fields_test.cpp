#include "core/event_fields.hpp"

#include <string>

#include <gtest/gtest.h>

namespace retrysafe {
namespace {

TEST(EventFields, ControlCharacters) {
  for (int c = 0; c < 256; ++c) {
    const std::string text = {'a', static_cast<char>(c)};
    EXPECT_EQ(has_control_character(text), c < 0x20 || c == 0x7f) << c;
  }
  EXPECT_FALSE(has_control_character(""));
  EXPECT_FALSE(has_control_character("\xc3\xbc\xf0\x9f\x98\x80"));
  EXPECT_TRUE(has_control_character("value\r\nx-admin: 1"));
}

TEST(EventFields, NumbersAtTheEnd) {
  for (const char *key : {"k~1", "~0", "k~00123456789012345678901234567890", "~~1", "a~1~2", "\xc3\xbc~9"})
    EXPECT_TRUE(ends_in_number(key)) << key;
  for (const char *key :
       {"", "~", "1", "123", "k~", "k-1", "k~1x", "k~1 ", "k~x1", "~1~", "k~\xd9\xa1", "k1"})
    EXPECT_FALSE(ends_in_number(key)) << key;
}

TEST(EventFields, HeaderNames) {
  EXPECT_TRUE(is_header_name("X-Trace_id0"));
  EXPECT_TRUE(is_header_name(std::string(64, 'n')));
  EXPECT_FALSE(is_header_name(std::string(65, 'n')));
  EXPECT_FALSE(is_header_name(""));
  for (const char *name : {"a b", "a:", "a\r", "a\n", "a.b", "\xc3\xbc", "a\"", "a[", "a`", "a{", "a@", "a/"})
    EXPECT_FALSE(is_header_name(name)) << name;
}

TEST(EventFields, HeaderNamesIgnoreCase) {
  EXPECT_TRUE(same_header_name("Traceparent", "traceParent"));
  EXPECT_FALSE(same_header_name("a", "ab"));
  EXPECT_FALSE(same_header_name("a-", "a_"));
  EXPECT_FALSE(same_header_name("[", "{"));  // 0x20 apart, as letters are
  EXPECT_TRUE(same_header_name("", ""));
}

}  // namespace
}  // namespace retrysafe
