#include "core/header_list.hpp"

#include <gtest/gtest.h>

namespace retrysafe {
namespace {

struct Result {
  bool good;
  std::vector<std::pair<std::string, std::string>> pairs;
};

Result read(std::string_view json) {
  std::vector<retrysafe_pair> pairs;
  std::deque<std::string> unescaped;
  Result result{read_headers(json, &pairs, &unescaped), {}};
  for (const auto &pair : pairs)
    result.pairs.emplace_back(std::string(pair.name.data, pair.name.size),
                              std::string(pair.value.data, pair.value.size));
  return result;
}

using Pairs = std::vector<std::pair<std::string, std::string>>;

TEST(HeaderList, ReadsObjectsOfStringsInTheirOrder) {
  EXPECT_EQ(read("{}").pairs, Pairs{});
  EXPECT_TRUE(read("{}").good);
  EXPECT_EQ(read(R"({"b": "1", "aa": ""})").pairs, (Pairs{{"b", "1"}, {"aa", ""}}));
}

TEST(HeaderList, UnescapesWhatTheServerEscapes) {
  EXPECT_EQ(read(R"({"q\"": "a\\b\/\u00e9\u20ac\ud83d\ude00\u0041"})").pairs,
            (Pairs{{"q\"",
                    "a\\b/\xc3\xa9\xe2\x82\xac\xf0\x9f\x98\x80"
                    "A"}}));
  EXPECT_EQ(read(R"({"a": "\b\f\n\r\t"})").pairs, (Pairs{{"a", "\b\f\n\r\t"}}));
}

TEST(HeaderList, RefusesAnythingElse) {
  for (const char *bad :
       {"", "[]", "{", R"({"a")", R"({"a": 1})", R"({"a": "b")", R"({"a": "b"} x)", R"({"a": "\x"})",
        R"({"a": "\ud83d"})", R"({"a": "\ude00"})", R"({"a": "\u12"})", R"({"a": "b",})"})
    EXPECT_FALSE(read(bad).good) << bad;
}

}  // namespace
}  // namespace retrysafe
