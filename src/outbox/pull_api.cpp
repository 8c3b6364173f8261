// The pull API: outbox_fetch, outbox_ack, outbox_nack, outbox_record and what goes with them. Any client of
// the database can publish with it, in any language.
//
// The holder of a shard is a session. It keeps its lease from fetch to fetch, so that fetching writes no row;
// what a fetch handed out, any session may acknowledge. One that is not the holder (behind a transaction
// pooler the next transaction may run anywhere) also gives the shard back, since nobody knows where the next
// fetch will run.
#include <algorithm>
#include <cstring>
#include <span>
#include <string_view>

#include "core/batch_handle.hpp"
#include "core/event_id.hpp"
#include "core/kinds/kinds.hpp"
#include "outbox/cursor.hpp"
#include "outbox/destinations.hpp"
#include "outbox/durability.hpp"
#include "outbox/emit.hpp"
#include "outbox/engine.hpp"
#include "outbox/key_set.hpp"
#include "outbox/parked.hpp"
#include "outbox/range.hpp"
#include "outbox/record.hpp"
#include "outbox/shard.hpp"
#include "outbox/snapshot.hpp"
#include "outbox/window.hpp"
#include "pg/boundary.hpp"
#include "pg/error.hpp"
#include "pg/statement.hpp"
#include "pg/text.hpp"

#include "pg/server.hpp"

namespace retrysafe::outbox {

namespace {

constexpr int64 kMillisecond = 1000;
constexpr int64 kDay = 24 * 3600 * 1000 * kMillisecond;
constexpr int32 kMaxEvents = 10000;
constexpr int kMaxReason = 1000;
constexpr long kStandbyPatienceMs = 100;

// Where the session's next fetch begins to look: behind the shard that it acknowledged last, so that a busy
// shard does not starve the others.
constinit int32 last_destination = 0;
constinit int32 last_shard = 0;

// --- arguments ---------------------------------------------------------------------------------------------

void check_transaction(const char *function) {
  PreventCommandIfReadOnly(function);
  PreventCommandIfParallelMode(function);
  pg::require_read_committed(function);
}

int64 interval_us(const Interval *interval) {
  if (interval->month != 0 || interval->day < -1000 || interval->day > 1000) return PG_INT64_MAX;
  if (interval->time > 1000 * kDay || interval->time < -1000 * kDay) return PG_INT64_MAX;
  return interval->day * kDay + interval->time;
}

int64 lease_argument(FunctionCallInfo fcinfo, int number) {
  const int64 lease = PG_ARGISNULL(number) ? 0 : interval_us(PG_GETARG_INTERVAL_P(number));
  if (lease < 100 * kMillisecond || lease > kLongestLeaseUs)
    pg::raise(kInvalidParameter, "It must be between 100 milliseconds and one day.", "invalid lease");
  return lease;
}

char *clipped(char *reason) {
  reason[pg_mbcliplen(reason, static_cast<int>(strlen(reason)), kMaxReason)] = '\0';
  return reason;
}

// -1: none was given.
int64 retry_after_argument(FunctionCallInfo fcinfo, int number) {
  if (PG_ARGISNULL(number)) return -1;
  const int64 retry_after = interval_us(PG_GETARG_INTERVAL_P(number));
  if (retry_after < 0 || retry_after > 366 * kDay)
    pg::raise(kInvalidParameter, "It must be between zero and 366 days.", "invalid retry_after");
  return retry_after;
}

BatchHandle handle_argument(FunctionCallInfo fcinfo, int number) {
  BatchHandle handle{};
  bool good = !PG_ARGISNULL(number);
  if (good) {
    const text *t = PG_GETARG_TEXT_PP(number);
    good = parse_handle({VARDATA_ANY(t), static_cast<size_t>(VARSIZE_ANY_EXHDR(t))}, &handle);
  }
  if (!good)
    pg::raise(kInvalidBatch, "Pass the value of column \"batch\" as outbox_fetch returned it.",
              "invalid batch");
  return handle;
}

Claim claim_of(const BatchHandle &handle) {
  return {handle.destination, handle.shard, handle.token, 0};
}

// --- fetch -------------------------------------------------------------------------------------------------

struct Request {
  int32 max_events;
  int64 max_bytes;
  int64 lease_us;
  const char *session;
};

bool is_mine(const ShardRow &row, const Request &request, TimestampTz now) {
  return row.holder && row.lease_until > now && strcmp(row.holder, request.session) == 0;
}

bool renewal_is_due(const ShardRow &row, const Request &request, TimestampTz now) {
  return row.lease_until - now <= request.lease_us / 2;
}

// Events that an earlier one of their key holds back are parked here and now: what a batch holds must be
// settled when it is handed out, whatever happens to the earlier event until it is acknowledged.
void park_held(const Destination &d, Batch *batch) {
  const int32 shard = batch->claim.shard;
  KeySet keys(batch->event_count);
  Event *kept = batch->events;
  for (int32 i = 0; i < batch->event_count; ++i) {
    const Event &event = batch->events[i];
    if (event.held) {
      park_blocked(d.destination, shard, event);
      keys.add(event.ordering_key);
      ++batch->already_parked;
    } else {
      *kept++ = event;
    }
  }
  for (int32 i = 0; i < keys.count(); ++i) restore_head(d, shard, keys.at(i));
  batch->event_count = static_cast<int32>(kept - batch->events);
}

enum class Secured { kYes, kReadAgain, kLost };

// Makes the lease and the window of a batch that was read fit to hand out. Under a live lease of this session
// with its window stored there is nothing to do, and nothing is written.
Secured secure(const Destination &d, const Request &request, const ShardRow &known, Batch *batch) {
  const TimestampTz now = GetCurrentTimestamp();
  const bool mine = is_mine(known, request, now);
  const bool renew = mine && renewal_is_due(known, request, now);
  const bool any_held = std::any_of(batch->events, batch->events + batch->event_count,
                                    [](const Event &event) { return event.held; });
  if (mine && !renew && !any_held && !batch->opens_window) return Secured::kYes;
  // What a crash must not take back, whatever the session says of its commits: who has the lease, and which
  // events are parked and therefore were not handed out. A window that is lost only makes its batch stale.
  if (!mine || renew || any_held) ForceSyncCommit();

  return pg::spi([&] {
    ShardRow row;
    if (!lock_shard(d.destination, batch->claim.shard, false, &row)) return Secured::kLost;
    const bool still_good = mine ? row.token == known.token && is_mine(row, request, now) : is_free(row, now);
    if (!still_good) return Secured::kLost;
    if (load_cursor(d.destination, batch->claim.shard).seq != batch->seq) return Secured::kReadAgain;
    if (!mine) {
      batch->claim = take_shard(d.destination, row, {request.session, 0}, now + request.lease_us);
      row.token = batch->claim.token;
    } else if (renew) {
      extend_lease(d.destination, batch->claim.shard, now + request.lease_us);
    }
    if (batch->opens_window) {
      store_window(d.destination, batch->claim.shard, batch->window_no, batch->window, -1);
      batch->opens_window = false;
    }
    if (any_held) park_held(d, batch);
    if (batch->event_count > 0) return Secured::kYes;
    if (!is_current(d)) return Secured::kLost;
    record_locked(d, *batch, nullptr, false, row);
    return Secured::kReadAgain;
  });
}

// The next batch of one shard; null when it has nothing, or is somebody else's.
Batch *fetch_shard(const Destination &d, const Request &request, ShardRow *row) {
  MemoryContext memory = CurrentMemoryContext;
  for (;;) {
    const Claim claim{d.destination, row->shard, row->token, row->lease_until};
    Batch *batch = read_batch(d, claim, request.max_events, request.max_bytes);
    if (!batch) return nullptr;
    if (batch->event_count == 0) {
      if (!record_progress(d, *batch)) return nullptr;
      continue;
    }
    switch (secure(d, request, *row, batch)) {
      case Secured::kYes:
        return batch;
      case Secured::kLost:
        return nullptr;
      case Secured::kReadAgain:
        break;
    }
    // The lease may be ours by now.
    const bool there = pg::spi([&] {
      ShardRow *rows;
      const int32 count = list_shards(d.destination, memory, &rows);
      for (int32 i = 0; i < count; ++i)
        if (rows[i].shard == row->shard) {
          *row = rows[i];
          return true;
        }
      return false;
    });
    if (!there) return nullptr;
  }
}

// Goes round the shards that are this session's or free. One that holds several lets each go when its renewal
// is due, for others to take; it takes it again itself only when it finds nothing else.
Batch *fetch_once(const Destination &d, const Request &request) {
  MemoryContext memory = CurrentMemoryContext;
  ShardRow *rows;
  const int32 count = pg::spi([&] { return list_shards(d.destination, memory, &rows); });
  if (count == 0) return nullptr;
  const TimestampTz now = GetCurrentTimestamp();
  int32 mine = 0;
  for (int32 i = 0; i < count; ++i) mine += is_mine(rows[i], request, now);
  auto *let_go = static_cast<bool *>(palloc0(sizeof(bool) * count));
  const int32 start = d.destination == last_destination ? last_shard + 1 : 0;

  for (const bool second_round : {false, true})
    for (int32 n = 0; n < count; ++n) {
      const int32 i = (start + n) % count;
      if (second_round != let_go[i]) continue;
      if (!second_round && mine > 1 && is_mine(rows[i], request, now) &&
          renewal_is_due(rows[i], request, now)) {
        release({d.destination, rows[i].shard, rows[i].token, 0});
        announce_at_commit();
        rows[i].holder = nullptr;
        let_go[i] = true;
        --mine;
        continue;
      }
      if (!is_mine(rows[i], request, now) && !is_free(rows[i], now)) continue;
      if (rows[i].retry_at > now) continue;  // the destination was unreachable a moment ago
      if (Batch *batch = fetch_shard(d, request, &rows[i])) return batch;
    }
  return nullptr;
}

// Standbys that keep up are a moment behind: it is not worth a fetch without events.
Batch *fetch(const Destination &d, const Request &request) {
  Batch *batch = fetch_once(d, request);
  if (!batch && let_standby_catch_up(d.destination, kStandbyPatienceMs)) batch = fetch_once(d, request);
  return batch;
}

Datum nullable_text(const char *string, bool *null) {
  *null = string == nullptr;
  return string ? CStringGetTextDatum(string) : Datum{0};
}

Datum nullable_json(const char *string, bool *null) {
  *null = string == nullptr;
  return string ? DirectFunctionCall1(jsonb_in, CStringGetDatum(string)) : Datum{0};
}

void return_batch(const Batch &batch, ReturnSetInfo *result) {
  BatchHandle handle{};
  handle.destination = batch.claim.destination;
  handle.shard = batch.claim.shard;
  handle.token = batch.claim.token;
  handle.window_no = batch.window_no;
  handle.from = batch.from;
  handle.to = batch.to;
  handle.check = batch.check;
  for (int32 i = 0; i < batch.event_count && batch.events[i].parked; ++i)
    handle.parked[handle.parked_count++] = {batch.events[i].id, batch.events[i].turn};
  char name[BatchHandle::kMaxLength];
  format_handle(handle, name);
  const Datum batch_name = CStringGetTextDatum(name);

  for (int32 i = 0; i < batch.event_count; ++i) {
    Event &event = batch.events[i];
    Datum values[12];
    bool nulls[12]{};
    values[0] = batch_name;
    values[1] = UUIDPGetDatum(&event.event_id);
    values[2] = Int64GetDatum(event.id);
    values[3] = Int32GetDatum(event.attempts + 1);
    values[4] = nullable_text(event.event_type, &nulls[4]);
    values[5] = nullable_text(event.event_key, &nulls[5]);
    values[6] = nullable_text(event.scope, &nulls[6]);
    values[7] = nullable_text(event.ordering_key, &nulls[7]);
    values[8] = nullable_text(event.idempotency_key, &nulls[8]);
    values[9] = nullable_json(event.payload, &nulls[9]);
    values[10] = nullable_json(event.headers, &nulls[10]);
    values[11] = TimestampTzGetDatum(event.created_at);
    tuplestore_putvalues(result->setResult, result->setDesc, values, nulls);
  }
}

// --- ack and nack ------------------------------------------------------------------------------------------

// A batch that was handed out, found again under the lock of its shard row.
struct HandedOut {
  Destination *destination;
  ShardRow row;
  Batch batch;  // what of it is not recorded yet; its parked events come first
  Range range;  // its part of the log
};

// The events of the log part that were parked since, among those that are not recorded yet.
int32 parked_in(const Range &range, int64 after, int64 up_to) {
  return static_cast<int32>(std::count_if(range.parked, range.parked + range.parked_count,
                                          [&](const Event &e) { return e.id > after && e.id <= up_to; }));
}

void lock_handed_out(const BatchHandle &handle, HandedOut *out) {
  const Claim claim = claim_of(handle);
  if (!lock_shard(handle.destination, handle.shard, true, &out->row) ||
      !is_valid(out->row, claim, GetCurrentTimestamp()))
    raise_stale(claim);
}

// The log part: the same stretch of the same window, read again. Its events must be the ones that were handed
// out; the event types of a destination may have been changed since.
void find_log_part(const BatchHandle &handle, const Cursor &cursor, const Uuid &log, HandedOut *out) {
  Batch &batch = out->batch;
  const bool same_window = cursor.window_no == handle.window_no;
  batch.window_no = cursor.window_no;
  batch.from = batch.to = cursor.position;
  if (cursor.window_no > handle.window_no || (same_window && cursor.position >= handle.to)) return;
  OpenWindow open;
  const bool known = load_open_window(handle.destination, handle.shard, handle.window_no, &open);
  if (!known && handle.window_no == cursor.window_no + 1)
    pg::raise(kStaleBatch, "Fetch again: its events come again.",
              "the batch was lost when the server crashed, since its session does not wait for commits");
  if (!known || (same_window && cursor.position < handle.from) || handle.to > open.window.now->ceiling)
    pg::raise(kInvalidBatch, "Pass the value of column \"batch\" as outbox_fetch returned it.",
              "invalid batch");
  open.position = handle.from;
  const Limits limits{PG_INT32_MAX, PG_INT64_MAX, PG_INT64_MAX, false, false};
  Range &range = out->range;
  range = read_range(*out->destination, handle.shard, open, handle.to, log, limits);
  if (range.check != handle.check)
    pg::raise(kStaleBatch, "Fetch again: its events come again.",
              "the events of the batch changed with its destination since it was fetched");
  batch.window_no = handle.window_no;
  batch.from = same_window ? cursor.position : handle.from;
  batch.to = handle.to;
  batch.already_parked = parked_in(range, batch.from, batch.to);
  batch.events = static_cast<Event *>(
      repalloc(batch.events, sizeof(Event) * static_cast<Size>(batch.event_count + range.count + 1)));
  for (int32 i = 0; i < range.count; ++i)
    if (range.events[i].id > batch.from) batch.events[batch.event_count++] = range.events[i];
}

// Parked events: those that did not fail again and were not given back meanwhile.
void find_parked_part(const BatchHandle &handle, const Uuid &log, HandedOut *out) {
  Batch &batch = out->batch;
  batch.events = static_cast<Event *>(palloc(sizeof(Event) * static_cast<Size>(handle.parked_count + 1)));
  for (int i = 0; i < handle.parked_count; ++i) {
    Event event;
    if (read_waiting(handle.destination, handle.shard, log, handle.parked[i].id, &event) &&
        event.turn == handle.parked[i].turn)
      batch.events[batch.event_count++] = event;
  }
}

void find_handed_out(const BatchHandle &handle, HandedOut *out) {
  const Claim claim = claim_of(handle);
  lock_handed_out(handle, out);
  out->destination = load_destination(handle.destination);
  Era era;
  if (!out->destination || !current_era(&era)) raise_stale(claim);
  const Cursor cursor = load_cursor(handle.destination, handle.shard);
  out->batch = Batch{};
  out->range = Range{};
  out->batch.claim = claim;
  out->batch.seq = cursor.seq;
  find_parked_part(handle, era.log, out);
  find_log_part(handle, cursor, era.log, out);
}

// Cuts a batch behind the event with that position, which may be settled already. False: all up to there is
// recorded.
bool cut_behind(const BatchHandle &handle, int64 up_to, HandedOut *out) {
  Batch *batch = &out->batch;
  const ParkedItem *const end = handle.parked + handle.parked_count;
  const bool is_parked =
      std::any_of(handle.parked, end, [&](const ParkedItem &item) { return item.id == up_to; });
  const auto drop_behind = [&](auto keep) {
    Event *kept = std::remove_if(batch->events, batch->events + batch->event_count,
                                 [&](const Event &event) { return !keep(event); });
    batch->event_count = static_cast<int32>(kept - batch->events);
  };
  if (is_parked) {
    // The parked ones come first: nothing of the log is acknowledged.
    batch->to = batch->from;
    batch->already_parked = 0;
    drop_behind([&](const Event &event) {
      if (!event.parked) return false;
      for (const ParkedItem *item = handle.parked; item != end; ++item) {
        if (item->id == event.id) return true;
        if (item->id == up_to) return false;
      }
      return false;
    });
    return batch->event_count > 0;
  }
  if (up_to > handle.from && up_to <= batch->from) {
    drop_behind([](const Event &event) { return event.parked; });
    batch->to = batch->from;
    batch->already_parked = 0;
    return batch->event_count > 0;
  }
  bool in_batch = std::any_of(batch->events, batch->events + batch->event_count,
                              [&](const Event &event) { return event.id == up_to; });
  in_batch = in_batch || parked_in(out->range, up_to - 1, up_to) == 1;
  if (!in_batch)
    pg::raise(kEventNotInBatch, "Pass the id of an event that outbox_fetch returned with this batch.",
              "event " INT64_FORMAT " is not in the batch", up_to);
  batch->to = up_to;
  batch->already_parked = parked_in(out->range, batch->from, up_to);
  drop_behind([&](const Event &event) { return event.parked || event.id <= up_to; });
  return true;
}

void give_back_unless_mine(const BatchHandle &handle, const ShardRow &row) {
  if (strcmp(row.holder, session_name("session")) == 0) return;
  free_shard(handle.destination, handle.shard);
  announce_at_commit();
}

// --- record ------------------------------------------------------------------------------------------------

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
  constexpr int64 kMost = 366 * kDay / kMillisecond;
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

int compare_ids(const pg_uuid_t &a, const pg_uuid_t &b) {
  return memcmp(&a, &b, sizeof a);
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

// Whether several events of a batch have that id, as far as it is known of those that were parked since. Then
// it may be named again: whoever does so means another one.
bool comes_twice(const HandedOut &out, const pg_uuid_t &id) {
  const Range &range = out.range;
  return std::count_if(range.parked, range.parked + range.parked_count,
                       [&](const Event &event) { return compare_ids(event.event_id, id) == 0; }) > 1;
}

pg_uuid_t event_id_of(const JsonbValue &name) {
  const auto id = parse_uuid({name.val.string.val, static_cast<size_t>(name.val.string.len)});
  if (!id)
    pg::raise(kInvalidParameter, "Name events by the event_id that outbox_fetch returned with this batch.",
              "invalid event id in the outcomes");
  pg_uuid_t uuid;
  memcpy(uuid.data, id->data(), id->size());
  return uuid;
}

// An event without an outcome was delivered.
Outcome *outcomes_of(Jsonb *outcomes, const BatchHandle &handle, const HandedOut &out) {
  if (!outcomes) return nullptr;
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

}  // namespace

}  // namespace retrysafe::outbox

using namespace retrysafe;
using namespace retrysafe::outbox;

RETRYSAFE_SQL_FUNCTION(retrysafe_outbox_fetch) {
  InitMaterializedSRF(fcinfo, 0);
  check_transaction("outbox_fetch()");
  if (PG_ARGISNULL(0))
    pg::raise(kUnknownDestination, "Name a destination that outbox_create_destination made.",
              "the name of the destination must not be null");
  Request request;
  request.max_events = PG_ARGISNULL(1) ? 0 : PG_GETARG_INT32(1);
  if (request.max_events < 1 || request.max_events > kMaxEvents)
    pg::raise(kInvalidParameter, "It must be between 1 and 10000.", "invalid max_events");
  request.max_bytes = PG_ARGISNULL(2) ? 0 : PG_GETARG_INT32(2);
  if (request.max_bytes < 1)
    pg::raise(kInvalidParameter, "It must be at least 1; a single event may be larger.", "invalid max_bytes");
  request.lease_us = lease_argument(fcinfo, 3);
  request.session = session_name("session");
  if (transaction_has_emitted())
    pg::raise(kFetchAfterEmit, "Commit first, and fetch in a transaction of its own.",
              "outbox_fetch cannot run in a transaction that has emitted events");
  if (const char *why; publishing_suspended(&why))
    pg::raise_detailed(kPublishingSuspended, why, "See outbox_consent.", "publishing is suspended");

  const char *name = text_to_cstring(PG_GETARG_TEXT_PP(0));
  const Destination *d = load_destination(name);
  if (!d)
    pg::raise(kUnknownDestination, "Name a destination that outbox_create_destination made.",
              "destination \"%s\" does not exist", pg::shown_name(name));
  if (is_kind(d->kind, kinds::function))
    pg::raise(kNotFetchable, "Workers call its function inside the database.",
              "destination \"%s\" of kind \"function\" cannot be fetched from", name);
  if (d->lost) raise_lost(d->name);
  if (d->paused) return Datum{0};
  move_due_events();
  if (const Batch *batch = fetch(*d, request))
    return_batch(*batch, reinterpret_cast<ReturnSetInfo *>(fcinfo->resultinfo));
  return Datum{0};
}

RETRYSAFE_SQL_FUNCTION(retrysafe_outbox_ack) {
  check_transaction("outbox_ack()");
  const BatchHandle handle = handle_argument(fcinfo, 0);
  const bool all = PG_ARGISNULL(1);
  const int64 up_to = all ? 0 : PG_GETARG_INT64(1);
  const int32 recorded = pg::spi([&] {
    HandedOut out;
    find_handed_out(handle, &out);
    int32 delivered = 0;
    if (all || cut_behind(handle, up_to, &out))
      delivered = record_locked(*out.destination, out.batch, nullptr, false, out.row);
    if (all) give_back_unless_mine(handle, out.row);
    return delivered;
  });
  if (all) {
    last_destination = handle.destination;
    last_shard = handle.shard;
  }
  PG_RETURN_INT64(recorded);
}

RETRYSAFE_SQL_FUNCTION(retrysafe_outbox_nack) {
  check_transaction("outbox_nack()");
  const BatchHandle handle = handle_argument(fcinfo, 0);
  if (PG_ARGISNULL(1))
    pg::raise(kEventNotInBatch, "Pass the event_id that outbox_fetch returned.",
              "the id of the event must not be null");
  const pg_uuid_t *event_id = PG_GETARG_UUID_P(1);
  const char *reason = PG_ARGISNULL(2) ? nullptr : clipped(text_to_cstring(PG_GETARG_TEXT_PP(2)));
  const int64 retry_after = retry_after_argument(fcinfo, 3);
  const bool dead = !PG_ARGISNULL(4) && PG_GETARG_BOOL(4);

  const int32 parked = pg::spi([&] {
    HandedOut out;
    find_handed_out(handle, &out);
    const Destination &d = *out.destination;
    // All that have the id: where a key was used again it does not tell which of them failed.
    KeySet keys(out.batch.event_count);
    int32 count = 0;
    for (int32 i = 0; i < out.batch.event_count; ++i) {
      const Event &event = out.batch.events[i];
      // What comes behind it in its key waits and comes again, though the client has it in hand: also when
      // the event is dead now and holds back nothing, since the client need not know the policy of the
      // destination.
      if (keys.has(event.ordering_key)) {
        if (event.parked)
          give_back(d.destination, handle.shard, event.id);
        else
          park_blocked(d.destination, handle.shard, event);
      } else if (compare_ids(event.event_id, *event_id) == 0) {
        // The client knows better than the back-off.
        const FailedAttempt attempt{dead, retry_after >= 0 ? retry_after : backoff_of(d, event), reason};
        if (event.parked)
          fail_again(d, handle.shard, event, attempt);
        else
          park_failed(d, handle.shard, event, attempt);
        keys.add(event.ordering_key);
      } else {
        continue;
      }
      ++count;
    }
    if (count == 0 && !comes_twice(out, *event_id))
      pg::raise(kEventNotInBatch, "It may have been acknowledged or given back before.",
                "the event is not in the batch");
    for (int32 i = 0; i < keys.count(); ++i) restore_head(d, handle.shard, keys.at(i));
    return count;
  });
  // If a crash took this back, a repeated acknowledgement of the batch would settle the event as well.
  ForceSyncCommit();
  PG_RETURN_INT64(parked);
}

// What a worker does with the outcomes of a batch: unlike single calls of outbox_nack it knows of the events
// of a key that were delivered behind a dead one, and ends at the first that was not tried.
RETRYSAFE_SQL_FUNCTION(retrysafe_outbox_record) {
  check_transaction("outbox_record()");
  const BatchHandle handle = handle_argument(fcinfo, 0);
  Jsonb *outcomes = PG_ARGISNULL(1) ? nullptr : PG_GETARG_JSONB_P(1);
  if (outcomes && !JB_ROOT_IS_OBJECT(outcomes)) raise_bad_outcome();
  const char *unreachable = PG_ARGISNULL(2) ? nullptr : clipped(text_to_cstring(PG_GETARG_TEXT_PP(2)));
  const int64 retry_after = retry_after_argument(fcinfo, 3);

  const TimestampTz retry_at = pg::spi([&]() -> TimestampTz {
    HandedOut out;
    find_handed_out(handle, &out);
    record_locked(*out.destination, out.batch, outcomes_of(outcomes, handle, out), unreachable != nullptr,
                  out.row);
    const TimestampTz rest =
        unreachable ? record_unreachable(*out.destination, out.batch.claim, unreachable, retry_after)
                    : DT_NOBEGIN;
    give_back_unless_mine(handle, out.row);
    return rest;
  });
  last_destination = handle.destination;
  last_shard = handle.shard;
  if (retry_at == DT_NOBEGIN) PG_RETURN_NULL();
  PG_RETURN_TIMESTAMPTZ(retry_at);
}

RETRYSAFE_SQL_FUNCTION(retrysafe_outbox_renew) {
  check_transaction("outbox_renew()");
  const BatchHandle handle = handle_argument(fcinfo, 0);
  const int64 lease = lease_argument(fcinfo, 1);
  const TimestampTz lease_until = pg::spi([&] {
    HandedOut out;
    lock_handed_out(handle, &out);
    const TimestampTz wanted = GetCurrentTimestamp() + lease;
    if (out.row.lease_until - (wanted - lease) > lease / 2) return out.row.lease_until;
    ForceSyncCommit();
    extend_lease(handle.destination, handle.shard, wanted);
    return wanted;
  });
  PG_RETURN_TIMESTAMPTZ(lease_until);
}

RETRYSAFE_SQL_FUNCTION(retrysafe_outbox_release) {
  check_transaction("outbox_release()");
  const BatchHandle handle = handle_argument(fcinfo, 0);
  pg::spi([&] {
    HandedOut out;
    lock_handed_out(handle, &out);
    free_shard(handle.destination, handle.shard);
  });
  announce_at_commit();
  PG_RETURN_VOID();
}
