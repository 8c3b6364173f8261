// Options of destinations: what is taken, what is refused, and that a refusal never repeats a value.
#include "core/option_list.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <string>
#include <vector>

#include "core/kinds/kinds.hpp"

namespace retrysafe {
namespace {

GivenOption text(std::string_view name, std::string_view value) {
  return {name, JsonKind::kString, value};
}
GivenOption number(std::string_view name, std::string_view value) {
  return {name, JsonKind::kNumber, value};
}

const GivenOption kUrl = text("url", "https://example.com/events");

// Empty when the options are good, else message and hint.
std::string problem_of(std::string_view kind, const std::vector<GivenOption> &given) {
  OptionProblem problem;
  if (check_options(find_built_in_kind(kind)->options, given, &problem)) return "";
  return std::string(problem.message) + " | " + problem.hint;
}

std::string http_problem(const GivenOption &option) {
  return problem_of("http", {kUrl, option});
}

TEST(OptionList, RequiredOptionsMustBeGiven) {
  EXPECT_EQ(problem_of("http", {kUrl}), "");
  EXPECT_NE(problem_of("http", {}).find("\"url\" is missing"), std::string::npos);
  EXPECT_NE(problem_of("http", {{"url", JsonKind::kNull, ""}}).find("\"url\" is missing"), std::string::npos);
}

TEST(OptionList, UnknownOptionsNameTheKnownOnes) {
  const std::string problem = http_problem(text("colour", "red"));
  EXPECT_NE(problem.find("unknown option \"colour\""), std::string::npos);
  EXPECT_NE(problem.find("url, mode, secret (or secret_file, secret_env)"), std::string::npos);
  EXPECT_EQ(problem.find("red"), std::string::npos);
  EXPECT_NE(problem_of("pull", {text("x", "y")}).find("takes no options"), std::string::npos);
  EXPECT_NE(http_problem({"colour", JsonKind::kNull, ""}), "");
}

TEST(OptionList, NamesTooLongToShowAreNotShown) {
  EXPECT_EQ(http_problem(text(std::string(64, 'x'), "")).find("xx"), std::string::npos);
}

TEST(OptionList, AddressesHoldNoPasswords) {
  const std::pair<std::string_view, GivenOption> all[] = {
      {"nats", text("servers", "nats://u:hunter2@h")},
      {"kafka", text("brokers", "a:9092,u:hunter2@h:9092")},
      {"redis", text("host", "hunter2@h")},
      {"rabbitmq", text("host", "u:hunter2@h")},
      {"postgres", text("host", "u:hunter2@h")},
  };
  for (const auto &[kind, option] : all) {
    const std::string problem = problem_of(kind, {option});
    EXPECT_NE(problem.find("invalid value of option"), std::string::npos) << kind << problem;
    EXPECT_NE(problem.find("without user and password"), std::string::npos) << kind << problem;
    EXPECT_EQ(problem.find("hunter2"), std::string::npos) << kind;
  }
  EXPECT_EQ(problem_of("nats", {text("servers", "tls://h:4222, [::1]:4222"), text("subject", "x")}), "");
}

TEST(OptionList, Files) {
  EXPECT_EQ(http_problem(text("ca_file", "ca.pem")), "");
  EXPECT_NE(http_problem(number("ca_file", "1")).find("the path of a file"), std::string::npos);
}

TEST(OptionList, Integers) {
  EXPECT_EQ(http_problem(number("max_in_flight", "1")), "");
  EXPECT_EQ(http_problem(number("max_in_flight", "1024")), "");
  for (const char *bad : {"0", "1025", "-1", "1.5", "1e3", "99999999999999999999"})
    EXPECT_NE(http_problem(number("max_in_flight", bad)), "") << bad;
  EXPECT_NE(http_problem(text("max_in_flight", "5")), "") << "a string is not a number";
}

TEST(OptionList, Booleans) {
  EXPECT_EQ(http_problem({"http2", JsonKind::kBoolean, "false"}), "");
  EXPECT_NE(http_problem(text("http2", "false")), "");
}

TEST(OptionList, Durations) {
  EXPECT_EQ(parse_duration("0ms"), 0);
  EXPECT_EQ(parse_duration("250ms"), 250);
  EXPECT_EQ(parse_duration("30s"), 30000);
  EXPECT_EQ(parse_duration("5min"), 300000);
  EXPECT_EQ(parse_duration("2h"), 7200000);
  EXPECT_EQ(parse_duration("1d"), 86400000);
  for (const char *bad : {"", "5", "s", "-1s", "+1s", "1.5s", "5 s", "5m", "5sec", "s5",
                          "9223372036854775807s", "99999999999999999999ms"})
    EXPECT_FALSE(parse_duration(bad)) << bad;
  EXPECT_EQ(http_problem(text("timeout", "1h")), "");
  EXPECT_NE(http_problem(text("timeout", "61min")), "");
  EXPECT_NE(http_problem(text("timeout", "1ms")), "");
  EXPECT_NE(http_problem(number("timeout", "30")), "") << "without a unit";
}

TEST(OptionList, Urls) {
  for (const char *good : {"http://h", "https://h:8443/a?b=c#d", "http://[::1]:80/x", "https://h?x=a@b"})
    EXPECT_EQ(problem_of("http", {text("url", good)}), "") << good;
  for (const char *bad :
       {"", "h", "ftp://h", "HTTP://h", "http://", "http:///x", "https://:80", "http://u:p@h/",
        "http://h/a b", "http://h/\n", "file:///etc/passwd", "http://h\\@x"})
    EXPECT_NE(problem_of("http", {text("url", bad)}), "") << bad;
}

TEST(OptionList, Enums) {
  EXPECT_EQ(http_problem(text("mode", "structured")), "");
  for (const char *bad : {"", "Binary", "binary|structured", "binar", "structured "})
    EXPECT_NE(http_problem(text("mode", bad)), "") << bad;
}

TEST(OptionList, Templates) {
  const OptionDescription list[] = {{.name = "topic", .type = OptionType::kTemplate, .min = 1, .max = 20}};
  OptionProblem problem{};
  const auto good = [&](const char *value) {
    const GivenOption given = text("topic", value);
    return check_options(list, {&given, 1}, &problem);
  };
  EXPECT_TRUE(good("orders.{type}"));
  for (const char *bad : {"", "orders.{kind}", "a\n", "a.{type}.{ordering_key}"})
    EXPECT_FALSE(good(bad)) << bad;
  EXPECT_NE(std::string(problem.hint).find("{header:NAME}"), std::string::npos);
}

TEST(OptionList, NamesThatABrokerNeverTakes) {
  const auto fixed = [](std::string_view kind, GivenOption where, GivenOption name) {
    return problem_of(kind, {where, name});
  };
  const GivenOption brokers = text("brokers", "h"), servers = text("servers", "h");
  EXPECT_EQ(fixed("kafka", brokers, text("topic", "orders")), "");
  EXPECT_EQ(fixed("kafka", brokers, text("topic", "my {type}")), "") << "depends on the event";
  const std::string problem = fixed("kafka", brokers, text("topic", "my topic"));
  EXPECT_NE(problem.find("invalid value of option \"topic\""), std::string::npos) << problem;
  EXPECT_NE(problem.find("letters, digits"), std::string::npos) << "tells what would be good: " << problem;
  EXPECT_NE(fixed("kafka", brokers, text("topic", "a{{b}}")), "");
  EXPECT_NE(fixed("nats", servers, text("subject", "$JS.API.INFO")).find("is reserved"), std::string::npos);
  for (const GivenOption &bad : {text("stream", "a.b"), text("inbox_prefix", "a..b")})
    EXPECT_NE(problem_of("nats", {servers, text("subject", "s"), bad}), "") << bad.name;
  const std::string long_name(256, 'x');
  for (const char *option : {"exchange", "routing_key"})
    EXPECT_NE(problem_of("rabbitmq", {text("host", "h"), text("user", "u"), text("password", "p"),
                                      text(option, long_name)}),
              "")
        << option;
  EXPECT_EQ(fixed("redis", text("host", "h"), text("stream", "any *{{}}")), "");
}

TEST(OptionList, SomeNeedOthers) {
  const std::vector<GivenOption> kafka = {text("brokers", "h"), text("topic", "t")};
  const auto with = [](std::vector<GivenOption> options, std::initializer_list<GivenOption> more) {
    options.insert(options.end(), more);
    return options;
  };
  const GivenOption user = text("user", "u"), mechanism = text("sasl_mechanism", "plain");
  EXPECT_EQ(problem_of("kafka", with(kafka, {user, text("password", "p"), mechanism})), "");
  EXPECT_EQ(problem_of("kafka", with(kafka, {user, text("password_env", "RETRYSAFE_P"), mechanism})), "");
  EXPECT_NE(problem_of("kafka", with(kafka, {user, mechanism})).find("\"user\" needs option \"password\""),
            std::string::npos);
  EXPECT_NE(problem_of("kafka", with(kafka, {user, {"password", JsonKind::kNull, ""}, mechanism})), "");
  EXPECT_NE(problem_of("kafka", with(kafka, {user, text("password", "p")})), "");
  EXPECT_NE(problem_of("kafka", with(kafka, {mechanism})), "");
  EXPECT_NE(http_problem(text("cert_file", "a.pem")).find("\"cert_file\" needs option \"key_file\""),
            std::string::npos);
  EXPECT_NE(http_problem(text("key_file", "a.key")), "");
  const std::vector<GivenOption> redis = {text("host", "h"), text("stream", "s")};
  EXPECT_EQ(problem_of("redis", with(redis, {text("password", "p")})), "");
  EXPECT_NE(problem_of("redis", with(redis, {user})), "");
}

TEST(OptionList, WhatIsMissingIsTheSameInAnyOrder) {
  const auto in_any_order = [](std::vector<GivenOption> given, const char *problem) {
    const auto by_name = [](const GivenOption &a, const GivenOption &b) { return a.name < b.name; };
    std::sort(given.begin(), given.end(), by_name);
    do {
      ASSERT_TRUE(problem_of("kafka", given).starts_with(problem)) << problem_of("kafka", given);
    } while (std::next_permutation(given.begin(), given.end(), by_name));
  };
  const GivenOption brokers = text("brokers", "b"), topic = text("topic", "t"),
                    ca_file = text("ca_file", "c"), user = text("user", "u"),
                    password = text("password", "p"), mechanism = text("sasl_mechanism", "plain");
  in_any_order({brokers, topic, ca_file, user}, "option \"user\" needs option \"password\"");
  in_any_order({brokers, topic, ca_file, user, password}, "option \"user\" needs option \"sasl_mechanism\"");
  in_any_order({brokers, topic, ca_file, password, mechanism}, "option \"password\" needs option \"user\"");
  in_any_order({brokers, ca_file, mechanism}, "option \"topic\" is missing");
}

TEST(OptionList, HeadersAreStringsWithGoodNames) {
  const auto problem = [](std::string_view name, JsonKind kind, std::string_view value) {
    const GivenOption member{name, kind, value};
    return http_problem({"headers", JsonKind::kObject, {}, {&member, 1}});
  };
  EXPECT_EQ(problem("Authorization", JsonKind::kString, "Bearer x"), "");
  EXPECT_EQ(problem("X", JsonKind::kString, ""), "");
  EXPECT_NE(problem("", JsonKind::kString, "x"), "");
  EXPECT_NE(problem("a:b", JsonKind::kString, "x"), "");
  EXPECT_NE(problem("a", JsonKind::kString, "x\r\nEvil: 1"), "");
  EXPECT_NE(problem("a", JsonKind::kNumber, "1"), "");
  EXPECT_NE(problem("a", JsonKind::kNull, ""), "");
  EXPECT_NE(problem("a", JsonKind::kString, std::string(8193, 'x')), "");
  EXPECT_NE(http_problem(text("headers", "a: b")), "");
}

TEST(OptionList, SecretsMayComeFromAFileOrTheEnvironmentButOnlyFromOne) {
  EXPECT_EQ(http_problem(text("secret", "whsec_x")), "");
  EXPECT_EQ(http_problem(text("secret_file", "webhook.key")), "");
  EXPECT_EQ(http_problem(text("secret_env", "RETRYSAFE_KEY")), "");
  EXPECT_NE(http_problem(text("secret_env", "PATH")), "");
  EXPECT_NE(http_problem(text("secret_env", "RETRYSAFE_A=B")), "");
  EXPECT_NE(http_problem(text("secret_file", "")), "");
  EXPECT_NE(http_problem(text("url_file", "x")), "") << "only of secrets";
  const std::string twice =
      problem_of("http", {kUrl, text("secret", "s3cret"), text("secret_env", "RETRYSAFE_X")});
  EXPECT_NE(twice.find("more than once"), std::string::npos);
  EXPECT_EQ(twice.find("s3cret"), std::string::npos);
  EXPECT_EQ(problem_of("http", {kUrl, text("secret", "s"), {"secret_env", JsonKind::kNull, ""}}), "");
}

TEST(OptionList, AProblemNeverRepeatsTheValue) {
  EXPECT_EQ(http_problem(text("secret", "hunter2\n")).find("hunter2"), std::string::npos);
  EXPECT_NE(http_problem(text("secret", "hunter2\n")), "");
  EXPECT_EQ(http_problem(text("mode", "hunter2")).find("hunter2"), std::string::npos);
}

TEST(OptionList, WhatViewsMustNotShow) {
  const OptionList list = find_built_in_kind("http")->options;
  EXPECT_TRUE(is_confidential(find_option(list, "secret")));
  EXPECT_TRUE(is_confidential(find_option(list, "headers")));
  EXPECT_TRUE(is_confidential(find_option(list, "no such option")));
  EXPECT_FALSE(is_confidential(find_option(list, "secret_file")));
  EXPECT_FALSE(is_confidential(find_option(list, "secret_env")));
  EXPECT_FALSE(is_confidential(find_option(list, "url")));
}

TEST(OptionList, DescriptionsOfOtherPackagesAreChecked) {
  OptionProblem problem;
  const auto good = [&](const OptionDescription &d) { return check_description(d, &problem); };
  EXPECT_TRUE(good({.name = "queue", .type = OptionType::kString}));
  EXPECT_FALSE(good({.name = "", .type = OptionType::kString}));
  EXPECT_FALSE(good({.name = "Queue", .type = OptionType::kString}));
  EXPECT_FALSE(good({.name = std::string_view("a\0b", 3), .type = OptionType::kString}));
  EXPECT_FALSE(good({.name = "n", .type = OptionType::kInteger, .min = 2, .max = 1}));
  EXPECT_FALSE(good({.name = "n", .type = OptionType::kInteger, .default_value = "x"}));
  EXPECT_FALSE(good({.name = "n", .type = OptionType::kInteger, .default_value = "9", .max = 8}));
  EXPECT_FALSE(good({.name = "b", .type = OptionType::kBoolean, .default_value = "yes"}));
  EXPECT_FALSE(good({.name = "e", .type = OptionType::kEnum}));
  EXPECT_FALSE(good({.name = "e", .type = OptionType::kEnum, .default_value = "c", .choices = "a|b"}));
  EXPECT_FALSE(good({.name = "s", .type = OptionType::kSecret, .default_value = "x"}));
}

TEST(OptionList, TypesHaveNamesBothWays) {
  for (const char *name :
       {"string", "integer", "boolean", "duration", "url", "enum", "secret", "file", "template", "headers"})
    EXPECT_STREQ(option_type_name(option_type(name).value()), name);
  EXPECT_FALSE(option_type("regex"));
}

}  // namespace
}  // namespace retrysafe
