#include "outbox/outcomes.hpp"

#include <algorithm>
#include <cstring>
#include <span>
#include <string_view>

#include "core/event_id.hpp"
#include "outbox/pull_arguments.hpp"
#include "pg/error.hpp"

#include "pg/server.hpp"

namespace retrysafe::outbox {

namespace {

constexpr int64 kMillisecond = 1000;

const JsonbValue *member(const JsonbValue &object, std::string_view name, JsonbValue *room) {
  return getKeyJsonValueFromContainer(object.val.binary.data, name.data(), static_cast<int>(name.size()),
                                      room);
}

[[noreturn]] void raise_bad_outcome() {
  pg::raise(kInvalidParameter,
            "Outcomes are an object of event ids, each with an object of \"status\" (\"retry\", \"dead\" or "
            "\"not tried\"), \"reason\" and \"retry_after_ms\".",
            "invalid outcomes");
}

int64 retry_after_of(Numeric ms) {
  constexpr int64 kMost = kLongestRetryAfterUs / kMillisecond;
  const auto is_beyond = [&](PGFunction compare, int64 bound) {
    return DatumGetBool(
        DirectFunctionCall2(compare, NumericGetDatum(ms), NumericGetDatum(int64_to_numeric(bound))));
  };
  if (is_beyond(numeric_lt, 0) || is_beyond(numeric_gt, kMost))
    pg::raise(kInvalidParameter, "It must be between 0 and 31622400000, which is 366 days.",
              "invalid retry_after_ms in the outcomes");
  return DatumGetInt64(DirectFunctionCall1(numeric_int8, NumericGetDatum(ms))) * kMillisecond;
}

Outcome outcome_of(const JsonbValue &given) {
  if (given.type != jbvBinary || !JsonContainerIsObject(given.val.binary.data)) raise_bad_outcome();
  Outcome outcome{Status::kNotTried, -1, nullptr};
  uint32 known = 1;
  JsonbValue room;
  const JsonbValue *status = member(given, "status", &room);
  if (!status || status->type != jbvString) raise_bad_outcome();
  const std::string_view word(status->val.string.val, static_cast<size_t>(status->val.string.len));
  if (word == "retry")
    outcome.status = Status::kFailedRetry;
  else if (word == "dead")
    outcome.status = Status::kFailedFinal;
  else if (word != "not tried")
    raise_bad_outcome();
  if (const JsonbValue *reason = member(given, "reason", &room)) {
    ++known;
    if (reason->type == jbvString)
      outcome.reason = clipped(pnstrdup(reason->val.string.val, reason->val.string.len));
    else if (reason->type != jbvNull)
      raise_bad_outcome();
  }
  if (const JsonbValue *wait = member(given, "retry_after_ms", &room)) {
    ++known;
    if (wait->type == jbvNumeric)
      outcome.retry_after_us = retry_after_of(wait->val.numeric);
    else if (wait->type != jbvNull)
      raise_bad_outcome();
  }
  if (JsonContainerSize(given.val.binary.data) != known) raise_bad_outcome();
  return outcome;
}

// The events of a batch as it was handed out, found by their ids: more than one where a key was used again.
// Of those that were settled since, the ids need not be known any more.
class Members {
 public:
  Members(const BatchHandle &handle, const HandedOut &out) : batch_(out.batch) {
    const Range &range = out.range;
    entries_ = static_cast<Entry *>(
        palloc(sizeof(Entry) * static_cast<Size>(batch_.event_count + range.count + range.parked_count + 1)));
    int32 waiting = 0;
    for (int32 i = 0; i < batch_.event_count; ++i) {
      waiting += batch_.events[i].parked;
      entries_[count_++] = {batch_.events[i].event_id, i};
    }
    for (int32 i = 0; i < range.count; ++i)
      if (range.events[i].id <= batch_.from) entries_[count_++] = {range.events[i].event_id, kSettled};
    for (int32 i = 0; i < range.parked_count; ++i) entries_[count_++] = {range.parked[i].event_id, kSettled};
    std::sort(entries_, entries_ + count_,
              [](const Entry &a, const Entry &b) { return compare_ids(a.id, b.id) < 0; });
    const bool log_part_is_recorded = handle.to > handle.from && !range.events;
    unknown_left_ = log_part_is_recorded ? PG_INT32_MAX : handle.parked_count - waiting;
  }

  static constexpr int32 kSettled = -1;
  struct Entry {
    pg_uuid_t id;
    int32 index;  // in the batch; kSettled: there is nothing to record of it
  };

  std::span<const Entry> find(const pg_uuid_t &id) {
    const Entry *const end = entries_ + count_;
    const Entry *first = std::lower_bound(
        static_cast<const Entry *>(entries_), end, id,
        [](const Entry &e, const pg_uuid_t &wanted) { return compare_ids(e.id, wanted) < 0; });
    const Entry *last = first;
    while (last != end && compare_ids(last->id, id) == 0) ++last;
    if (first != last) return {first, last};
    if (unknown_left_-- > 0) return {};
    pg::raise(kEventNotInBatch, "Name events by the event_id that outbox_fetch returned with this batch.",
              "event %s is not in the batch",
              DatumGetCString(DirectFunctionCall1(uuid_out, UUIDPGetDatum(&id))));
  }

 private:
  const Batch &batch_;
  Entry *entries_;
  int32 count_ = 0;
  int32 unknown_left_;
};

pg_uuid_t event_id_of(const JsonbValue &name) {
  const auto id = parse_uuid({name.val.string.val, static_cast<size_t>(name.val.string.len)});
  if (!id)
    pg::raise(kInvalidParameter, "Name events by the event_id that outbox_fetch returned with this batch.",
              "invalid event id in the outcomes");
  pg_uuid_t uuid;
  memcpy(uuid.data, id->data(), id->size());
  return uuid;
}

}  // namespace

void check_outcomes(Jsonb *outcomes) {
  if (!JB_ROOT_IS_OBJECT(outcomes)) raise_bad_outcome();
}

Outcome *outcomes_of(Jsonb *outcomes, const BatchHandle &handle, const HandedOut &out) {
  const Batch &batch = out.batch;
  auto *result = static_cast<Outcome *>(palloc(sizeof(Outcome) * static_cast<Size>(batch.event_count + 1)));
  std::fill_n(result, batch.event_count, Outcome{Status::kDelivered, -1, nullptr});
  auto *named = static_cast<bool *>(palloc0(sizeof(bool) * static_cast<Size>(batch.event_count + 1)));
  Members members(handle, out);
  JsonbIterator *iterator = JsonbIteratorInit(&outcomes->root);
  JsonbValue value;
  pg_uuid_t id{};
  for (JsonbIteratorToken token; (token = JsonbIteratorNext(&iterator, &value, true)) != WJB_DONE;) {
    if (token == WJB_KEY) id = event_id_of(value);
    if (token != WJB_VALUE) continue;
    const Outcome outcome = outcome_of(value);
    for (const Members::Entry &event : members.find(id)) {
      if (event.index == Members::kSettled) continue;
      if (named[event.index])
        pg::raise(kInvalidParameter, "Name each event once.", "an event has two outcomes");
      named[event.index] = true;
      result[event.index] = outcome;
    }
  }
  return result;
}

}  // namespace retrysafe::outbox
