#include "core/batch_handle.hpp"

#include <gtest/gtest.h>

#include <limits>
#include <string>

namespace retrysafe {
namespace {

std::string format(const BatchHandle &handle) {
  char text[BatchHandle::kMaxLength];
  const int length = format_handle(handle, text);
  return {text, static_cast<std::size_t>(length)};
}

bool parses(std::string_view text) {
  BatchHandle handle;
  return parse_handle(text, &handle);
}

TEST(BatchHandle, ComesBackAsItWas) {
  BatchHandle handle{7, 2, 12, 345, 900, 1000, 77, 2, {{5, 1}, {9, 0}}};
  EXPECT_EQ(format(handle), "7.2.12.345.900.1000.77.5~1-9~0");
  BatchHandle again;
  ASSERT_TRUE(parse_handle(format(handle), &again));
  EXPECT_EQ(format(again), format(handle));
  EXPECT_EQ(again.parked[1].id, 9);
}

TEST(BatchHandle, TellsTheTransactionThatFetched) {
  BatchHandle handle{7, 2, 12, 345, 900, 1000, 77, 1, {{5, 1}}};
  handle.transaction = 761;
  EXPECT_EQ(format(handle), "7.2.12.345.900.1000.77:761.5~1");
  BatchHandle again;
  ASSERT_TRUE(parse_handle(format(handle), &again));
  EXPECT_EQ(again.transaction, 761u);
  ASSERT_TRUE(parse_handle("7.2.12.345.900.1000.77", &again));
  EXPECT_EQ(again.transaction, 0u);
}

TEST(BatchHandle, FitsWithTheLargestNumbers) {
  const auto most = std::numeric_limits<std::int64_t>::max();
  BatchHandle handle{std::numeric_limits<std::int32_t>::max(),
                     std::numeric_limits<std::int32_t>::max(),
                     most,
                     most,
                     most,
                     most,
                     std::numeric_limits<std::uint32_t>::max(),
                     BatchHandle::kMaxParked,
                     {}};
  for (ParkedItem &item : handle.parked) item = {most, std::numeric_limits<std::uint32_t>::max()};
  handle.transaction = std::numeric_limits<std::uint64_t>::max();
  const std::string text = format(handle);
  EXPECT_LT(text.size(), static_cast<std::size_t>(BatchHandle::kMaxLength));
  EXPECT_TRUE(parses(text));
}

TEST(BatchHandle, RefusesWhateverItDidNotWrite) {
  ASSERT_TRUE(parses("1.0.1.1.0.3.1283974356"));
  for (const char *text : {"",
                           "x",
                           "1",
                           "1.0.1.1.0.3",
                           "1.0.1.1.0.3.",
                           "1.0.1.1.0.3.5:",
                           "1.0.1.1.0.3.5:0",
                           "1.0.1.1.0.3.5:07",
                           "1.0.1.1.0.3.5:7:8",
                           "1.0.1.1.0.3.5 ",
                           " 1.0.1.1.0.3.5",
                           "+1.0.1.1.0.3.5",
                           "-1.0.1.1.0.3.5",
                           "01.0.1.1.0.3.5",
                           "1.0.1.1.4.3.5",
                           "1.0.1.1.0.3.5.",
                           "1.0.1.1.0.3.5.1",
                           "1.0.1.1.0.3.5.1~",
                           "1.0.1.1.0.3.5.1~0-",
                           "1.0.1.1.0.3.5.1~0.2~0",
                           "1.0.1.1.0.3.5-1~0",
                           "1.0.1.1.0.3.4294967296",
                           "2147483648.0.1.1.0.3.5",
                           "1.0.9223372036854775808.1.0.3.5",
                           "1,0,1,1,0,3,5",
                           "1.0.1.1.0.3.5;DROP"})
    EXPECT_FALSE(parses(text)) << text;
}

TEST(BatchHandle, RefusesMoreParkedItemsThanABatchHolds) {
  std::string text = "1.0.1.1.0.3.5.1~0";
  for (int i = 1; i < BatchHandle::kMaxParked; ++i) text += "-1~0";
  EXPECT_TRUE(parses(text));
  EXPECT_FALSE(parses(text + "-1~0"));
}

TEST(BatchHandle, NumbersOfLogsAndEventsDiffer) {
  EXPECT_NE(first_number(*parse_uuid("062a8876-c266-8f52-b9f9-60c06b5f232f")),
            first_number(*parse_uuid("0e3c3c0e-8a5e-8b7c-9d55-3f6a1c2b4d5e")));
  EXPECT_NE(first_token(*parse_uuid("062a8876-c266-8f52-b9f9-60c06b5f232f"), 1),
            first_token(*parse_uuid("062a8876-c266-8f52-b9f9-60c06b5f232f"), 2));
}

TEST(BatchHandle, CheckTellsBatchesApart) {
  const auto check = [](std::initializer_list<std::int64_t> ids) {
    std::uint32_t sum = 0;
    for (const std::int64_t id : ids) sum = add_to_check(sum, id);
    return sum;
  };
  EXPECT_NE(check({1, 2, 3}), check({1, 2}));
  EXPECT_NE(check({1, 2, 3}), check({1, 3}));
  EXPECT_NE(check({1, 4}), check({2, 3}));
  EXPECT_NE(check({1}), check({}));
}

}  // namespace
}  // namespace retrysafe
