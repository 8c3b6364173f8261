// Replies of the server: how they are read, and what its errors mean.
#include "sinks/redis/reply.hpp"

#include <gtest/gtest.h>

#include <string>

namespace retrysafe::redis {
namespace {

using Result = ReplyReader::Result;

TEST(RedisReply, EveryTypeThatIsAskedFor) {
  ReplyReader reader;
  reader.feed("$3\r\n1-0\r\n+OK\r\n-OOM no\r\n:7\r\n$-1\r\n");
  Reply reply;
  ASSERT_EQ(reader.next(&reply), Result::kReply);
  EXPECT_EQ(reply.type, Reply::Type::kText);
  EXPECT_EQ(reply.text, "1-0");
  ASSERT_EQ(reader.next(&reply), Result::kReply);
  EXPECT_EQ(reply.type, Reply::Type::kStatus);
  ASSERT_EQ(reader.next(&reply), Result::kReply);
  EXPECT_EQ(reply.type, Reply::Type::kError);
  EXPECT_EQ(reply.text, "OOM no");
  ASSERT_EQ(reader.next(&reply), Result::kReply);
  EXPECT_EQ(reply.type, Reply::Type::kInteger);
  EXPECT_EQ(reply.integer, 7);
  EXPECT_EQ(reply.text, "") << "nothing is left over from another";
  ASSERT_EQ(reader.next(&reply), Result::kReply);
  EXPECT_EQ(reply.type, Reply::Type::kNil);
  EXPECT_EQ(reader.next(&reply), Result::kIncomplete);
}

TEST(RedisReply, InPieces) {
  ReplyReader reader;
  Reply reply;
  for (const char c : std::string("$5\r\n1-234\r")) {
    reader.feed({&c, 1});
    ASSERT_EQ(reader.next(&reply), Result::kIncomplete);
  }
  reader.feed("\n");
  ASSERT_EQ(reader.next(&reply), Result::kReply);
  EXPECT_EQ(reply.text, "1-234");
}

TEST(RedisReply, WhatNoRedisServerAnswers) {
  for (const char *bytes : {"HTTP/1.1 400 Bad Request\r\n", "*2\r\n+a\r\n+b\r\n", "*1000000000\r\n", "$x\r\n",
                            "\n\n\n", ",1.5\r\n", "#t\r\n", "%1\r\n+a\r\n+b\r\n"}) {
    ReplyReader reader;
    Reply reply;
    reader.feed(bytes);
    EXPECT_EQ(reader.next(&reply), Result::kGarbage) << bytes;
    reader.feed("+OK\r\n");
    EXPECT_EQ(reader.next(&reply), Result::kGarbage) << "it stays so";
  }
}

TEST(RedisReply, AnAnswerWithoutAnEnd) {
  ReplyReader reader;
  Reply reply;
  reader.feed("$1000000000\r\n");
  EXPECT_EQ(reader.next(&reply), Result::kIncomplete);
  reader.feed(std::string(ReplyReader::kMaxBytes + 1, 'x'));
  EXPECT_EQ(reader.next(&reply), Result::kGarbage);
}

TEST(RedisReply, ManyAnswersAreNotOneWithoutAnEnd) {
  ReplyReader reader;
  Reply reply;
  std::string all;
  for (int i = 0; i < 20'000; ++i) all += "+OK\r\n";
  reader.feed(all);
  for (int i = 0; i < 20'000; ++i) ASSERT_EQ(reader.next(&reply), Result::kReply) << i;
  EXPECT_EQ(reader.next(&reply), Result::kIncomplete);
}

// As servers of versions 6 and 7 word them.
TEST(RedisReply, WhatErrorsMean) {
  for (const char *error :
       {"OOM command not allowed when used memory > 'maxmemory'.",
        "LOADING Redis is loading the dataset in memory",
        "MASTERDOWN Link with MASTER is down and replica-serve-stale-data is set to 'no'.",
        "BUSY Redis is busy running a script. You can only call SCRIPT KILL or SHUTDOWN NOSAVE.",
        "MISCONF Redis is configured to save RDB snapshots, but it's currently unable to persist to disk.",
        "NOREPLICAS Not enough good replicas to write.", "CLUSTERDOWN Hash slot not served",
        "NOPERM User default has no permissions to run the 'xadd' command",
        "NOPERM this user has no permissions to run the 'xadd' command or its subcommand"})
    EXPECT_EQ(judge(error), Verdict::kDestination) << error;
  for (const char *error :
       {"READONLY You can't write against a read only replica.", "NOAUTH Authentication required.",
        "MOVED 3999 127.0.0.1:6381", "ASK 3999 127.0.0.1:6381", "DENIED Redis is running in protected mode",
        "ERR unknown command 'XADD', with args beginning with: 'a' ", "ERR max number of clients reached",
        "ERR Protocol error: expected '$', got 'x'"})
    EXPECT_EQ(judge(error), Verdict::kElsewhere) << error;
  for (const char *error : {"WRONGTYPE Operation against a key holding the wrong kind of value",
                            "NOPERM No permissions to access a key",
                            "NOPERM this user has no permissions to access one of the keys used as arguments",
                            "ERR The stream has exhausted the last possible ID, unable to add more items"})
    EXPECT_EQ(judge(error), Verdict::kStream) << error;
  for (const char *error :
       {"ERR Protocol error: invalid bulk length", "ERR Elements are too large to be stored"})
    EXPECT_EQ(judge(error), Verdict::kTooLarge) << error;
  for (const char *error : {"", "ERR something else", "OOMPH", "oom"})
    EXPECT_EQ(judge(error), Verdict::kUnclear) << error;
}

TEST(RedisReply, AfterAnErrorOfTheProtocolNothingIsRead) {
  EXPECT_TRUE(ends_connection("ERR Protocol error: invalid bulk length"));
  EXPECT_FALSE(ends_connection("ERR Elements are too large to be stored"));
}

TEST(RedisReply, ReasonsHoldNoArgumentsOfCommands) {
  EXPECT_EQ(reason_of("ERR unknown command 'AUTH', with args beginning with: 'hunter2' "),
            "ERR unknown command 'AUTH'");
  EXPECT_EQ(reason_of("ERR a\x01\xff"), "ERR a ?");
  EXPECT_LT(reason_of(std::string(1000, 'x')).size(), 256u);
  EXPECT_NE(reason_of("\x1f"), "") << "a failure has a reason";
  EXPECT_EQ(reason_of("MOVED 1 h:1"),
            "the server is part of a Redis Cluster, which this kind does not support: MOVED 1 h:1");
}

}  // namespace
}  // namespace retrysafe::redis
