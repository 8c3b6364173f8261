#include "core/dispatcher.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdio>
#include <deque>
#include <functional>
#include <map>
#include <optional>
#include <random>
#include <set>
#include <utility>

using retrysafe::Dispatcher;
using retrysafe::SinkPort;
using Status = Dispatcher::Status;

namespace {

// Takes events and answers when the test says so, or at once by a rule.
class FakeSink : public SinkPort {
 public:
  using Rule = std::function<retrysafe_status(const std::string &)>;

  bool keeps_order() const override { return ordered; }
  bool submit(const retrysafe_event &event) override {
    if (in_flight.size() >= capacity) return false;
    const std::string id(event.id.data, event.id.size);
    sent.push_back(id);
    in_flight.emplace_back(id, event.tag);
    most_in_flight = std::max(most_in_flight, in_flight.size());
    return true;
  }
  void flush() override { ++flushes; }
  size_t collect(std::span<retrysafe_outcome> outcomes, int *timeout_ms) override {
    if (rule)
      for (const auto &[id, tag] : in_flight) answer(tag, rule(id));
    if (rule) in_flight.clear();
    *timeout_ms = timeout;
    size_t count = 0;
    for (; count < outcomes.size() && !ready.empty(); ++count, ready.pop_front())
      outcomes[count] = ready.front();
    return count;
  }

  void answer(uint64_t tag, retrysafe_status status) {
    retrysafe_outcome outcome{};
    outcome.tag = tag;
    outcome.status = status;
    outcome.retry_after_ms = retry_after;
    std::snprintf(outcome.reason, sizeof outcome.reason, "reason %d", status);
    ready.push_back(outcome);
  }
  void answer(const std::string &id, retrysafe_status status) {
    for (auto it = in_flight.begin(); it != in_flight.end(); ++it)
      if (it->first == id) {
        answer(it->second, status);
        in_flight.erase(it);
        return;
      }
    FAIL() << id << " is not in flight";
  }

  bool ordered = false;
  size_t capacity = 1000;
  int timeout = -1;
  int32_t retry_after = -1;
  Rule rule;
  std::vector<std::string> sent;
  std::vector<std::pair<std::string, uint64_t>> in_flight;
  std::deque<retrysafe_outcome> ready;
  size_t most_in_flight = 0;
  int flushes = 0;
};

struct Event {
  std::string id;
  std::string key;
  bool held = false;
};

class DispatcherTest : public ::testing::Test {
 protected:
  void begin(std::vector<Event> events) {
    batch = std::move(events);
    items.clear();
    for (const Event &event : batch) {
      Dispatcher::Item item{};
      item.event.id = {event.id.data(), event.id.size()};
      if (!event.key.empty()) item.event.ordering_key = {event.key.data(), event.key.size()};
      item.held = event.held;
      items.push_back(item);
    }
    sink.sent.clear();
    sink.most_in_flight = 0;
    dispatcher->begin(items);
    dispatcher->step();
  }

  std::map<std::string, Status> outcomes() {
    std::map<std::string, Status> result;
    const auto list = dispatcher->outcomes();
    for (size_t i = 0; i < list.size(); ++i) result[batch[i].id] = list[i].status;
    return result;
  }

  FakeSink sink;
  std::optional<Dispatcher> dispatcher{std::in_place, sink};
  std::vector<Event> batch;
  std::vector<Dispatcher::Item> items;
};

constexpr auto kDelivered = RETRYSAFE_DELIVERED;
constexpr auto kRetry = RETRYSAFE_FAILED_RETRY;
constexpr auto kFinal = RETRYSAFE_FAILED_FINAL;
constexpr auto kUnreachable = RETRYSAFE_UNREACHABLE;
using Ids = std::vector<std::string>;

}  // namespace

TEST_F(DispatcherTest, SendsInParallelAndOnePerKey) {
  begin({{"a1", "a"}, {"a2", "a"}, {"x", ""}, {"b1", "b"}, {"y", ""}});
  EXPECT_EQ(sink.sent, (Ids{"a1", "x", "b1", "y"}));
  EXPECT_EQ(sink.flushes, 1);
  EXPECT_FALSE(dispatcher->done());
  sink.answer("a1", kDelivered);
  dispatcher->step();
  EXPECT_EQ(sink.sent.back(), "a2");
  for (const char *id : {"x", "b1", "y", "a2"}) sink.answer(id, kDelivered);
  dispatcher->step();
  EXPECT_TRUE(dispatcher->done());
  for (const auto &[id, status] : outcomes()) EXPECT_EQ(status, Status::kDelivered) << id;
}

TEST_F(DispatcherTest, AnEmptyBatchIsDone) {
  begin({});
  EXPECT_TRUE(dispatcher->done());
  EXPECT_FALSE(dispatcher->unreachable());
}

TEST_F(DispatcherTest, AFullSinkIsOfferedTheEventAgain) {
  sink.capacity = 2;
  begin({{"a", ""}, {"b", ""}, {"c", ""}});
  EXPECT_EQ(sink.sent, (Ids{"a", "b"}));
  sink.answer("b", kDelivered);
  dispatcher->step();
  EXPECT_EQ(sink.sent, (Ids{"a", "b", "c"}));
}

TEST_F(DispatcherTest, AFailureBlocksTheRestOfItsKeyOnly) {
  sink.rule = [](const std::string &id) { return id == "a1" ? kRetry : id == "b2" ? kFinal : kDelivered; };
  begin({{"a1", "a"}, {"b1", "b"}, {"a2", "a"}, {"b2", "b"}, {"x", ""}, {"a3", "a"}, {"b3", "b"}});
  EXPECT_TRUE(dispatcher->done());
  EXPECT_EQ(outcomes(), (std::map<std::string, Status>{{"a1", Status::kFailedRetry},
                                                       {"a2", Status::kBlocked},
                                                       {"a3", Status::kBlocked},
                                                       {"b1", Status::kDelivered},
                                                       {"b2", Status::kFailedFinal},
                                                       {"b3", Status::kBlocked},
                                                       {"x", Status::kDelivered}}));
  EXPECT_EQ(dispatcher->outcomes()[0].reason, "reason 1");
}

TEST_F(DispatcherTest, HeldEventsAreNotSentNorThoseBehindThem) {
  sink.rule = [](const std::string &) { return kDelivered; };
  begin({{"a1", "a", true}, {"a2", "a"}, {"b1", "b"}, {"x", "", true}});
  EXPECT_EQ(sink.sent, (Ids{"b1"}));
  EXPECT_EQ(outcomes()["a2"], Status::kBlocked);
  EXPECT_EQ(outcomes()["x"], Status::kBlocked);
}

// Parked events come first in a batch; the log's events behind them are held.
TEST_F(DispatcherTest, ParkedEventsOfAHeldKeyAreSent) {
  sink.rule = [](const std::string &) { return kDelivered; };
  begin({{"a1", "a"}, {"a2", "a"}, {"b1", "b"}, {"a3", "a", true}, {"a4", "a"}});
  EXPECT_EQ(std::set<std::string>(sink.sent.begin(), sink.sent.end()),
            (std::set<std::string>{"a1", "a2", "b1"}));
  EXPECT_EQ(outcomes()["a2"], Status::kDelivered);
  EXPECT_EQ(outcomes()["a3"], Status::kBlocked);
  EXPECT_EQ(outcomes()["a4"], Status::kBlocked);
}

TEST_F(DispatcherTest, AKeyGoesOnAfterADeadLetterThatHoldsBackNothing) {
  const auto rule = [](const std::string &id) {
    return id == "a1" ? kFinal : id == "a3" ? kRetry : kDelivered;
  };
  const std::map<std::string, Status> expected{{"a1", Status::kFailedFinal},
                                               {"a2", Status::kDelivered},
                                               {"a3", Status::kFailedRetry},
                                               {"a4", Status::kBlocked}};
  dispatcher.emplace(sink, Dispatcher::DeadLetters::kStepOver);
  sink.rule = rule;
  begin({{"a1", "a"}, {"a2", "a"}, {"a3", "a"}, {"a4", "a"}});
  EXPECT_EQ(outcomes(), expected);

  // Not where the sink keeps order: it has refused the followers already.
  sink.ordered = true;
  sink.rule = [](const std::string &id) { return id == "a1" ? kFinal : kRetry; };
  begin({{"a1", "a"}, {"a2", "a"}});
  EXPECT_EQ(outcomes()["a2"], Status::kBlocked);
}

TEST_F(DispatcherTest, UnreachableStopsSubmittingAndDrains) {
  sink.capacity = 2;
  begin({{"a", ""}, {"b", ""}, {"c", ""}});
  sink.retry_after = 5000;
  sink.answer("a", kUnreachable);
  dispatcher->step();
  EXPECT_FALSE(dispatcher->done());
  EXPECT_TRUE(dispatcher->unreachable());
  sink.retry_after = 7000;
  sink.answer("b", kDelivered);
  dispatcher->step();
  EXPECT_TRUE(dispatcher->done());
  EXPECT_EQ(sink.sent, (Ids{"a", "b"}));
  EXPECT_EQ(outcomes(), (std::map<std::string, Status>{
                            {"a", Status::kNotTried}, {"b", Status::kDelivered}, {"c", Status::kNotTried}}));
  EXPECT_EQ(dispatcher->unreachable_retry_after_ms(), 5000);
  EXPECT_EQ(dispatcher->unreachable_reason(), "reason 3");
}

TEST_F(DispatcherTest, TheLongestWishForRestCounts) {
  begin({{"a", ""}, {"b", ""}});
  sink.retry_after = 5000;
  sink.answer("a", kUnreachable);
  sink.retry_after = 9000;
  sink.answer("b", kUnreachable);
  dispatcher->step();
  EXPECT_EQ(dispatcher->unreachable_retry_after_ms(), 9000);
}

TEST_F(DispatcherTest, AfterAFailureOneEventProbesFirst) {
  sink.rule = [](const std::string &) { return kUnreachable; };
  const std::vector<Event> events{{"a", ""}, {"b", ""}, {"c", ""}, {"d", ""}};
  begin(events);
  EXPECT_EQ(sink.most_in_flight, 4u);
  begin(events);
  EXPECT_EQ(sink.sent, (Ids{"a"}));
  sink.rule = [](const std::string &) { return kDelivered; };
  begin(events);
  EXPECT_EQ(sink.sent.size(), 4u);
  EXPECT_EQ(sink.most_in_flight, 3u) << "after the probe the others go at once";
  begin(events);
  EXPECT_EQ(sink.most_in_flight, 4u);
}

TEST_F(DispatcherTest, AnOutageIsNeverCountedAgainstAnEvent) {
  sink.rule = [](const std::string &) { return kUnreachable; };
  size_t requests = 0;
  for (int attempt = 0; attempt < 100; ++attempt) {
    begin({{"a1", "a"}, {"a2", "a"}, {"b", "b"}, {"c", ""}});
    ASSERT_TRUE(dispatcher->done());
    ASSERT_TRUE(dispatcher->unreachable());
    for (const auto &[id, status] : outcomes()) ASSERT_EQ(status, Status::kNotTried) << id;
    requests += sink.sent.size();
  }
  EXPECT_LE(requests, 3u + 2 * 99) << "the first burst, then at most an event and its witness";
}

TEST_F(DispatcherTest, TheEventThatBreaksTheDestinationIsFoundAndTheOthersGoOn) {
  // `p` breaks it: it and whatever is in flight beside it fails.
  const std::vector<Event> events{{"p", "p"}, {"p2", "p"}, {"b", "b"}, {"c", ""}, {"d", ""}};
  sink.rule = [&](const std::string &) {
    for (const auto &[id, tag] : sink.in_flight)
      if (id == "p") return kUnreachable;
    return kDelivered;
  };
  for (int attempt = 1; attempt <= Dispatcher::kPatience; ++attempt) {
    begin(events);
    ASSERT_TRUE(dispatcher->unreachable());
    ASSERT_EQ(outcomes()["p"], Status::kNotTried);
  }
  begin(events);
  EXPECT_FALSE(dispatcher->unreachable());
  EXPECT_EQ(outcomes(), (std::map<std::string, Status>{{"p", Status::kFailedRetry},
                                                       {"p2", Status::kBlocked},
                                                       {"b", Status::kDelivered},
                                                       {"c", Status::kDelivered},
                                                       {"d", Status::kDelivered}}));
  EXPECT_EQ(dispatcher->outcomes()[0].reason, "reason 3");

  // Its next try comes last and alone, and counts at once.
  begin({{"p", "p"}, {"p2", "p", false}, {"e", ""}, {"f", ""}});
  EXPECT_EQ(sink.sent, (Ids{"e", "f", "p"}));
  EXPECT_FALSE(dispatcher->unreachable());
  EXPECT_EQ(outcomes()["p"], Status::kFailedRetry);
  EXPECT_EQ(outcomes()["p2"], Status::kBlocked);

  // Alone in its batch it says nothing that an outage would not say.
  begin({{"p", "p"}});
  EXPECT_TRUE(dispatcher->unreachable());
  EXPECT_EQ(outcomes()["p"], Status::kNotTried);

  // Delivered after all: forgotten.
  sink.rule = [](const std::string &) { return kDelivered; };
  begin({{"p", "p"}, {"p2", "p"}, {"e", ""}});
  EXPECT_EQ(outcomes()["p2"], Status::kDelivered);
  begin({{"p", "p"}, {"e", ""}});
  EXPECT_EQ(sink.sent, (Ids{"p", "e"}));
}

TEST_F(DispatcherTest, AnInnocentFirstEventIsNotBlamed) {
  // `z` breaks whatever is in flight with it, and stands last.
  const auto breaks = [&](const std::string &) {
    for (const auto &[id, tag] : sink.in_flight)
      if (id == "z") return kUnreachable;
    return kDelivered;
  };
  sink.rule = breaks;
  std::vector<Event> pending{{"a", ""}, {"b", ""}, {"c", ""}, {"z", ""}, {"d", ""}};
  std::map<std::string, Status> seen;
  for (int attempt = 0; attempt < 20 && !pending.empty(); ++attempt) {
    begin(pending);
    ASSERT_TRUE(dispatcher->done());
    // As the engine does it: the prefix up to the first event that was not tried is gone.
    size_t kept = 0;
    const auto list = dispatcher->outcomes();
    for (; kept < list.size() && list[kept].status != Status::kNotTried; ++kept)
      seen[pending[kept].id] = list[kept].status;
    pending.erase(pending.begin(), pending.begin() + static_cast<long>(kept));
  }
  EXPECT_TRUE(pending.empty());
  EXPECT_EQ(seen, (std::map<std::string, Status>{{"a", Status::kDelivered},
                                                 {"b", Status::kDelivered},
                                                 {"c", Status::kDelivered},
                                                 {"d", Status::kDelivered},
                                                 {"z", Status::kFailedRetry}}));
}

TEST_F(DispatcherTest, ABadWitnessProvesNothingAndTheNextIsAnotherOne) {
  sink.rule = [](const std::string &id) { return id == "p" || id == "q" ? kUnreachable : kDelivered; };
  const std::vector<Event> events{{"p", ""}, {"q", ""}, {"r", ""}};
  for (int attempt = 1; attempt <= Dispatcher::kPatience; ++attempt) begin(events);
  const auto expect = [&](const Ids &sent, Status status) {
    begin(events);
    EXPECT_EQ(sink.sent, sent);
    EXPECT_TRUE(dispatcher->unreachable());
    EXPECT_EQ(outcomes()["p"], status);
  };
  expect({"q"}, Status::kNotTried);
  expect({"r", "p", "q"}, Status::kNotTried);
  expect({"q"}, Status::kNotTried);
  expect({"r", "p", "q"}, Status::kFailedRetry);
  EXPECT_EQ(outcomes()["r"], Status::kDelivered);
}

// Whenever it ends, and also when it begins again: between two requests the destination may come back.
// (A second outage of a single request, just that one, cannot be told from an event that is to blame.)
TEST_F(DispatcherTest, TheEndOfAnOutageIsNotHeldAgainstTheEventThatStandsFirst) {
  for (const size_t first : {1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 20, 50})
    for (const size_t between : {1, 2, 3, 10})
      for (const size_t second : {0, 2, 5}) {
        dispatcher.emplace(sink);
        size_t requests = 0;
        sink.rule = [&](const std::string &) {
          const size_t n = requests++;
          return n < first || (n >= first + between && n < first + between + second) ? kUnreachable
                                                                                     : kDelivered;
        };
        SCOPED_TRACE(std::to_string(first) + ", " + std::to_string(between) + ", " + std::to_string(second));
        do {
          begin({{"a1", "a"}, {"a2", "a"}, {"b", "b"}, {"c", ""}, {"d", ""}});
          ASSERT_TRUE(dispatcher->done());
          for (const auto &[id, status] : outcomes()) ASSERT_NE(status, Status::kFailedRetry) << id;
        } while (dispatcher->unreachable());
        for (const auto &[id, status] : outcomes()) EXPECT_EQ(status, Status::kDelivered) << id;
      }
}

TEST_F(DispatcherTest, AReceiverThatComesBackSlowlyAfterItsCrashIsNoAlibi) {
  bool down = false;
  sink.rule = [&](const std::string &id) {
    const bool was_down = std::exchange(down, id == "p");
    return id == "p" || was_down ? kUnreachable : kDelivered;
  };
  const std::vector<Event> events{{"p", ""}, {"b", ""}, {"c", ""}};
  for (int attempt = 1; attempt < Dispatcher::kPatience + Dispatcher::kProofs; ++attempt) {
    begin(events);
    down = false;  // it is back when the back-off ends
    ASSERT_EQ(outcomes()["p"], Status::kNotTried);
  }
  begin(events);
  EXPECT_EQ(outcomes()["p"], Status::kFailedRetry);
}

TEST_F(DispatcherTest, OneOtherEventIsEnoughToFindTheCulprit) {
  sink.rule = [](const std::string &id) { return id == "p" ? kUnreachable : kDelivered; };
  for (int attempt = 1; attempt < Dispatcher::kPatience + Dispatcher::kProofs; ++attempt) {
    begin({{"p", ""}, {"q", ""}});
    ASSERT_EQ(outcomes()["p"], Status::kNotTried);
  }
  begin({{"p", ""}, {"q", ""}});
  EXPECT_EQ(sink.sent, (Ids{"q", "p"}));
  EXPECT_EQ(outcomes()["p"], Status::kFailedRetry);
  EXPECT_FALSE(dispatcher->unreachable());
}

TEST_F(DispatcherTest, NoWitnessOfTheSameKey) {
  sink.rule = [](const std::string &) { return kUnreachable; };
  for (int attempt = 0; attempt < 10; ++attempt) {
    begin({{"a1", "a"}, {"a2", "a"}});
    EXPECT_EQ(sink.sent, (Ids{"a1"}));
    EXPECT_TRUE(dispatcher->unreachable());
  }
}

TEST_F(DispatcherTest, NoWitnessBeforeAnEarlierEventOfItsKey) {
  sink.ordered = true;
  const std::vector<Event> events = {{"p", ""}, {"q1", "q"}, {"q2", "q"}, {"q3", "q"}};
  sink.rule = [](const std::string &) { return kUnreachable; };
  for (int attempt = 0; attempt <= Dispatcher::kPatience; ++attempt) begin(events);
  sink.rule = [](const std::string &id) { return id == "p" ? kUnreachable : kDelivered; };
  begin(events);
  EXPECT_EQ(sink.sent.front(), "q1") << "the second witness is another one, but not of the same key";
}

TEST_F(DispatcherTest, NoWitnessBehindAFailedEventOfItsKey) {
  sink.ordered = true;
  sink.rule = [](const std::string &) { return kUnreachable; };
  for (int attempt = 0; attempt < Dispatcher::kPatience; ++attempt) begin({{"p", ""}, {"q2", "q"}});
  sink.rule = [](const std::string &id) {
    return id == "p" ? kUnreachable : id == "q1" ? kRetry : kDelivered;
  };
  for (int attempt = 0; attempt < 4; ++attempt) {
    begin({{"q1", "q"}, {"p", ""}, {"q2", "q"}});
    EXPECT_EQ(std::count(sink.sent.begin(), sink.sent.end(), "q2"), 0);
    EXPECT_EQ(outcomes()["q1"], Status::kFailedRetry);
  }
}

TEST_F(DispatcherTest, AWitnessThatFailsItselfKeepsItsOutcome) {
  sink.rule = [](const std::string &id) { return id == "p" ? kUnreachable : kRetry; };
  for (int attempt = 0; attempt <= Dispatcher::kPatience; ++attempt)
    begin({{"p", ""}, {"q", "q"}, {"r", ""}});
  EXPECT_TRUE(dispatcher->unreachable());
  EXPECT_EQ(outcomes(),
            (std::map<std::string, Status>{
                {"p", Status::kNotTried}, {"q", Status::kFailedRetry}, {"r", Status::kNotTried}}));
}

TEST_F(DispatcherTest, ThoseThatWereInFlightGoSinglyAndEachNeedsItsOwnHistory) {
  // Nothing is recorded in between, so the batch stays: `z` breaks whatever is in flight with it.
  sink.rule = [&](const std::string &) {
    for (const auto &[id, tag] : sink.in_flight)
      if (id == "z") return kUnreachable;
    return kDelivered;
  };
  const std::vector<Event> events{{"a", ""}, {"b", ""}, {"c", ""}, {"z", ""}, {"d", ""}};
  for (int attempt = 1; attempt <= Dispatcher::kPatience; ++attempt) begin(events);
  EXPECT_EQ(sink.most_in_flight, 4u);
  for (int attempt = 1; attempt <= Dispatcher::kPatience; ++attempt) {
    begin(events);
    EXPECT_EQ(sink.sent, (Ids{"a", "b", "c", "z"})) << "no witness yet: another one stood first before";
    EXPECT_EQ(sink.most_in_flight, 1u);
    EXPECT_TRUE(dispatcher->unreachable());
  }
  begin(events);
  EXPECT_EQ(sink.sent, (Ids{"a", "b", "c", "z", "d"}));
  EXPECT_EQ(outcomes()["z"], Status::kFailedRetry);
}

TEST_F(DispatcherTest, WhatOneEventDidIsNotHeldAgainstTheNext) {
  sink.rule = [](const std::string &) { return kUnreachable; };
  for (int attempt = 0; attempt < 5; ++attempt) begin({{"a", ""}, {"b", ""}});
  sink.rule = [](const std::string &id) { return id == "z" ? kUnreachable : kDelivered; };
  begin({{"z", ""}, {"a", ""}, {"b", ""}});
  EXPECT_EQ(sink.sent, (Ids{"z"}));
  EXPECT_EQ(outcomes()["z"], Status::kNotTried);
}

TEST_F(DispatcherTest, BlockedEventsAreNotFirstInLine) {
  sink.rule = [](const std::string &id) {
    return id == "a1" ? kRetry : id == "b" ? kUnreachable : kDelivered;
  };
  const std::vector<Event> events{{"a1", "a"}, {"a2", "a"}, {"b", ""}, {"c", ""}};
  for (int attempt = 0; attempt < Dispatcher::kPatience + Dispatcher::kProofs; ++attempt) begin(events);
  EXPECT_EQ(outcomes()["b"], Status::kFailedRetry);
}

TEST_F(DispatcherTest, ABatchThatSaysNothingChangesNothing) {
  sink.rule = [](const std::string &) { return kUnreachable; };
  begin({{"a", ""}, {"b", ""}});
  begin({{"h", "h", true}});
  EXPECT_FALSE(dispatcher->unreachable());
  begin({{"a", ""}, {"b", ""}});
  EXPECT_EQ(sink.sent, (Ids{"a"}));
}

TEST_F(DispatcherTest, TheCulpritKeepsItsPlaceInItsKeyWhereTheSinkKeepsOrder) {
  sink.ordered = true;
  sink.rule = [](const std::string &id) { return id[0] == 'p' ? kUnreachable : kDelivered; };
  for (int attempt = 0; attempt < Dispatcher::kPatience + Dispatcher::kProofs; ++attempt) {
    begin({{"p1", "p"}, {"p2", "p"}, {"e", ""}});
    EXPECT_EQ(std::count(sink.sent.begin(), sink.sent.end(), "p2"), attempt == 0)
        << "p2 is no witness for p1";
  }
  EXPECT_EQ(outcomes()["p1"], Status::kFailedRetry);
  begin({{"p1", "p"}, {"p2", "p"}, {"f", ""}});
  EXPECT_EQ(sink.sent, (Ids{"f", "p1"}));
  EXPECT_EQ(outcomes()["p2"], Status::kBlocked);
}

TEST_F(DispatcherTest, TheCulpritDoesNotGoBehindAFailedEventOfItsKey) {
  sink.ordered = true;
  sink.rule = [](const std::string &id) { return id == "p" ? kUnreachable : kDelivered; };
  for (int attempt = 0; attempt < Dispatcher::kPatience + Dispatcher::kProofs; ++attempt)
    begin({{"p", "p"}, {"e", ""}});
  ASSERT_EQ(outcomes()["p"], Status::kFailedRetry);
  sink.rule = [](const std::string &id) { return id == "o" ? kRetry : kDelivered; };
  begin({{"o", "p"}, {"p", "p"}, {"q", "p"}, {"f", ""}});
  EXPECT_EQ(sink.sent, (Ids{"o", "f"}));
  EXPECT_EQ(outcomes()["p"], Status::kBlocked);
  EXPECT_EQ(outcomes()["q"], Status::kBlocked);
  EXPECT_TRUE(dispatcher->done());
}

TEST_F(DispatcherTest, StopDrainsAndLeavesTheRest) {
  sink.capacity = 1;
  begin({{"a", ""}, {"b", ""}});
  dispatcher->stop();
  EXPECT_FALSE(dispatcher->done());
  sink.answer("a", kDelivered);
  dispatcher->step();
  EXPECT_TRUE(dispatcher->done());
  EXPECT_EQ(outcomes(), (std::map<std::string, Status>{{"a", Status::kDelivered}, {"b", Status::kNotTried}}));
}

TEST_F(DispatcherTest, StopFillsTheHolesBeforeWhatWentOut) {
  sink.capacity = 3;
  begin({{"a1", "a"}, {"a2", "a"}, {"b", ""}, {"a3", "a"}, {"c", ""}, {"a4", "a"}, {"d", ""}});
  dispatcher->stop();
  for (const char *id : {"c", "b", "a1", "a2", "a3"}) {
    EXPECT_FALSE(dispatcher->done());
    sink.answer(id, kDelivered);
    dispatcher->step();
  }
  EXPECT_TRUE(dispatcher->done());
  EXPECT_EQ(sink.sent, (std::vector<std::string>{"a1", "b", "c", "a2", "a3"}));
}

TEST_F(DispatcherTest, OutcomesOfAnAbandonedBatchAreIgnored) {
  begin({{"a", ""}});
  const uint64_t old_tag = sink.in_flight[0].second;
  sink.in_flight.clear();
  begin({{"b", ""}});
  sink.answer(old_tag, kDelivered);
  sink.answer(uint64_t{77}, kDelivered);
  dispatcher->step();
  EXPECT_FALSE(dispatcher->done());
  EXPECT_EQ(outcomes()["b"], Status::kNotTried);
}

TEST_F(DispatcherTest, OneAnswerPerEvent) {
  begin({{"a", ""}, {"b", ""}});
  const uint64_t tag = sink.in_flight[0].second;
  sink.answer("a", kDelivered);
  sink.answer(tag, kUnreachable);
  dispatcher->step();
  EXPECT_EQ(dispatcher->in_flight(), 1u);
  EXPECT_FALSE(dispatcher->unreachable());
}

TEST_F(DispatcherTest, ASinkThatKeepsOrderGetsTheWholeKey) {
  sink.ordered = true;
  begin({{"a1", "a"}, {"a2", "a"}, {"a3", "a"}});
  EXPECT_EQ(sink.sent, (Ids{"a1", "a2", "a3"}));
  sink.answer("a3", kRetry);
  sink.answer("a2", kRetry);
  sink.answer("a1", kDelivered);
  dispatcher->step();
  EXPECT_TRUE(dispatcher->done());
  EXPECT_EQ(outcomes(),
            (std::map<std::string, Status>{
                {"a1", Status::kDelivered}, {"a2", Status::kFailedRetry}, {"a3", Status::kBlocked}}));
}

TEST_F(DispatcherTest, ASinkThatKeepsOrderGetsNothingBehindAFailure) {
  sink.ordered = true;
  sink.capacity = 1;
  begin({{"a1", "a"}, {"a2", "a"}, {"b", "b"}});
  sink.answer("a1", kRetry);
  dispatcher->step();
  EXPECT_EQ(sink.sent, (Ids{"a1", "b"}));
}

TEST_F(DispatcherTest, PassesOnTheTimeoutOfTheSink) {
  sink.timeout = 250;
  begin({{"a", ""}});
  EXPECT_EQ(dispatcher->timeout_ms(), 250);
}

// Whatever the answers and their order: every key keeps its order, nothing is sent twice, and every batch
// ends.
TEST_F(DispatcherTest, RandomisedInvariants) {
  for (unsigned seed = 0; seed < 300; ++seed) {
    std::mt19937 generator(seed);
    const auto random = [&] { return static_cast<unsigned>(generator()); };
    FakeSink fake;
    fake.capacity = 1 + random() % 8;
    fake.ordered = random() % 4 == 0;
    Dispatcher under_test(fake);
    const unsigned unreachable_percent = random() % 3 == 0 ? 30 : 1;
    for (int round = 0; round < 8; ++round) {
      std::vector<Event> events;
      for (unsigned i = 0, n = random() % 30; i < n; ++i)
        events.push_back({std::to_string(i),
                          random() % 3 ? std::string(1, static_cast<char>('a' + random() % 4)) : "",
                          random() % 20 == 0});
      std::vector<Dispatcher::Item> list;
      for (const Event &event : events) {
        Dispatcher::Item item{};
        item.event.id = {event.id.data(), event.id.size()};
        if (!event.key.empty()) item.event.ordering_key = {event.key.data(), event.key.size()};
        item.held = event.held;
        list.push_back(item);
      }
      fake.sent.clear();
      under_test.begin(list);
      std::map<std::string, retrysafe_status> answers;
      for (int turn = 0; !under_test.done(); ++turn) {
        ASSERT_LT(turn, 1000) << "seed " << seed;
        under_test.step();
        if (fake.in_flight.empty()) continue;
        if (!fake.ordered) {
          std::set<std::string> keys;
          for (const auto &[id, tag] : fake.in_flight) {
            const std::string &key = events[std::stoul(id)].key;
            if (key.empty()) continue;
            ASSERT_TRUE(keys.insert(key).second) << "two of a key in flight, seed " << seed;
          }
        }
        const std::string id = fake.in_flight[random() % fake.in_flight.size()].first;
        const unsigned dice = random() % 100;
        answers[id] = dice < unreachable_percent        ? kUnreachable
                      : dice < unreachable_percent + 10 ? kRetry
                      : dice < unreachable_percent + 15 ? kFinal
                                                        : kDelivered;
        fake.answer(id, answers[id]);
      }
      std::set<std::string> once(fake.sent.begin(), fake.sent.end());
      ASSERT_EQ(once.size(), fake.sent.size()) << "sent twice, seed " << seed;
      std::map<std::string, size_t> last;
      std::set<std::string> failed;
      for (const std::string &id : fake.sent) {
        const std::string &key = events[std::stoul(id)].key;
        if (key.empty()) continue;
        ASSERT_TRUE(!last.count(key) || last[key] < std::stoul(id)) << "order of a key, seed " << seed;
        ASSERT_TRUE(fake.ordered || !failed.count(key)) << "sent behind a failure, seed " << seed;
        last[key] = std::stoul(id);
        if (answers[id] != kDelivered) failed.insert(key);
      }
      const auto result = under_test.outcomes();
      for (size_t i = 0; i < events.size(); ++i) {
        const bool delivered = answers.count(events[i].id) && answers[events[i].id] == kDelivered;
        ASSERT_EQ(result[i].status == Status::kDelivered, delivered) << "seed " << seed;
        ASSERT_TRUE(under_test.unreachable() || result[i].status != Status::kNotTried) << "seed " << seed;
      }
    }
  }
}
