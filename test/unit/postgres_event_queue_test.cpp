#include "sinks/postgres/event_queue.hpp"

#include <map>
#include <set>
#include <string>
#include <vector>

#include <gtest/gtest.h>

namespace retrysafe::sink {
namespace {

// Plays the far side: what is in `poison` fails when it runs, and all that ran is undone.
class EventQueueTest : public ::testing::Test {
 protected:
  void add(uint64_t tag, const char *key = nullptr) {
    retrysafe_event event{};
    event.tag = tag;
    if (key) event.ordering_key = {key, std::char_traits<char>::length(key)};
    ASSERT_TRUE(queue.add(event));
  }

  // One transaction.
  void run_once() {
    queue.begin();
    const size_t count = queue.next_size();
    for (size_t i = 0; i < count; ++i) {
      ++runs[queue.next(i).tag];
      if (poison.count(queue.next(i).tag)) return queue.rejected(i, RETRYSAFE_FAILED_FINAL, "bad");
    }
    for (size_t i = 0; i < count; ++i) {
      if (deferred.count(queue.next(i).tag))
        return queue.not_committed(false, RETRYSAFE_FAILED_RETRY, "at commit");
    }
    for (size_t i = 0; i < count; ++i) committed.push_back(queue.next(i).tag);
    queue.committed();
  }

  void run() {
    for (int i = 0; !queue.empty(); ++i) {
      ASSERT_LT(i, 100) << "no end";
      run_once();
    }
    std::vector<retrysafe_outcome> all(100);
    all.resize(queue.take_outcomes(all));
    for (const auto &outcome : all) outcomes[outcome.tag] = outcome.status;
  }

  EventQueue queue;
  std::set<uint64_t> poison, deferred;
  std::map<uint64_t, int> runs;
  std::vector<uint64_t> committed;
  std::map<uint64_t, int> outcomes;
};

TEST_F(EventQueueTest, AllGoInOneTransaction) {
  for (uint64_t i = 1; i <= 3; ++i) add(i);
  queue.begin();
  EXPECT_EQ(queue.next_size(), 3u);
  run();
  EXPECT_EQ(committed, (std::vector<uint64_t>{1, 2, 3}));
  EXPECT_EQ(outcomes, (std::map<uint64_t, int>{{1, 0}, {2, 0}, {3, 0}}));
}

TEST_F(EventQueueTest, PoisonedEventsDoNotHoldUpTheirNeighbours) {
  for (uint64_t i = 0; i < 10; ++i) add(i);
  poison = {0, 4, 5, 9};
  run();
  EXPECT_EQ(committed, (std::vector<uint64_t>{1, 2, 3, 6, 7, 8}));
  for (uint64_t i = 0; i < 10; ++i) {
    EXPECT_LE(runs[i], 2) << i;
    EXPECT_EQ(outcomes[i], poison.count(i) ? RETRYSAFE_FAILED_FINAL : RETRYSAFE_DELIVERED) << i;
  }
}

TEST_F(EventQueueTest, NothingOfAKeyGoesOutBehindAFailure) {
  add(1, "a");
  add(2, "b");
  add(3, "a");  // fails
  add(4, "b");
  add(5, "a");
  poison = {3};
  run();
  EXPECT_EQ(committed, (std::vector<uint64_t>{1, 2, 4}));
  EXPECT_EQ(outcomes[5], RETRYSAFE_FAILED_RETRY);
  EXPECT_EQ(runs[5], 0);
}

TEST_F(EventQueueTest, AnEventThatComesBeforeTheFailureWasSeenIsHeldToo) {
  add(1, "a");
  poison = {1};
  run_once();
  add(2, "a");
  add(3, "b");
  run();
  EXPECT_EQ(runs[2], 0);
  EXPECT_EQ(outcomes[2], RETRYSAFE_FAILED_RETRY);
  EXPECT_EQ(committed, (std::vector<uint64_t>{3}));
  add(4, "a");  // its outcome was taken: whether to send more of the key is the caller's business again
  run();
  EXPECT_EQ(runs[4], 1);
}

TEST_F(EventQueueTest, AFailingCommitIsHalvedUntilTheCulpritIsKnown) {
  for (uint64_t i = 0; i < 8; ++i) add(i);
  deferred = {5};
  run();
  EXPECT_EQ(committed, (std::vector<uint64_t>{0, 1, 2, 3, 4, 6, 7}));
  EXPECT_EQ(outcomes[5], RETRYSAFE_FAILED_RETRY);
}

TEST_F(EventQueueTest, AConflictIsTriedAgainAndIsAFailureOnlyWhenAlone) {
  for (uint64_t i = 0; i < 3; ++i) add(i);
  queue.begin();
  queue.conflicted(2, "deadlock");
  EXPECT_EQ(queue.next_size(), 2u);
  queue.begin();
  queue.committed();
  EXPECT_EQ(queue.next_size(), 1u);
  queue.begin();
  queue.conflicted(0, "deadlock");
  run();
  EXPECT_EQ(outcomes, (std::map<uint64_t, int>{{0, 0}, {1, 0}, {2, RETRYSAFE_FAILED_RETRY}}));
}

TEST_F(EventQueueTest, UnreachableSaysNothingAboutWhatIsCommitted) {
  for (uint64_t i = 0; i < 2; ++i) add(i);
  queue.begin();
  queue.committed();
  add(2);
  queue.unreachable("gone");
  run();
  EXPECT_EQ(outcomes, (std::map<uint64_t, int>{{0, 0}, {1, 0}, {2, RETRYSAFE_UNREACHABLE}}));
}

TEST_F(EventQueueTest, IsFullAtSomePoint) {
  const retrysafe_event event{};
  for (size_t i = 0; i < EventQueue::kMaxEvents; ++i) ASSERT_TRUE(queue.add(event));
  EXPECT_FALSE(queue.add(event));
}

}  // namespace
}  // namespace retrysafe::sink
