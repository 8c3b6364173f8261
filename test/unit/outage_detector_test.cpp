#include "core/outage_detector.hpp"

#include <gtest/gtest.h>

using retrysafe::OutageDetector;

namespace {

struct Harness {
  OutageDetector detector;
  void fail(uint64_t tag) {
    retrysafe_outcome outcome{};
    outcome.tag = tag;
    detector.failed("event " + std::to_string(tag), outcome);
  }
  // "TAG:STATUS …"
  std::string taken() {
    std::string text;
    detector.take([&](const retrysafe_outcome &outcome) {
      text += std::to_string(outcome.tag) + (outcome.status == RETRYSAFE_UNREACHABLE ? ":down " : ":retry ");
    });
    return text;
  }
};

}  // namespace

TEST(OutageDetector, AFailureWaitsForEvidence) {
  Harness h;
  h.fail(1);
  EXPECT_EQ(h.taken(), "");
  h.detector.answered();
  EXPECT_EQ(h.taken(), "1:retry ");
  EXPECT_EQ(h.taken(), "");
}

TEST(OutageDetector, SeveralInARowAreAnOutageAndCostNothing) {
  Harness h;
  h.fail(1);
  h.fail(2);
  EXPECT_EQ(h.taken(), "");
  h.fail(3);
  EXPECT_EQ(h.taken(), "1:down 2:down 3:down ");
  h.fail(4);
  h.fail(1);
  EXPECT_EQ(h.taken(), "4:down 1:down ");
  h.detector.answered();
  h.fail(5);
  h.detector.idle();
  EXPECT_EQ(h.taken(), "5:retry ");
}

TEST(OutageDetector, OneEventAgainAndAgainIsNoOutage) {
  Harness h;
  for (int i = 0; i < 10; ++i) {
    h.fail(1);
    h.detector.idle();
    EXPECT_EQ(h.taken(), "1:retry ");
  }
}

TEST(OutageDetector, FailuresOneByOneAddUp) {
  Harness h;
  for (uint64_t tag : {1, 2}) {
    h.fail(tag);
    h.detector.idle();
  }
  EXPECT_EQ(h.taken(), "1:retry 2:retry ");
  h.fail(3);
  EXPECT_EQ(h.taken(), "3:down ");
}
