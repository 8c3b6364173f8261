#include "outbox/handed_out.hpp"

#include <algorithm>
#include <cstring>

#include "outbox/cursor.hpp"
#include "outbox/destinations.hpp"
#include "outbox/parked.hpp"
#include "outbox/snapshot.hpp"
#include "outbox/window.hpp"
#include "pg/error.hpp"

#include "pg/server.hpp"

namespace retrysafe::outbox {

namespace {

Claim claim_of(const BatchHandle &handle, const Uuid &log) {
  return {handle.destination, handle.shard, handle.token - first_token(log, GetWALInsertionTimeLine()), 0};
}

// The log part: the same stretch of the same window, read again. Its events must be the ones that were handed
// out; the event types of a destination may have been changed since.
void find_log_part(const BatchHandle &handle, const Cursor &cursor, HandedOut *out) {
  Batch &batch = out->batch;
  const bool same_window = cursor.window_no == handle.window_no;
  batch.window_no = cursor.window_no;
  batch.from = batch.to = cursor.position;
  if (cursor.window_no > handle.window_no || (same_window && cursor.position >= handle.to)) return;
  OpenWindow open;
  const bool known = load_open_window(handle.destination, handle.shard, handle.window_no, &open);
  if (!known)
    pg::raise(kStaleBatch, "Fetch again: its events come again.",
              "the batch was lost when the server crashed, since its session does not wait for commits");
  if (handle.to > open.window.now->ceiling)
    pg::raise(kInvalidBatch, "Pass the value of column \"batch\" as outbox_fetch returned it.",
              "invalid batch");
  if (!same_window && !goes_on_from(open, cursor))
    pg::raise(kStaleBatch, "Fetch again: its events come again, but for those that were recorded.",
              "an earlier batch, with events of this one, was recorded since it was fetched");
  // What lies between may have been refused, and would be passed over.
  if (handle.from > (same_window ? cursor.position : open.position))
    pg::raise(kStaleBatch, "Fetch again: its events come again.",
              "what was recorded before the batch was fetched was lost when the server crashed, since its "
              "session does not wait for commits");
  open.position = handle.from;
  const Limits limits{PG_INT32_MAX, PG_INT64_MAX, PG_INT64_MAX, false, 0};
  Range &range = out->range;
  range = read_range(*out->destination, handle.shard, open, handle.to, batch.log, limits);
  if (range.check != handle.check)
    pg::raise(kStaleBatch, "Fetch again: its events come again.",
              "the events of the batch changed with its destination since it was fetched");
  batch.window_no = handle.window_no;
  batch.resumed_at = open.window.done->resumed_at();
  batch.from = same_window ? cursor.position : handle.from;
  batch.to = handle.to;
  batch.already_parked_count = range.parked_count;
  batch.already_parked = range.parked;
  batch.events = static_cast<Event *>(
      repalloc(batch.events, sizeof(Event) * static_cast<Size>(batch.event_count + range.count + 1)));
  for (int32 i = 0; i < range.count; ++i)
    if (range.events[i].id > batch.from) batch.events[batch.event_count++] = range.events[i];
}

// Parked events: those that did not fail again and were not given back meanwhile.
void find_parked_part(const BatchHandle &handle, HandedOut *out) {
  Batch &batch = out->batch;
  batch.events = static_cast<Event *>(palloc(sizeof(Event) * static_cast<Size>(handle.parked_count + 1)));
  for (int i = 0; i < handle.parked_count; ++i) {
    Event event;
    if (read_waiting(handle.destination, handle.shard, batch.log, handle.parked[i].id, &event) &&
        event.turn == handle.parked[i].turn)
      batch.events[batch.event_count++] = event;
  }
}

// Fencing tokens come again when the transaction that drew them is rolled back, and what a fetch had parked
// is not parked then: it would be recorded as delivered though it was never handed out.
bool has_not_committed(uint64 transaction) {
  const FullTransactionId id = FullTransactionIdFromU64(transaction);
  if (transaction == 0 || TransactionIdIsCurrentTransactionId(XidFromFullTransactionId(id))) return false;
  if (!FullTransactionIdPrecedes(id, ReadNextFullTransactionId())) return true;  // its WAL was lost
  LOCAL_FCINFO(call, 1);
  InitFunctionCallInfoData(*call, nullptr, 1, InvalidOid, nullptr, nullptr);
  call->args[0] = {FullTransactionIdGetDatum(id), false};
  const Datum status = pg_xact_status(call);
  return call->isnull || strcmp(TextDatumGetCString(status), "committed") != 0;
}

}  // namespace

void lock_handed_out(const BatchHandle &handle, HandedOut *out) {
  Era era{};
  const bool is_there = lock_shard(handle.destination, handle.shard, true, &out->row) && current_era(&era);
  out->batch = Batch{};
  out->batch.resumed_at = -1;
  out->batch.log = era.log;
  out->batch.claim = claim_of(handle, era.log);
  if (!is_there || !is_valid(out->row, out->batch.claim, GetCurrentTimestamp()))
    raise_stale(out->batch.claim);
  if (has_not_committed(handle.transaction))
    pg::raise(kStaleBatch, "Fetch again: its events come again. Commit before you publish.",
              "the transaction that fetched the batch has not committed");
}

void find_handed_out(const BatchHandle &handle, HandedOut *out) {
  lock_handed_out(handle, out);
  out->destination = load_destination(handle.destination);
  if (!out->destination) raise_stale(out->batch.claim);
  const Cursor cursor = load_cursor(handle.destination, handle.shard);
  out->range = Range{};
  out->batch.seq = cursor.seq;
  find_parked_part(handle, out);
  find_log_part(handle, cursor, out);
}

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
  const int64 recorded_to = batch->window_no == handle.window_no ? batch->from : handle.to;
  if (up_to > handle.from && up_to <= recorded_to) {
    drop_behind([](const Event &event) { return event.parked; });
    batch->to = batch->from;
    return batch->event_count > 0;
  }
  bool in_batch = std::any_of(batch->events, batch->events + batch->event_count,
                              [&](const Event &event) { return event.id == up_to; });
  in_batch =
      in_batch || std::any_of(batch->already_parked, batch->already_parked + batch->already_parked_count,
                              [&](const Event &event) { return event.id == up_to; });
  if (!in_batch)
    pg::raise(kEventNotInBatch, "Pass the id of an event that outbox_fetch returned with this batch.",
              "event " INT64_FORMAT " is not in the batch", up_to);
  batch->to = up_to;
  drop_behind([&](const Event &event) { return event.parked || event.id <= up_to; });
  return true;
}

bool comes_twice(const HandedOut &out, const pg_uuid_t &id) {
  const Range &range = out.range;
  return std::count_if(range.parked, range.parked + range.parked_count,
                       [&](const Event &event) { return compare_ids(event.event_id, id) == 0; }) > 1;
}

}  // namespace retrysafe::outbox
