#include "core/handler_error.hpp"

#include <gtest/gtest.h>

namespace retrysafe {
namespace {

using enum HandlerError;

TEST(HandlerErrorTest, ContentThatIsNotFitIsFinal) {
  EXPECT_EQ(handler_error("22P02"), kFinal);
  EXPECT_EQ(handler_error("22000"), kFinal);
}

TEST(HandlerErrorTest, WhatMayChangeIsTriedAgain) {
  for (const char *state : {"P0001", "23503", "23505", "XX000", "RS001", "57014", "21000", ""})
    EXPECT_EQ(handler_error(state), kRetry) << state;
}

TEST(HandlerErrorTest, ConflictsAreNotTheEventsFault) {
  for (const char *state : {"40001", "40P01", "55P03"}) EXPECT_EQ(handler_error(state), kConflict) << state;
}

TEST(HandlerErrorTest, TheServerAsAWhole) {
  for (const char *state :
       {"53100", "53300", "57P01", "57P02", "57P03", "57P05", "08006", "58030", "25006", "25P03", "28P01"})
    EXPECT_EQ(handler_error(state), kUnreachable) << state;
}

TEST(HandlerErrorTest, ObjectsThatAreMissingOrClosed) {
  for (const char *state : {"42P01", "42501", "42883", "3F000", "3D000", "0A000", "26000"})
    EXPECT_EQ(handler_error(state), kMisconfigured) << state;
}

}  // namespace
}  // namespace retrysafe
