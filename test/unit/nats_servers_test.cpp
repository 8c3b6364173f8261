#include "sinks/nats/servers.hpp"

#include <stdexcept>
#include <string>

#include <gtest/gtest.h>

namespace retrysafe::nats {
namespace {

std::string text(const Server &server) {
  return std::string(server.tls ? "tls " : "") + server.host + " " + std::to_string(server.port);
}

TEST(NatsServers, OneOrMore) {
  EXPECT_EQ(text(parse_servers("a").at(0)), "a 4222");
  EXPECT_EQ(text(parse_servers("nats://a.example:1").at(0)), "a.example 1");
  EXPECT_EQ(text(parse_servers("tls://[::1]:65535/").at(0)), "tls ::1 65535");
  EXPECT_EQ(text(parse_servers("[::1]").at(0)), "::1 4222");
  const auto three = parse_servers("a:1, tls://b ,  127.0.0.1:4333");
  ASSERT_EQ(three.size(), 3u);
  EXPECT_EQ(text(three[0]), "a 1");
  EXPECT_EQ(text(three[1]), "tls b 4222");
  EXPECT_EQ(text(three[2]), "127.0.0.1 4333");
}

TEST(NatsServers, Refused) {
  for (const char *list : {"", " ", "a,", ",a", "http://a", "a:0", "a:65536", "a:", "a:x", "a:1x", "a:1:2",
                           "[::1", "[::1]x", "[]:1", "::1", "a/b", "a b", "nats://", "tls://a?x"})
    EXPECT_THROW(parse_servers(list), std::invalid_argument) << list;
}

TEST(NatsServers, CredentialsAreRefusedAndNotRepeated) {
  try {
    parse_servers("nats://courier:hunter2@a:4222");
    FAIL();
  } catch (const std::invalid_argument &error) {
    EXPECT_EQ(std::string(error.what()).find("hunter2"), std::string::npos);
  }
}

}  // namespace
}  // namespace retrysafe::nats
