#include "core/event_json.hpp"

#include <string>

#include <gtest/gtest.h>

namespace retrysafe {
namespace {

std::string json(const EventJson &event) {
  std::string out;
  write_event_json(out, event);
  return out;
}

TEST(EventJsonTest, HasAllMembers) {
  EXPECT_EQ(json({.id = "i",
                  .type = "t",
                  .event_key = "k",
                  .scope = "",
                  .ordering_key = "o",
                  .payload = "{\"a\": 1}",
                  .headers = "{\"h\": \"v\"}",
                  .created_at = "2026-01-02T03:04:05.000006Z",
                  .attempt = 12}),
            R"({"id":"i","type":"t","key":"k","scope":"","ordering_key":"o","payload":{"a": 1},)"
            R"("headers":{"h": "v"},"created_at":"2026-01-02T03:04:05.000006Z","attempt":12})");
}

TEST(EventJsonTest, WhatIsAbsentIsNullButPayloadsHaveNoMemberAndHeadersAreAlwaysAnObject) {
  EXPECT_EQ(json({.id = "i", .type = "t", .event_key = "k", .scope = "s", .created_at = "c", .attempt = 1}),
            R"({"id":"i","type":"t","key":"k","scope":"s","ordering_key":null,"headers":{},)"
            R"("created_at":"c","attempt":1})");
  EXPECT_EQ(
      json({.id = "i", .payload = "null"}),
      R"({"id":"i","type":null,"key":null,"scope":null,"ordering_key":null,"payload":null,"headers":{},)"
      R"("created_at":null,"attempt":0})");
}

}  // namespace
}  // namespace retrysafe
