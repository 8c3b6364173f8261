#include "sinks/nats/subject.hpp"

#include <string>

#include <gtest/gtest.h>

namespace retrysafe::nats {
namespace {

TEST(NatsSubject, Legal) {
  for (const char *subject : {"a", "events.order.created", "größe", "a-b_c/d:1", "$x.y"})
    EXPECT_EQ(subject_problem(subject), "") << subject;
  EXPECT_EQ(subject_problem(std::string(1024, 'x')), "");
}

TEST(NatsSubject, Illegal) {
  for (const char *subject :
       {"", ".", ".a", "a.", "a..b", "a b", "a\tb", "a\r\nPUB x 0", "a\x7f", "*", "a.>", "a*b"})
    EXPECT_NE(subject_problem(subject), "") << subject;
  EXPECT_NE(subject_problem(std::string("a\0b", 3)), "");
  EXPECT_NE(subject_problem(std::string(1025, 'x')), "");
}

TEST(NatsSubject, WhatBelongsToTheServerIsNotForEvents) {
  for (const char *subject :
       {"$JS.API.STREAM.DELETE.EVENTS", "$SYS.REQ.USER.INFO", "$KV.b.k", "_INBOX.abc.1", ""})
    EXPECT_NE(event_subject_problem(subject), "") << subject;
  for (const char *subject : {"events.$JS", "a$", "_INBOXES.a", "x._INBOX.y"})
    EXPECT_EQ(event_subject_problem(subject), "") << subject;
}

}  // namespace
}  // namespace retrysafe::nats
