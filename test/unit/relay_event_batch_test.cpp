// Events as the database hands them out in binary form.
#include "relay/event_batch.hpp"

#include <gtest/gtest.h>

#include <optional>
#include <stdexcept>

namespace retrysafe::relay {
namespace {

using namespace std::string_literals;
using Row = std::vector<std::optional<std::string>>;

Row row() {
  return {"1.15.17.3.100.250.7",
          "\x7c\x9e\x66\x79\x74\x25\x80\xde\x94\x4b\xe0\x7f\xc1\xf9\x0a\xe7",
          "\0\0\0\2"s,
          "order.created",
          "order-1",
          "eu/west",
          "customer-7",
          "\1{\"total\": 1.50}",
          "\1{\"X-Tenant\": \"\\u00e9\"}",
          "\0\0\0\0\0\0\0\1"s};
}

Result rows(const std::vector<Row> &values) {
  Result result(PQmakeEmptyPGresult(nullptr, PGRES_TUPLES_OK));
  std::vector<PGresAttDesc> columns(row().size());
  char name[] = "column";
  for (PGresAttDesc &column : columns) column = {name, 0, 0, 1, 0, -1, -1};
  EXPECT_TRUE(PQsetResultAttrs(result.get(), static_cast<int>(columns.size()), columns.data()));
  for (size_t r = 0; r < values.size(); ++r)
    for (size_t c = 0; c < values[r].size(); ++c) {
      std::optional<std::string> value = values[r][c];
      EXPECT_TRUE(PQsetvalue(result.get(), static_cast<int>(r), static_cast<int>(c),
                             value ? value->data() : nullptr, value ? static_cast<int>(value->size()) : -1));
    }
  return result;
}

std::string text(const retrysafe_text &of) {
  return {of.data, of.size};
}

TEST(RelayEventBatch, EventsAsTheWorkerWouldSendThem) {
  Row second = row();
  second[6] = second[7] = second[8] = std::nullopt;
  EventBatch batch(rows({row(), second}), "shop");
  EXPECT_EQ(batch.handle(), "1.15.17.3.100.250.7");
  EXPECT_EQ(batch.shard(), 15);
  ASSERT_EQ(batch.items().size(), 2u);
  const retrysafe_event &event = batch.items()[0].event;
  EXPECT_EQ(text(event.id), "7c9e6679-7425-80de-944b-e07fc1f90ae7");
  EXPECT_EQ(text(event.time), "2000-01-01T00:00:00.000001Z");
  EXPECT_EQ(text(event.source), "retrysafe/shop/eu%2Fwest");
  EXPECT_EQ(text(event.payload), "{\"total\": 1.50}");
  EXPECT_EQ(event.attempt, 2);
  ASSERT_EQ(event.header_count, 1u);
  EXPECT_EQ(text(event.headers[0].value), "\xc3\xa9");
  const retrysafe_event &bare = batch.items()[1].event;
  EXPECT_EQ(bare.payload.data, nullptr);
  EXPECT_EQ(bare.ordering_key.data, nullptr);
  EXPECT_EQ(bare.header_count, 0u);
}

TEST(RelayEventBatch, ReadsNothingBehindAValueThatIsShorterThanItsType) {
  for (const size_t column : {1, 2, 9}) {
    for (const std::optional<std::string> &value : {std::optional<std::string>("x"), {""}, {}}) {
      Row bad = row();
      bad[column] = value;
      EXPECT_THROW(EventBatch(rows({bad}), "shop"), std::runtime_error) << column;
    }
  }
}

Result rows_with_ids(std::string_view last_bytes) {
  std::vector<Row> values;
  for (const char byte : last_bytes) {
    values.push_back(row());
    values.back()[1]->back() = byte;
  }
  return rows(values);
}

std::string named(const char *last_byte) {
  return std::string("\"7c9e6679-7425-80de-944b-e07fc1f90a").append(last_byte) + "\":";
}

using Status = Dispatcher::Status;

TEST(RelayEventBatch, OutcomesSayWhatWasNotDelivered) {
  const EventBatch batch(rows_with_ids("\1\2\3\4"), "shop");
  const std::vector<Dispatcher::Outcome> outcomes = {{Status::kDelivered, -1, ""},
                                                     {Status::kFailedRetry, 1500, "no \"\xc3\xa9\"\n"},
                                                     {Status::kFailedFinal, -1, ""},
                                                     {Status::kBlocked, -1, "not shown"}};
  EXPECT_EQ(outcomes_json(batch, outcomes, true),
            "{" + named("02") +
                "{\"status\":\"retry\",\"reason\":\"no \\\"\xc3\xa9\\\"\",\"retry_after_ms\":1500}," +
                named("03") + "{\"status\":\"dead\"}," + named("04") + "{\"status\":\"not tried\"}}");
  EXPECT_EQ(storable("\xc3\xa9\n", false), "??");
  EXPECT_EQ(outcomes_json(batch, std::span(outcomes).first(1), true), "");
}

TEST(RelayEventBatch, OneOutcomeForAnId) {
  const auto both = [](Status first, Status second) {
    const EventBatch batch(rows_with_ids("\1\1"), "shop");
    return outcomes_json(batch, std::vector<Dispatcher::Outcome>{{first, -1, ""}, {second, -1, ""}}, true);
  };
  const auto is = [](const char *status) { return "{" + named("01") + "{\"status\":\"" + status + "\"}}"; };
  EXPECT_EQ(both(Status::kDelivered, Status::kFailedFinal), is("dead"));
  EXPECT_EQ(both(Status::kFailedFinal, Status::kFailedFinal), is("dead"));
  EXPECT_EQ(both(Status::kFailedFinal, Status::kFailedRetry), is("retry"));
  EXPECT_EQ(both(Status::kFailedRetry, Status::kBlocked), is("retry"));
  EXPECT_EQ(both(Status::kFailedFinal, Status::kBlocked), is("retry"));
  EXPECT_EQ(both(Status::kNotTried, Status::kBlocked), is("not tried"));
}

}  // namespace
}  // namespace retrysafe::relay
