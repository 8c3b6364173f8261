#include "relay/configuration.hpp"

#include <gtest/gtest.h>

namespace retrysafe::relay {
namespace {

Configuration read(std::string_view text) {
  Configuration configuration;
  read_configuration(text, &configuration);
  return configuration;
}

std::string problem(std::string_view text) {
  try {
    read(text);
  } catch (const ConfigurationError &error) {
    return error.what();
  }
  return {};
}

TEST(RelayConfiguration, ReadsSettingsAndSections) {
  const Configuration c = read(
      "# comment\n\n connection = host=a,b dbname=x \r\nstop_timeout=250ms\nconnections = 3\n"
      "[destination billing]\nkind = http\nurl = https://example.com/?a=b\nconnections = 2\n"
      "[destination  other ]\n[destination billing]\ntimeout = 1s");
  EXPECT_EQ(c.connection, "host=a,b dbname=x");
  EXPECT_EQ(c.stop_timeout_ms, 250);
  EXPECT_EQ(c.connections, 3);
  ASSERT_EQ(c.destinations.size(), 2u);
  EXPECT_EQ(c.destinations[0].name, "billing");
  EXPECT_EQ(c.destinations[0].kind, "http");
  EXPECT_EQ(c.destinations[0].connections, 2);
  using Pairs = std::vector<std::pair<std::string, std::string>>;
  EXPECT_EQ(c.destinations[0].options, (Pairs{{"url", "https://example.com/?a=b"}, {"timeout", "1s"}}));
  EXPECT_EQ(c.destinations[1].name, "other");
}

TEST(RelayConfiguration, NamesTheLineThatIsWrong) {
  EXPECT_EQ(problem("\nno_such = 1"),
            "line 2: unknown setting \"no_such\"; options of a destination belong below its line "
            "[destination NAME]");
  EXPECT_EQ(problem("[destination d]\nurl = a\n[destination e]\nurl = a\n[destination d]\nurl = a"),
            "line 6: \"url\" is set twice");
  EXPECT_EQ(
      problem("allowed_addresses = 10.0.0.0/8, a b"),
      "line 1: allowed_addresses: \"a b\" is neither an address, nor a range of addresses, nor a host name");
  EXPECT_EQ(problem("connections = 257"), "line 1: connections must be a number from 1 to 256");
  EXPECT_EQ(problem("log_format = xml"), "line 1: log_format must be text or json");
  EXPECT_EQ(problem("stop_timeout = 5"),
            "line 1: stop_timeout must be a duration such as 500ms, 30s or 5min, up to 24h");
  EXPECT_EQ(problem("[destination]"), "line 1: a destination needs a name");
  EXPECT_EQ(problem("[other x]"), "line 1: a section is written as [destination NAME]");
  EXPECT_EQ(problem("[destination d]\n= 1"), "line 2: a setting is written as NAME = VALUE");
  EXPECT_EQ(problem("[destination d]\nword"), "line 2: a setting is written as NAME = VALUE");
}

}  // namespace
}  // namespace retrysafe::relay
