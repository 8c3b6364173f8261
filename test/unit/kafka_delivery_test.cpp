#include "sinks/kafka/delivery.hpp"

#include <gtest/gtest.h>

#include <string>

namespace retrysafe::kafka {
namespace {

TEST(KafkaDelivery, SortsWhatBrokersSay) {
  EXPECT_EQ(judge(RD_KAFKA_RESP_ERR_NO_ERROR), Verdict::kDelivered);
  EXPECT_EQ(judge(RD_KAFKA_RESP_ERR_UNKNOWN_TOPIC_OR_PART), Verdict::kTopic);
  EXPECT_EQ(judge(RD_KAFKA_RESP_ERR_TOPIC_AUTHORIZATION_FAILED), Verdict::kTopic);
  EXPECT_EQ(judge(RD_KAFKA_RESP_ERR_TOPIC_EXCEPTION), Verdict::kEvent);
  EXPECT_EQ(judge(RD_KAFKA_RESP_ERR_MSG_SIZE_TOO_LARGE), Verdict::kBatch);
  EXPECT_EQ(judge(RD_KAFKA_RESP_ERR_INVALID_RECORD), Verdict::kBatch);
  EXPECT_EQ(judge(RD_KAFKA_RESP_ERR_NOT_ENOUGH_REPLICAS), Verdict::kDestination);
  EXPECT_EQ(judge(RD_KAFKA_RESP_ERR_CLUSTER_AUTHORIZATION_FAILED), Verdict::kDestination);
  EXPECT_EQ(judge(RD_KAFKA_RESP_ERR_POLICY_VIOLATION), Verdict::kUnknown);
  EXPECT_EQ(judge(RD_KAFKA_RESP_ERR_UNKNOWN), Verdict::kUnknown);
}

TEST(KafkaDelivery, WhatTheLibrarySaysItselfIsTheDestinations) {
  for (const auto error :
       {RD_KAFKA_RESP_ERR__MSG_TIMED_OUT, RD_KAFKA_RESP_ERR__TRANSPORT, RD_KAFKA_RESP_ERR__PURGE_QUEUE,
        RD_KAFKA_RESP_ERR__PURGE_INFLIGHT, RD_KAFKA_RESP_ERR__FATAL, RD_KAFKA_RESP_ERR__QUEUE_FULL,
        RD_KAFKA_RESP_ERR__DESTROY})
    EXPECT_EQ(judge(error), Verdict::kDestination) << rd_kafka_err2name(error);
  EXPECT_EQ(judge(RD_KAFKA_RESP_ERR__UNKNOWN_TOPIC), Verdict::kTopic);
  EXPECT_EQ(judge(RD_KAFKA_RESP_ERR__UNKNOWN_PARTITION), Verdict::kTopic);
}

TEST(KafkaDelivery, TextWithoutWhatChanges) {
  EXPECT_EQ(stable_text("b:1/bootstrap: Connect to ipv4#127.0.0.1:1 failed: Connection refused (after 12ms "
                        "in state CONNECT, "
                        "3 identical error(s) suppressed)"),
            "b:1/bootstrap: Connect to ipv4#127.0.0.1:1 failed: Connection refused");
  EXPECT_EQ(stable_text("1/1 brokers are down"), "1/1 brokers are down");
  EXPECT_EQ(stable_text(""), "");
}

}  // namespace
}  // namespace retrysafe::kafka
