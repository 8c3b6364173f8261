#include "sinks/nats/publish_answer.hpp"

#include <string>

#include <gtest/gtest.h>

namespace retrysafe::nats {
namespace {

using Verdict = PublishAnswer::Verdict;

TEST(NatsPublishAnswer, Stored) {
  for (
      const char *body : {
          R"({"stream":"EVENTS","seq":1})",
          R"({"stream":"EVENTS","seq":18446744073709551, "duplicate": true})",
          R"( { "domain" : "hub", "seq" : 12 , "stream" : "A", "more": {"a": [1, "}", {}], "b": []}, "x": null } )",
          R"({"error":null,"stream":"EVENTS","seq":3})",
      }) {
    const PublishAnswer answer = parse_answer(body);
    EXPECT_EQ(answer.verdict, Verdict::kStored) << body;
    EXPECT_EQ(answer.reason, "") << body;
  }
}

PublishAnswer error(int code, const std::string &description) {
  return parse_answer(R"({"error":{"code":503,"err_code":)" + std::to_string(code) + R"(,"description":")" +
                      description + R"("},"stream":"EVENTS","seq":0})");
}

TEST(NatsPublishAnswer, Errors) {
  EXPECT_EQ(error(10054, "message size exceeds maximum allowed").verdict, Verdict::kFailedFinal);
  EXPECT_EQ(error(10054, "message size exceeds maximum allowed").reason,
            "message size exceeds maximum allowed");
  EXPECT_EQ(error(10097, "header size exceeds maximum allowed of 64k").verdict, Verdict::kFailedFinal);
  EXPECT_EQ(error(10077, "maximum messages per subject exceeded").verdict, Verdict::kFailedRetry);
  EXPECT_EQ(error(10077, "maximum messages exceeded").verdict, Verdict::kRefused);
  EXPECT_EQ(error(10077, "maximum bytes exceeded").verdict, Verdict::kRefused);
  EXPECT_EQ(error(10023, "insufficient resources").verdict, Verdict::kRefused);
  EXPECT_EQ(error(10039, "JetStream not enabled for account").reason, "JetStream not enabled for account");
  EXPECT_NE(error(10060, "expected stream does not match").reason.find("option \"stream\""),
            std::string::npos);
}

TEST(NatsPublishAnswer, ReasonIsPrintable) {
  EXPECT_EQ(error(1, "").reason, "JetStream error 1");
  EXPECT_EQ(error(1, "a\x01\xff").reason, "a ?");
  EXPECT_LE(error(1, std::string(5000, 'x')).reason.size(), 250u);
}

TEST(NatsPublishAnswer, AnythingElseIsNoReceipt) {
  const std::string deep(100'000, '[');
  for (const std::string &body : std::initializer_list<std::string>{
           "", "hello", "{", "{}", "[]", "null", "+ACK", R"({"stream":"EVENTS"})", R"({"seq":1})",
           R"({"stream":"","seq":1})", R"({"stream":"EVENTS","seq":0})", R"({"stream":1,"seq":1})",
           R"({"stream":"EVENTS","seq":1)", R"({"stream":"EVENTS" "seq":1})", R"({"stream":"EVENTS,"seq":1})",
           R"({"a":)" + deep, R"({"a":"\)", std::string("{\"stream\0", 9),
           R"({"x":{"stream":"EVENTS","seq":1}})"}) {
    const PublishAnswer answer = parse_answer(body);
    EXPECT_EQ(answer.verdict, Verdict::kRefused) << body.substr(0, 80);
    EXPECT_FALSE(answer.reason.empty());
  }
}

}  // namespace
}  // namespace retrysafe::nats
