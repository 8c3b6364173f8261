#include "sinks/rabbitmq/unconfirmed.hpp"

#include <vector>

#include <gtest/gtest.h>

namespace retrysafe::rabbitmq {
namespace {

class UnconfirmedTest : public ::testing::Test {
 protected:
  void add(uint64_t tag, const char *id = "") {
    retrysafe_event event{};
    event.tag = tag;
    event.id = {id, std::char_traits<char>::length(id)};
    messages.add(event, Clock::time_point(std::chrono::seconds(tag)));
  }

  // What is settled by a confirmation.
  std::vector<uint64_t> confirmed(uint64_t number, bool multiple = false) {
    std::vector<uint64_t> tags;
    messages.confirmed(number, multiple,
                       [&](const Unconfirmed::Message &message) { tags.push_back(message.event.tag); });
    return tags;
  }

  std::vector<uint64_t> abandoned() {
    std::vector<uint64_t> tags;
    messages.abandon([&](const retrysafe_event &event) { tags.push_back(event.tag); });
    return tags;
  }

  using Tags = std::vector<uint64_t>;
  Unconfirmed messages;
};

TEST_F(UnconfirmedTest, NumbersCountFromOne) {
  for (uint64_t tag = 11; tag <= 14; ++tag) add(tag);
  EXPECT_EQ(confirmed(2), Tags({12}));
  EXPECT_EQ(confirmed(1), Tags({11}));
  EXPECT_EQ(messages.size(), 2u);
  add(15);
  EXPECT_EQ(confirmed(5), Tags({15}));
  EXPECT_EQ(confirmed(3), Tags({13}));
  EXPECT_EQ(confirmed(4), Tags({14}));
  EXPECT_TRUE(messages.empty());
}

TEST_F(UnconfirmedTest, MultipleMeansAllUpToIt) {
  for (uint64_t tag = 11; tag <= 15; ++tag) add(tag);
  EXPECT_EQ(confirmed(2), Tags({12}));
  EXPECT_EQ(confirmed(4, true), Tags({11, 13, 14}));
  EXPECT_EQ(confirmed(0, true), Tags({15}));
  EXPECT_EQ(confirmed(0, true), Tags());
}

TEST_F(UnconfirmedTest, WhatIsUnknownOrKnownAlreadyIsPassedOver) {
  EXPECT_EQ(confirmed(1), Tags());
  add(11);
  EXPECT_EQ(confirmed(2), Tags());
  EXPECT_EQ(confirmed(0), Tags());
  EXPECT_EQ(confirmed(1), Tags({11}));
  EXPECT_EQ(confirmed(1), Tags());
  EXPECT_EQ(confirmed(UINT64_MAX, true), Tags());
}

TEST_F(UnconfirmedTest, OldestIsOfTheFirstThatIsOpen) {
  add(11);
  add(12);
  EXPECT_EQ(messages.oldest(), Clock::time_point(std::chrono::seconds(11)));
  EXPECT_EQ(confirmed(1), Tags({11}));
  EXPECT_EQ(messages.oldest(), Clock::time_point(std::chrono::seconds(12)));
}

TEST_F(UnconfirmedTest, AMessageThatIsGivenBackIsConfirmedLater) {
  add(11, "a");
  add(12, "b");
  add(13, "b");
  EXPECT_FALSE(messages.give_back("c", "no queue"));
  EXPECT_TRUE(messages.give_back("b", "no queue"));
  EXPECT_TRUE(messages.give_back("b", "no queue either"));
  EXPECT_FALSE(messages.give_back("b", "no queue"));
  std::vector<std::string> reasons;
  messages.confirmed(3, true,
                     [&](const Unconfirmed::Message &message) { reasons.push_back(message.returned); });
  EXPECT_EQ(reasons, std::vector<std::string>({"", "no queue", "no queue either"}));
}

TEST_F(UnconfirmedTest, AbandonedOnesKeepTheirNumbers) {
  for (uint64_t tag = 11; tag <= 13; ++tag) add(tag);
  EXPECT_EQ(confirmed(2), Tags({12}));
  EXPECT_EQ(abandoned(), Tags({11, 13}));
  EXPECT_TRUE(messages.empty());
  add(14);
  EXPECT_EQ(confirmed(3), Tags());
  EXPECT_EQ(confirmed(4), Tags({14}));
}

TEST_F(UnconfirmedTest, ANewChannelCountsAnew) {
  add(11);
  add(12);
  messages.restart();
  EXPECT_TRUE(messages.empty());
  add(13);
  EXPECT_EQ(confirmed(1), Tags({13}));
}

}  // namespace
}  // namespace retrysafe::rabbitmq
