#include "sinks/kafka/settings.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

namespace retrysafe::kafka {
namespace {

using Given = std::map<std::string, std::string>;
using InOrder = std::vector<std::pair<std::string, std::string>>;

Settings settings_in_order(const InOrder &given) {
  std::vector<retrysafe_pair> options;
  for (const auto &[name, value] : given)
    options.push_back({{name.data(), name.size()}, {value.data(), value.size()}});
  retrysafe_sink_config config{};
  config.options = options.data();
  config.option_count = options.size();
  return Settings(sink::Options(config));
}

Settings settings(Given given) {
  given.emplace("topic", "orders");
  given.emplace("brokers", "b:9092");
  return settings_in_order({given.begin(), given.end()});
}

// The last value that the library is given.
std::string property(const Settings &settings, const std::string &name) {
  std::string value = "absent";
  for (const auto &[key, text] : settings.properties)
    if (key == name) value = text;
  return value;
}

TEST(KafkaSettings, WhatIsPromisedIsNoOption) {
  const Settings plain = settings({});
  EXPECT_EQ(property(plain, "enable.idempotence"), "true");
  EXPECT_EQ(property(plain, "acks"), "all");
  EXPECT_EQ(property(plain, "partitioner"), "murmur2_random");
  EXPECT_EQ(property(plain, "security.protocol"), "plaintext");
  EXPECT_EQ(property(plain, "sasl.password"), "absent");
}

TEST(KafkaSettings, ListsOfBrokers) {
  const auto brokers = [](const char *list) {
    return property(settings({{"brokers", list}}), "bootstrap.servers");
  };
  EXPECT_EQ(brokers("a"), "a");
  EXPECT_EQ(brokers(" a:1 , b:65535,[::1]:9092, [fe80::1] "), "a:1,b:65535,[::1]:9092,[fe80::1]");
  for (const char *bad : {"", ",", "a,", "a:", "a:0", "a:65536", "a:x", ":9092", "a b:1", "ssl://a:1", "a/b",
                          "::1", "[]:1", "a:1:2", "a:1;b:2"})
    EXPECT_THROW(brokers(bad), std::invalid_argument) << bad;
}

TEST(KafkaSettings, LoginAndTls) {
  const Given login = {{"user", "u"}, {"password", "p"}, {"sasl_mechanism", "scram-sha-256"}};
  EXPECT_EQ(property(settings(login), "security.protocol"), "sasl_plaintext");
  EXPECT_EQ(property(settings(login), "sasl.mechanism"), "SCRAM-SHA-256");
  Given both = login;
  both["tls"] = "true";
  EXPECT_EQ(property(settings(both), "security.protocol"), "sasl_ssl");
  EXPECT_EQ(property(settings({{"tls", "true"}, {"ca_file", "/ca"}}), "ssl.ca.location"), "/ca");
  for (const char *missing : {"user", "password", "sasl_mechanism"}) {
    Given part = login;
    part.erase(missing);
    EXPECT_THROW(settings(part), std::invalid_argument) << missing;
  }
}

TEST(KafkaSettings, LoginWithoutTlsInAnyOrder) {
  const auto judge = [](const InOrder &given) -> std::string {
    try {
      return property(settings_in_order(given), "security.protocol");
    } catch (const std::invalid_argument &error) {
      return error.what();
    }
  };
  const InOrder login = {
      {"brokers", "b"}, {"password", "p"}, {"sasl_mechanism", "plain"}, {"topic", "t"}, {"user", "u"}};
  const std::pair<InOrder::value_type, const char *> cases[] = {
      {{"client_id", "c"}, "sasl_plaintext"},
      {{"tls", "false"}, "sasl_plaintext"},
      {{"tls", "true"}, "sasl_ssl"},
      {{"ca_file", "/ca"}, "certificates need option \"tls\""}};
  for (const auto &[option, expected] : cases) {
    InOrder given = login;
    given.push_back(option);
    std::sort(given.begin(), given.end());
    do {
      ASSERT_EQ(judge(given), expected);
    } while (std::next_permutation(given.begin(), given.end()));
  }
}

TEST(KafkaSettings, NothingStaysUnderWayForLongerThanTheTimeout) {
  const Settings brief = settings({{"timeout", "2000"}, {"connect_timeout", "50"}});
  for (const char *name : {"message.timeout.ms", "request.timeout.ms", "socket.timeout.ms"})
    EXPECT_EQ(property(brief, name), "2000") << name;
  // Bounds of the library.
  const Settings patient = settings({{"timeout", "3600000"}});
  EXPECT_EQ(property(patient, "message.timeout.ms"), "3600000");
  EXPECT_EQ(property(patient, "request.timeout.ms"), "900000");
  EXPECT_EQ(property(patient, "socket.timeout.ms"), "300000");
  EXPECT_EQ(property(brief, "socket.connection.setup.timeout.ms"), "1000");
}

}  // namespace
}  // namespace retrysafe::kafka
