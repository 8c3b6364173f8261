#include "core/cloud_event.hpp"

#include <gtest/gtest.h>

using retrysafe::CloudEvent;

namespace {

retrysafe_text text(std::string_view view) {
  return {view.data(), view.size()};
}

retrysafe_event order_created() {
  retrysafe_event event{};
  event.id = text("7c9e6679-7425-80de-944b-e07fc1f90ae7");
  event.source = text("retrysafe/shop/");
  event.type = text("order.created");
  event.time = text("2026-01-02T03:04:05.678901Z");
  event.event_key = text("order-1:created");
  event.scope = text("");
  event.payload = text(R"({"total": 1.50})");
  return event;
}

std::string json(const retrysafe_event &event, std::string_view source = {}) {
  std::string out;
  CloudEvent(event, source).append_json(&out);
  return out;
}

std::string header_value(std::string_view value) {
  std::string out;
  CloudEvent::append_header_value(value, &out);
  return out;
}

}  // namespace

TEST(CloudEvent, StructuredMode) {
  EXPECT_EQ(json(order_created()),
            R"({"specversion":"1.0","id":"7c9e6679-7425-80de-944b-e07fc1f90ae7","source":"retrysafe/shop/",)"
            R"("type":"order.created","time":"2026-01-02T03:04:05.678901Z","eventkey":"order-1:created",)"
            R"("datacontenttype":"application/json","data":{"total": 1.50}})");
}

TEST(CloudEvent, OptionalParts) {
  retrysafe_event event = order_created();
  event.ordering_key = text("order-1");
  event.scope = text("eu");
  event.payload = {};
  const std::string out = json(event, "urn:shop");
  EXPECT_NE(out.find(R"("source":"urn:shop")"), std::string::npos);
  EXPECT_NE(out.find(R"("partitionkey":"order-1")"), std::string::npos);
  EXPECT_NE(out.find(R"("scope":"eu")"), std::string::npos);
  EXPECT_EQ(out.find("data"), std::string::npos);
}

TEST(CloudEvent, AnEmptyOrderingKeyIsNotAnAbsentOne) {
  retrysafe_event event = order_created();
  event.ordering_key = text("");
  EXPECT_NE(json(event).find(R"("partitionkey":"")"), std::string::npos);
}

TEST(CloudEvent, JsonStringsAreEscaped) {
  retrysafe_event event = order_created();
  event.event_key = text("a\"b\\c\r\n\x01\xc3\xa9\xf0\x9f\x98\x80");
  EXPECT_NE(json(event).find("\"eventkey\":\"a\\\"b\\\\c\\r\\n\\u0001\xc3\xa9\xf0\x9f\x98\x80\""),
            std::string::npos);
}

TEST(CloudEvent, HeadersBecomeExtensions) {
  const retrysafe_pair headers[] = {
      {text("traceparent"), text("00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01")},
      {text("X-Tenant_Id"), text("7")},
      {text("xtenantid"), text("8")},
      {text("Id"), text("forged")},
      {text("partitionkey"), text("forged")},
      {text("Data"), text("forged")},
      {text("subject"), text("orders/1")},
      {text("--"), text("nothing")},
  };
  retrysafe_event event = order_created();
  event.headers = headers;
  event.header_count = std::size(headers);
  const std::string out = json(event);
  EXPECT_NE(out.find(R"("traceparent":"00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01")"),
            std::string::npos);
  EXPECT_NE(out.find(R"("xtenantid":"7")"), std::string::npos);
  EXPECT_NE(out.find(R"("subject":"orders/1")"), std::string::npos);
  EXPECT_EQ(out.find("forged"), std::string::npos);
  EXPECT_EQ(out.find("nothing"), std::string::npos);
  EXPECT_EQ(out.find("\"8\""), std::string::npos);
}

TEST(CloudEvent, HeaderValuesArePercentEncoded) {
  EXPECT_EQ(header_value("order-1:created"), "order-1:created");
  EXPECT_EQ(header_value("a b\"c%d"), "a%20b%22c%25d");
  EXPECT_EQ(header_value("x\r\nSet-Cookie: y"), "x%0D%0ASet-Cookie:%20y");
  EXPECT_EQ(header_value("Euro \xe2\x82\xac \xf0\x9f\x98\x80"), "Euro%20%E2%82%AC%20%F0%9F%98%80");
  EXPECT_EQ(header_value(std::string_view("\0\x7f", 2)), "%00%7F");
}
