#include "sinks/postgres/delivery_statement.hpp"

#include <gtest/gtest.h>

namespace retrysafe::sink {
namespace {

retrysafe_text text(const char *value) {
  return {value, value ? std::char_traits<char>::length(value) : 0};
}

TEST(DeliveryStatementTest, FillsTheColumnsThatAreThere) {
  const auto statement = delivery_statement({.inbox = "public.i", .columns = {"payload", "event_id"}});
  EXPECT_EQ(statement.sql, "INSERT INTO public.i (event_id, payload) VALUES ($1, $2) ON CONFLICT DO NOTHING");
  EXPECT_EQ(statement.parameters, (std::vector{Field::kEventId, Field::kPayload}));
}

TEST(DeliveryStatementTest, CallsTheFunctionWithWhatTheInsertReturns) {
  const auto statement = delivery_statement({.inbox = "i", .columns = {"event_id"}, .handler = "public.h"});
  EXPECT_EQ(statement.sql,
            "WITH fresh AS (INSERT INTO i (event_id) VALUES ($1) ON CONFLICT DO NOTHING RETURNING $2::jsonb "
            "AS event)"
            " SELECT pg_catalog.count(*) FROM fresh CROSS JOIN LATERAL public.h(fresh.event)");
  EXPECT_EQ(statement.parameters, (std::vector{Field::kEventId, Field::kEnvelope}));
}

TEST(DeliveryStatementTest, AsksAFunctionInsteadOfATable) {
  const auto statement = delivery_statement({.accept = "r.accept", .handler = "h"});
  EXPECT_EQ(statement.sql,
            "WITH fresh AS MATERIALIZED (SELECT $3::jsonb AS event WHERE r.accept($1::text, $2::text))"
            " SELECT pg_catalog.count(*) FROM fresh CROSS JOIN LATERAL h(fresh.event)");
  EXPECT_EQ(statement.parameters, (std::vector{Field::kConsumer, Field::kEventId, Field::kEnvelope}));
}

TEST(DeliveryStatementTest, WhatIsAbsentIsNull) {
  retrysafe_event event{};
  event.id = text("id");
  event.scope = text("");
  std::string value;
  EXPECT_TRUE(parameter_text(Field::kEventId, event, "c", &value));
  EXPECT_EQ(value, "id");
  EXPECT_TRUE(parameter_text(Field::kScope, event, "c", &value));
  EXPECT_EQ(value, "");
  EXPECT_FALSE(parameter_text(Field::kPayload, event, "c", &value));
  EXPECT_FALSE(parameter_text(Field::kOrderingKey, event, "c", &value));
  EXPECT_TRUE(parameter_text(Field::kHeaders, event, "c", &value));
  EXPECT_EQ(value, "{}");
  EXPECT_TRUE(parameter_text(Field::kConsumer, event, "c", &value));
  EXPECT_EQ(value, "c");
}

TEST(DeliveryStatementTest, HeadersBecomeAnObject) {
  const retrysafe_pair pairs[] = {{text("a"), text("1")}, {text("b\""), text("\n")}};
  retrysafe_event event{};
  event.headers = pairs;
  event.header_count = 2;
  std::string value;
  EXPECT_TRUE(parameter_text(Field::kHeaders, event, "c", &value));
  EXPECT_EQ(value, R"({"a":"1","b\"":"\n"})");
}

}  // namespace
}  // namespace retrysafe::sink
