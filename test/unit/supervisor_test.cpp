#include "core/supervisor.hpp"

#include <gtest/gtest.h>

#include <vector>

namespace retrysafe {
namespace {

using Databases = std::vector<Supervisor::Database>;

// A launcher in miniature: fake time, and workers that are what the test says.
class SupervisorTest : public ::testing::Test {
 protected:
  void catalog(std::vector<Supervisor::Row> rows) { supervisor.catalog(rows); }

  Supervisor::Decision decide() { return supervisor.decide(now, workers, held, per_database); }

  void starting(Supervisor::Database database) { workers.push_back({next_slot++, database, true, false}); }
  void running(Supervisor::Database database) {
    workers.push_back({next_slot++, database, false, false});
    supervisor.found(database, now);
  }
  void ended(Supervisor::Ending ending) {
    supervisor.ended(workers.front().database, ending, now);
    workers.erase(workers.begin());
  }

  Supervisor supervisor;
  std::vector<Supervisor::Worker> workers;
  Databases held;
  Supervisor::Milliseconds now = 1'000'000;
  int per_database = 1;
  int next_slot = 0;
};

TEST_F(SupervisorTest, LooksOnceIntoEachOpenDatabase) {
  catalog({{1, 10, true}, {2, 10, false}});
  EXPECT_EQ(decide().start, Databases{1});
  starting(1);
  EXPECT_TRUE(decide().start.empty());
  ended(Supervisor::Ending::kNothingToDo);
  now += 3'600'000;
  catalog({{1, 10, true}, {2, 10, false}});
  const auto decision = decide();
  EXPECT_TRUE(decision.start.empty());
  EXPECT_EQ(decision.wait, -1);
}

TEST_F(SupervisorTest, LooksAgainOnEvidence) {
  catalog({{1, 10, true}, {2, 10, true}});
  for (Supervisor::Database database : {1, 2}) {
    starting(database);
    ended(Supervisor::Ending::kNothingToDo);
  }
  EXPECT_TRUE(decide().start.empty());
  supervisor.announced(2);
  EXPECT_EQ(decide().start, Databases{2});
  catalog({{1, 11, true}, {2, 10, true}});
  EXPECT_EQ(decide().start, (Databases{2, 1}));
}

TEST_F(SupervisorTest, EvidenceForAll) {
  catalog({{1, 10, true}, {2, 10, true}});
  for (Supervisor::Database database : {1, 2}) {
    starting(database);
    ended(Supervisor::Ending::kNothingToDo);
  }
  supervisor.everything_announced();
  EXPECT_EQ(decide().start, (Databases{1, 2}));
}

TEST_F(SupervisorTest, EvidenceDuringALookMeansAnotherLook) {
  catalog({{1, 10, true}});
  starting(1);
  supervisor.announced(1);
  ended(Supervisor::Ending::kNothingToDo);
  EXPECT_EQ(decide().start, Databases{1});
  starting(1);
  ended(Supervisor::Ending::kNothingToDo);
  EXPECT_TRUE(decide().start.empty());
}

TEST_F(SupervisorTest, AClosedDatabaseIsLookedAtOnceItOpens) {
  catalog({{1, 10, false}});
  EXPECT_TRUE(decide().start.empty());
  catalog({{1, 11, true}});
  EXPECT_EQ(decide().start, Databases{1});
}

TEST_F(SupervisorTest, MoreWorkersFollowOnceTheExtensionIsFound) {
  per_database = 3;
  catalog({{1, 10, true}});
  EXPECT_EQ(decide().start, Databases{1});
  running(1);
  EXPECT_EQ(decide().start, (Databases{1, 1}));
  running(1);
  running(1);
  EXPECT_TRUE(decide().start.empty());
  per_database = 1;
  EXPECT_EQ(decide().stop, (std::vector<int>{1, 2}));
  per_database = 0;
  EXPECT_EQ(decide().stop, (std::vector<int>{0, 1, 2}));
}

TEST_F(SupervisorTest, FewLookAtOnce) {
  catalog({{1, 10, true}, {2, 10, true}, {3, 10, true}});
  EXPECT_EQ(decide().start.size(), size_t{Supervisor::kStartingAtOnce});
}

TEST_F(SupervisorTest, DatabasesThatNeedAWorkerComeFirst) {
  catalog({{1, 10, true}, {2, 10, true}, {3, 10, true}});
  running(3);
  ended(Supervisor::Ending::kAsked);
  supervisor.announced(2);
  now += Supervisor::kRestartDelay;
  EXPECT_EQ(decide().start, (Databases{3, 2}));
}

TEST_F(SupervisorTest, AHeldDatabaseGetsNoWorker) {
  catalog({{1, 10, true}});
  running(1);
  ended(Supervisor::Ending::kAsked);
  held = {1};
  now += 60'000;
  EXPECT_TRUE(decide().start.empty());
  held.clear();
  EXPECT_EQ(decide().start, Databases{1});
}

TEST_F(SupervisorTest, AWorkerThatWasAskedToLeaveComesBackAfterAMoment) {
  catalog({{1, 10, true}});
  for (int i = 0; i < 10; ++i) {
    running(1);
    ended(Supervisor::Ending::kAsked);
    EXPECT_EQ(decide().wait, Supervisor::kRestartDelay);
    now += Supervisor::kRestartDelay;
    EXPECT_EQ(decide().start, Databases{1});
  }
}

TEST_F(SupervisorTest, FailuresBackOff) {
  catalog({{1, 10, true}});
  Supervisor::Milliseconds last = 0;
  for (int i = 0; i < 12; ++i) {
    starting(1);
    ended(Supervisor::Ending::kFailed);
    const auto wait = decide().wait;
    EXPECT_GE(wait, last);
    EXPECT_LE(wait, Supervisor::kFailureDelayMax);
    last = wait;
    now += wait;
    EXPECT_EQ(decide().start, Databases{1});
  }
  EXPECT_EQ(last, Supervisor::kFailureDelayMax);
  // One that lasted begins anew.
  running(1);
  now += 2 * Supervisor::kFailureDelayMax;
  ended(Supervisor::Ending::kFailed);
  EXPECT_EQ(decide().wait, Supervisor::kRestartDelay);
}

TEST_F(SupervisorTest, WithoutASlotEverythingBacksOffAndIsSaidOnce) {
  catalog({{1, 10, true}, {2, 10, true}});
  EXPECT_TRUE(supervisor.start_failed(now));
  Supervisor::Milliseconds last = 0;
  for (int i = 0; i < 12; ++i) {
    const auto wait = decide().wait;
    EXPECT_TRUE(decide().start.empty());
    EXPECT_GE(wait, last);
    last = wait;
    now += wait;
    EXPECT_FALSE(decide().start.empty());
    EXPECT_FALSE(supervisor.start_failed(now));
  }
  EXPECT_EQ(last, Supervisor::kNoSlotDelayMax);
  EXPECT_TRUE(supervisor.start_succeeded());
  EXPECT_FALSE(supervisor.start_succeeded());
  EXPECT_EQ(decide().start.size(), 2u);
}

TEST_F(SupervisorTest, ADroppedDatabaseIsForgotten) {
  catalog({{1, 10, true}});
  running(1);
  catalog({});
  ended(Supervisor::Ending::kFailed);
  EXPECT_TRUE(decide().start.empty());
  EXPECT_EQ(decide().wait, -1);
  // Another one with its number is a new one.
  catalog({{1, 99, true}});
  EXPECT_EQ(decide().start, Databases{1});
}

TEST_F(SupervisorTest, AStoppingWorkerIsReplacedWhenItIsGone) {
  catalog({{1, 10, true}});
  running(1);
  workers[0].stopping = true;
  EXPECT_TRUE(decide().start.empty());
  EXPECT_TRUE(decide().stop.empty());
}

}  // namespace
}  // namespace retrysafe
