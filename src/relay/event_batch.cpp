#include "relay/event_batch.hpp"

#include <algorithm>
#include <cstring>
#include <stdexcept>
#include <unordered_map>

#include "core/batch_handle.hpp"
#include "core/event_source.hpp"
#include "core/header_list.hpp"
#include "core/json_string.hpp"
#include "core/printable.hpp"

namespace retrysafe::relay {

namespace {

enum Column { kBatch, kEventId, kAttempt, kType, kKey, kScope, kOrderingKey, kPayload, kHeaders, kCreatedAt };

template <class Number>
Number number(const char *bytes) {
  Number value = 0;
  for (size_t i = 0; i < sizeof value; ++i)
    value = static_cast<Number>(value << 8 | static_cast<unsigned char>(bytes[i]));
  return value;
}

std::string source_of(std::string_view database, std::string_view scope) {
  std::string text(event_source_capacity(database, scope), '\0');
  text.resize(event_source(database, scope, text.data()));
  return text;
}

}  // namespace

EventBatch::EventBatch(Result rows, std::string_view database) : rows_(std::move(rows)) {
  const auto count = static_cast<size_t>(PQntuples(rows_.get()));
  const auto at = [&](size_t row, Column column) -> retrysafe_text {
    const int r = static_cast<int>(row);
    if (PQgetisnull(rows_.get(), r, column)) return {nullptr, 0};
    return {PQgetvalue(rows_.get(), r, column), static_cast<size_t>(PQgetlength(rows_.get(), r, column))};
  };
  // Of a column that is never null, in its binary form, which is of that size.
  const auto bytes_at = [&](size_t row, Column column, size_t size) {
    const retrysafe_text value = at(row, column);
    if (value.size != size) throw std::runtime_error("the database hands out events in an unknown form");
    return value.data;
  };
  // The binary form of jsonb is a version byte and the text.
  const auto json_at = [&](size_t row, Column column) -> retrysafe_text {
    const retrysafe_text text = at(row, column);
    return text.size == 0 ? text : retrysafe_text{text.data + 1, text.size - 1};
  };
  const retrysafe_text handle = at(0, kBatch);
  handle_.assign(handle.data, handle.size);
  BatchHandle parts{};
  if (parse_handle(handle_, &parts)) shard_ = parts.shard;

  written_.resize(count);
  items_.resize(count);
  std::vector<size_t> first_header(count + 1);
  for (size_t i = 0; i < count; ++i) {
    Written &written = written_[i];
    retrysafe_event &event = items_[i].event;
    Uuid id;
    std::memcpy(id.data(), bytes_at(i, kEventId, id.size()), id.size());
    written.id = format_uuid(id);
    event.id = {written.id.data(), written.id.size()};
    event.time = {written.time, event_time(number<std::int64_t>(bytes_at(i, kCreatedAt, 8)), written.time)};
    event.attempt = number<std::int32_t>(bytes_at(i, kAttempt, 4));
    event.type = at(i, kType);
    event.event_key = at(i, kKey);
    event.scope = at(i, kScope);
    event.ordering_key = at(i, kOrderingKey);
    event.payload = json_at(i, kPayload);
    const std::string_view scope(event.scope.data, event.scope.size);
    if (i > 0 && scope == std::string_view(items_[i - 1].event.scope.data, items_[i - 1].event.scope.size)) {
      event.source = items_[i - 1].event.source;
    } else {
      const std::string &source = texts_.emplace_back(source_of(database, scope));
      event.source = {source.data(), source.size()};
    }
    first_header[i] = headers_.size();
    if (const retrysafe_text headers = json_at(i, kHeaders); headers.data)
      (void)read_headers({headers.data, headers.size}, &headers_, &texts_);
  }
  first_header[count] = headers_.size();
  for (size_t i = 0; i < count; ++i) {
    items_[i].event.header_count = first_header[i + 1] - first_header[i];
    items_[i].event.headers = headers_.data() + first_header[i];
  }
}

std::string storable(std::string_view reason, bool utf8) {
  std::string text = printable(reason, reason.size());
  if (!utf8)
    std::replace_if(
        text.begin(), text.end(), [](char c) { return static_cast<signed char>(c) < 0; }, '?');
  return text;
}

namespace {

constexpr std::string_view kDead = "dead", kRetry = "retry", kNotTried = "not tried";

struct Named {
  std::string_view id;
  std::string_view status;
  const Dispatcher::Outcome *outcome;
};

std::string_view status_of(const Dispatcher::Outcome &outcome) {
  if (outcome.status == Dispatcher::Status::kFailedFinal) return kDead;
  return outcome.status == Dispatcher::Status::kFailedRetry ? kRetry : kNotTried;
}

// Where a key was used again several events have one id, and one outcome is recorded for all of them. They
// are dead if each is: another one may get through yet. A failure counts as an attempt, whatever became of
// others.
Named of_both(const Named &a, const Named &b) {
  if (a.status == b.status) return a;
  return {a.id, kRetry, a.status == kNotTried ? b.outcome : a.outcome};
}

}  // namespace

std::string outcomes_json(const EventBatch &batch, std::span<const Dispatcher::Outcome> outcomes, bool utf8) {
  std::vector<Named> named;
  std::unordered_map<std::string_view, size_t> places;
  for (size_t i = 0; i < outcomes.size(); ++i) {
    if (outcomes[i].status == Dispatcher::Status::kDelivered) continue;
    const Named next{batch.event_id(i), status_of(outcomes[i]), &outcomes[i]};
    const auto [place, fresh] = places.try_emplace(next.id, named.size());
    if (fresh)
      named.push_back(next);
    else
      named[place->second] = of_both(named[place->second], next);
  }
  std::string json;
  for (const Named &event : named) {
    json += json.empty() ? "{\"" : ",\"";
    json.append(event.id).append("\":{\"status\":\"").append(event.status).append("\"");
    const bool failed = event.status != kNotTried;
    if (failed && !event.outcome->reason.empty()) {
      json += ",\"reason\":";
      write_json_string(json, storable(event.outcome->reason, utf8));
    }
    if (failed && event.outcome->retry_after_ms >= 0)
      json.append(",\"retry_after_ms\":").append(std::to_string(event.outcome->retry_after_ms));
    json += '}';
  }
  if (!json.empty()) json += '}';
  return json;
}

}  // namespace retrysafe::relay
