// Names that brokers take.
#include "core/kinds/names.hpp"

#include <gtest/gtest.h>

#include <string>

namespace retrysafe::kinds {
namespace {

TEST(Names, TopicsOfKafka) {
  for (const char *good : {"a", "orders", "Shop.orders_v2-EU", "...", "_", "0"})
    EXPECT_FALSE(topic_problem(good)) << good;
  for (const char *bad : {"", ".", "..", "a b", "a/b", "größe", "a\n", "a:b", "a*"})
    EXPECT_TRUE(topic_problem(bad)) << bad;
  EXPECT_FALSE(topic_problem(std::string(249, 'x')));
  EXPECT_TRUE(topic_problem(std::string(250, 'x')));
  EXPECT_TRUE(topic_problem(std::string("a\0b", 3)));
}

TEST(Names, SubjectsOfNats) {
  for (const char *good : {"a", "events.order.created", "größe", "a-b_c/d:1", "$x.y"})
    EXPECT_FALSE(subject_problem(good)) << good;
  EXPECT_FALSE(subject_problem(std::string(1024, 'x')));
  for (const char *bad :
       {"", ".", ".a", "a.", "a..b", "a b", "a\tb", "a\r\nPUB x 0", "a\x7f", "*", "a.>", "a*b"})
    EXPECT_TRUE(subject_problem(bad)) << bad;
  EXPECT_TRUE(subject_problem(std::string("a\0b", 3)));
  EXPECT_TRUE(subject_problem(std::string(1025, 'x')));
}

TEST(Names, SubjectsThatBelongToTheServerAreNotForEvents) {
  for (const char *bad :
       {"$JS.API.STREAM.DELETE.EVENTS", "$SYS.REQ.USER.INFO", "$KV.b.k", "_INBOX.abc.1", "", "a b"})
    EXPECT_TRUE(event_subject_problem(bad)) << bad;
  for (const char *good : {"events.$JS", "a$", "_INBOXES.a", "x._INBOX.y"})
    EXPECT_FALSE(event_subject_problem(good)) << good;
}

TEST(Names, StreamsOfNats) {
  for (const char *good : {"EVENTS", "shop-events_2", "größe", "a:b"})
    EXPECT_FALSE(stream_problem(good)) << good;
  for (const char *bad : {"", "a.b", "*", "a>", "a b", "a\t", "a/b", "a\\b", "a\x7f"})
    EXPECT_TRUE(stream_problem(bad)) << bad;
}

TEST(Names, MessageIdsOfNats) {
  for (const char *good : {"billing:", "~!", ""}) EXPECT_FALSE(message_id_problem(good)) << good;
  for (const char *bad : {"a b", "a\r\nX: 1", "größe", "a\x7f"}) EXPECT_TRUE(message_id_problem(bad)) << bad;
}

TEST(Names, ShortStringsOfAmqp) {
  EXPECT_FALSE(short_string_problem(""));
  EXPECT_FALSE(short_string_problem(std::string(255, 'x')));
  EXPECT_TRUE(short_string_problem(std::string(256, 'x')));
}

}  // namespace
}  // namespace retrysafe::kinds
