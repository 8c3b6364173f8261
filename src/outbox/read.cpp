// The next batch of a shard.
#include <algorithm>
#include <cstring>

#include "core/batch_handle.hpp"
#include "core/dispatcher.hpp"
#include "core/routing.hpp"
#include "outbox/durability.hpp"
#include "outbox/engine.hpp"
#include "outbox/event_reading.hpp"
#include "outbox/log_columns.hpp"
#include "outbox/parked.hpp"
#include "outbox/range.hpp"
#include "outbox/scheduled.hpp"
#include "outbox/shard.hpp"
#include "outbox/snapshot.hpp"
#include "outbox/window.hpp"
#include "pg/fault_point.hpp"
#include "pg/random.hpp"
#include "pg/statement.hpp"

#include "pg/server.hpp"

namespace retrysafe::outbox {

namespace {

// Rows looked at in one transaction, events of other shards and of unwanted types included.
constexpr int64 kRowsPerRead = 20000;
// The same where others have to be found beside an event that may break its destination. It must not take
// longer than clients wait for a fetch.
constexpr int64 kRowsForCompany = 200000;

bool wanted(const Destination &d, std::string_view type) {
  if (d.type_count < 0) return true;
  for (int32 i = 0; i < d.type_count; ++i)
    if (type_matches(d.types[i], type)) return true;
  return false;
}

std::string_view view(Datum value) {
  const text *t = DatumGetTextPP(value);
  return {VARDATA_ANY(t), static_cast<size_t>(VARSIZE_ANY_EXHDR(t))};
}

// Decided before anything is copied out of the row.
bool belongs(const Destination &d, int32 shard, int64 id, TupleTableSlot *slot) {
  bool null;
  if (d.shards > 1) {
    const Datum key = slot_getattr(slot, log_column::kOrderingKey, &null);
    const auto shards = static_cast<uint32>(d.shards);
    if ((null ? shard_of(id, shards) : shard_of_key(view(key), shards)) != static_cast<uint32>(shard))
      return false;
  }
  return wanted(d, view(slot_getattr(slot, log_column::kEventType, &null)));
}

}  // namespace

Range read_range(const Destination &d, int32 shard, const OpenWindow &open, int64 up_to, const Uuid &log,
                 const Limits &limits) {
  Range range{};
  int32 capacity = std::min<int32>(limits.events, 64);
  range.events = static_cast<Event *>(palloc(sizeof(Event) * capacity));
  int64 bytes = 0;
  WindowScan scan;
  scan.begin(open.window, open.position, up_to, limits.rows);
  for (;;) {
    const WindowScan::Step step = scan.next();
    if (step != WindowScan::Step::kRow) {
      range.exhausted = step == WindowScan::Step::kEnd;
      range.to = scan.position();
      break;
    }
    if (!belongs(d, shard, scan.id(), scan.slot())) continue;
    Event event = read_event(scan.slot(), kLogColumns, log, limits.bodies);
    event.id = scan.id();
    bool null;
    event.txid = DatumGetUInt64(slot_getattr(scan.slot(), log_column::kTxid, &null));
    bytes += body_size(event);
    if (bytes > limits.bytes && range.count >= limits.at_least) {
      range.to = event.id - 1;
      break;
    }
    if (range.count == capacity) {
      capacity = std::min(2 * capacity, limits.events);
      range.events = static_cast<Event *>(repalloc(range.events, sizeof(Event) * capacity));
    }
    range.events[range.count++] = event;
    // The position alone would be that of another event after a failover that lost WAL.
    int64 id_head;
    memcpy(&id_head, &event.event_id, sizeof id_head);
    range.check = add_to_check(add_to_check(range.check, event.id), id_head);
    if (range.count == limits.events) {
      range.to = event.id;
      break;
    }
  }
  scan.end();

  // An earlier holder may have parked some before it lost the shard, and the position stayed behind.
  auto *parked = static_cast<bool *>(palloc0(sizeof(bool) * (range.count + 1)));
  const int32 parked_count = find_parked(d.destination, shard, range.events, range.count, parked);
  if (parked_count > 0) {
    range.parked = static_cast<Event *>(palloc(sizeof(Event) * parked_count));
    int32 kept = 0;
    for (int32 i = 0; i < range.count; ++i) {
      if (parked[i])
        range.parked[range.parked_count++] = range.events[i];
      else
        range.events[kept++] = range.events[i];
    }
    range.count = kept;
  }
  return range;
}

namespace {

bool was_away(const ShardKey &key) {
  return pg::spi([&] { return is_backing_off(key.destination, key.shard); });
}

// What is left of a window goes with what was committed since, where it did not get through alone. It may be
// an event that breaks the destination: that is only told where another one goes beside it.
bool goes_with_what_came_since(const ShardKey &key, const OpenWindow &open, const Range &range) {
  if (!open.stored || !range.exhausted || range.count == 0) return false;
  return RETRYSAFE_FAULT("reader.reopen_window") || was_away(key);
}

// A batch in which nothing of the log moves.
void only_parked(Batch *batch, const Cursor &cursor, Event *parked, int32 count) {
  batch->window_no = cursor.window_no;
  batch->opens_window = false;
  batch->from = batch->to = cursor.position;
  batch->check = 0;
  batch->event_count = count;
  batch->events = parked;
}

}  // namespace

Batch *read_batch(const Destination &d, const Claim &claim, int32 max_events, int64 max_bytes) {
  Era era;
  if (d.paused || !current_era(&era)) return nullptr;
  auto *batch = static_cast<Batch *>(palloc0(sizeof(Batch)));
  batch->claim = claim;
  batch->log = era.log;

  const Cursor cursor = load_cursor(claim.destination, claim.shard);
  batch->seq = cursor.seq;
  OpenWindow open = open_window(d, claim.shard, cursor, era);

  // At most half of a batch, so that a long queue of retries and the log do not starve each other. Where a
  // batch is one event, chance decides which of the two is looked at first.
  const bool log_first = max_events == 1 && (pg::random_uint32() & 1) != 0;
  const int32 parked_most = std::clamp<int32>(max_events / 2, 1, BatchHandle::kMaxParked);
  auto *parked = static_cast<Event *>(palloc(sizeof(Event) * parked_most));
  const auto read_parked = [&] {
    return read_due_parked(d, claim.shard, open, era.log, parked_most, max_bytes / 2, parked);
  };
  int32 parked_count = log_first ? 0 : read_parked();
  int64 bytes_left = max_bytes;
  for (int32 i = 0; i < parked_count; ++i) bytes_left -= body_size(parked[i]);

  const ShardKey key{claim.destination, claim.shard};
  // One event of the log at least, else a large one would wait until no retry is due.
  Limits limits{max_events - parked_count, bytes_left, kRowsPerRead, true, 1};
  if (limits.events == 0) {
    only_parked(batch, cursor, parked, parked_count);
    return batch;
  }
  // An event must not be alone with a destination that it breaks: nothing would tell it from an outage.
  const int32 company = std::min(Dispatcher::kCompany, limits.events);
  const auto read = [&](const OpenWindow &window) {
    Range range = read_range(d, claim.shard, window, PG_INT64_MAX, era.log, limits);
    if (range.exhausted || range.count >= company || limits.at_least == company || !was_away(key))
      return range;
    limits.at_least = company;
    limits.rows = kRowsForCompany;
    return read_range(d, claim.shard, window, PG_INT64_MAX, era.log, limits);
  };
  // Where the log has to wait, due parked events do not: they were published before.
  const auto without_log = [&]() -> Batch * {
    if (parked_count == 0) parked_count = read_parked();
    if (parked_count == 0) return nullptr;
    only_parked(batch, cursor, parked, parked_count);
    return batch;
  };
  for (;; open = open_window(d, claim.shard, cursor, era)) {
    if (is_kept_for_standby(key, open)) return without_log();
    Range range = read(open);
    if (goes_with_what_came_since(key, open, range)) {
      open = reopen_window(d, claim.shard, cursor, open, era);
      if (is_kept_for_standby(key, open)) return without_log();
      range = read(open);
    }
    const bool anything = range.count > 0 || range.parked_count > 0;
    if (!anything && range.exhausted) {
      pass_over(d, claim.shard, cursor, open);
      open.position = open.window.now->ceiling;
      if (open.stored) continue;  // what came after that window is still to be looked at
      if (without_log()) return batch;
      OpenWindow done;
      if (progress_is_due(d, claim.shard, cursor, &done)) {
        batch->window_no = done.window_no;
        batch->opens_window = !done.stored;
        batch->window = *done.window.now;
        batch->resumed_at = -1;
        batch->to = done.position;
      } else {
        return nullptr;
      }
    } else {
      batch->window_no = open.window_no;
      batch->opens_window = !open.stored;
      batch->window = *open.window.now;
      batch->resumed_at = open.window.done->resumed_at();
      batch->from = open.position;
      batch->to = range.to;
      batch->check = range.check;
      batch->already_parked_count = range.parked_count;
      batch->already_parked = range.parked;
    }
    batch->event_count = parked_count + range.count;
    batch->events = static_cast<Event *>(palloc(sizeof(Event) * std::max(batch->event_count, 1)));
    std::copy_n(parked, parked_count, batch->events);
    std::copy_n(range.events, range.count, batch->events + parked_count);
    break;
  }

  if (batch->event_count > parked_count && any_key_is_held(d, claim.shard))
    for (int32 i = parked_count; i < batch->event_count; ++i) {
      Event &event = batch->events[i];
      event.held = event.ordering_key && is_held(d, claim.shard, event.ordering_key, event.id);
    }
  // Nothing is published before its commit is durable. A stored window was flushed for when it was new.
  if (batch->opens_window && !RETRYSAFE_FAULT("reader.no_flush")) flush_wal();
  if (batch->event_count > parked_count && !may_publish(key, open)) return without_log();
  return batch;
}

TimestampTz next_due(const Claim *claims, int32 count) {
  TimestampTz due = next_scheduled_due();
  for (int32 i = 0; i < count; ++i)
    due = std::min(due, next_parked_due(claims[i].destination, claims[i].shard));
  return due;
}

TimestampTz next_chance(const int32 *destinations, int32 count, TimestampTz after) {
  TimestampTz chance = DT_NOEND;
  const auto consider = [&](TimestampTz time) {
    if (time > after) chance = std::min(chance, time);
  };
  MemoryContext memory = CurrentMemoryContext;
  for (int32 d = 0; d < count; ++d) {
    ShardRow *rows;
    const int32 shards = pg::spi([&] { return list_shards(destinations[d], memory, &rows); });
    for (int32 i = 0; i < shards; ++i) {
      consider(rows[i].retry_at);
      if (rows[i].holder) consider(rows[i].lease_until);
      consider(next_parked_due(destinations[d], rows[i].shard));
    }
  }
  // What was due before and is held tells nothing of what comes due behind it.
  consider(next_scheduled_due(after));
  const TimestampTz neglected = after == DT_NOBEGIN ? after : after - kWorkerPatienceUs;
  if (const TimestampTz due = next_scheduled_due(neglected); due != DT_NOEND)
    consider(due + kWorkerPatienceUs);
  return chance;
}

}  // namespace retrysafe::outbox
