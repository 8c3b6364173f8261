// An event as the server reads it.
#include "sinks/redis/command.hpp"

#include <gtest/gtest.h>

#include <string>
#include <vector>

namespace retrysafe::redis {
namespace {

retrysafe_text text(std::string_view view) {
  return {view.data(), view.size()};
}

retrysafe_event event() {
  retrysafe_event made{};
  made.id = text("4c1b");
  made.type = text("order.paid");
  made.source = text("retrysafe/shop");
  made.time = text("2026-01-02T03:04:05.678901Z");
  made.event_key = text("e1");
  made.scope = text("");
  return made;
}

// The words of one command; it has to be well-formed.
std::vector<std::string> words(const std::string &command) {
  std::vector<std::string> found;
  size_t at = 0;
  const auto number = [&](char mark) {
    EXPECT_EQ(command.at(at), mark);
    const size_t end = command.find("\r\n", at);
    const size_t value = std::stoul(command.substr(at + 1, end - at - 1));
    at = end + 2;
    return value;
  };
  for (size_t left = number('*'); left > 0; --left) {
    const size_t size = number('$');
    found.push_back(command.substr(at, size));
    EXPECT_EQ(command.substr(at + size, 2), "\r\n");
    at += size + 2;
  }
  EXPECT_EQ(at, command.size());
  return found;
}

std::vector<std::string> xadd(const retrysafe_event &event, std::string_view source = {},
                              long max_length = 0) {
  std::string command;
  append_xadd(event, "orders", source, max_length, &command);
  return words(command);
}

using Words = std::vector<std::string>;

TEST(RedisCommand, IsAppended) {
  std::string out = "before";
  append_command({"SELECT", "3", ""}, &out);
  EXPECT_EQ(out, "before*3\r\n$6\r\nSELECT\r\n$1\r\n3\r\n$0\r\n\r\n");
}

TEST(RedisCommand, AnEventWithoutMore) {
  EXPECT_EQ(xadd(event()),
            (Words{"XADD", "orders", "*", "specversion", "1.0", "id", "4c1b", "source", "retrysafe/shop",
                   "type", "order.paid", "time", "2026-01-02T03:04:05.678901Z", "eventkey", "e1"}));
}

TEST(RedisCommand, AnEventWithEverything) {
  const retrysafe_pair headers[] = {{text("traceparent"), text("00-1")}, {text("X-Tenant"), text("Ö\r\n")}};
  retrysafe_event full = event();
  full.ordering_key = text("o 1");
  full.scope = text("s");
  full.payload = text("{\"n\": 1}");
  full.headers = headers;
  full.header_count = 2;
  EXPECT_EQ(xadd(full, "shop", 1000), (Words{"XADD",
                                             "orders",
                                             "MAXLEN",
                                             "~",
                                             "1000",
                                             "*",
                                             "specversion",
                                             "1.0",
                                             "id",
                                             "4c1b",
                                             "source",
                                             "shop",
                                             "type",
                                             "order.paid",
                                             "time",
                                             "2026-01-02T03:04:05.678901Z",
                                             "partitionkey",
                                             "o 1",
                                             "eventkey",
                                             "e1",
                                             "scope",
                                             "s",
                                             "traceparent",
                                             "00-1",
                                             "xtenant",
                                             "Ö\r\n",
                                             "datacontenttype",
                                             "application/json",
                                             "data",
                                             "{\"n\": 1}"}));
}

}  // namespace
}  // namespace retrysafe::redis
