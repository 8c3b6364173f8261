// outbox_fetch: any client of the database can publish, in any language.
//
// The holder of a shard is a session. It keeps its lease from fetch to fetch, so that fetching writes no row.
#include "outbox/pull_fetch.hpp"

#include <algorithm>
#include <cstring>

#include "core/batch_handle.hpp"
#include "core/kinds/kinds.hpp"
#include "outbox/cursor.hpp"
#include "outbox/destinations.hpp"
#include "outbox/durability.hpp"
#include "outbox/emit.hpp"
#include "outbox/engine.hpp"
#include "outbox/key_set.hpp"
#include "outbox/parked.hpp"
#include "outbox/pull_arguments.hpp"
#include "outbox/record.hpp"
#include "outbox/shard.hpp"
#include "outbox/snapshot.hpp"
#include "pg/boundary.hpp"
#include "pg/error.hpp"
#include "pg/fault_point.hpp"
#include "pg/patience.hpp"
#include "pg/statement.hpp"
#include "pg/text.hpp"

#include "pg/server.hpp"

namespace retrysafe::outbox {

namespace {

constexpr int32 kMaxEvents = 10000;
constexpr long kStandbyPatienceMs = 100;
// What a fetch gets past without finding anything to hand out is kept with its commit. So it comes back
// before somebody loses patience with it, and the next one goes on from there.
constexpr int64 kMaxSearchUs = 500 * 1000;

constinit int32 last_destination = 0;
constinit int32 last_shard = 0;

struct Request {
  int32 max_events;
  int64 max_bytes;
  int64 lease_us;
  const char *session;
  TimestampTz search_until;
};

bool is_mine(const ShardRow &row, const Request &request, TimestampTz now) {
  return row.holder && row.lease_until > now && strcmp(row.holder, request.session) == 0;
}

bool may_work(const ShardRow &row, const Request &request, TimestampTz now) {
  return is_mine(row, request, now) || is_free(row, now);
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
    } else {
      *kept++ = event;
    }
  }
  for (int32 i = 0; i < keys.count(); ++i) restore_head(d, shard, keys.at(i));
  batch->event_count = static_cast<int32>(kept - batch->events);
}

enum class Secured { kYes, kReadAgain, kLost };

// Locks the row of the shard, and looks whether what was read still stands. What was read of a destination
// that has been altered meanwhile is lost: events that were emitted since must not go out as if nothing had
// changed, and nobody would look again at who waits behind a dead one.
Secured lock_as_read(const Destination &d, const Request &request, const ShardRow &known, const Batch &batch,
                     TimestampTz now, ShardRow *row) {
  if (!lock_shard(d.destination, known.shard, false, row)) return Secured::kLost;
  if (!may_work(*row, request, now)) return Secured::kLost;
  if (!is_current(d)) return Secured::kLost;  // under the lock, as record() does
  // Who had the shard in between may have opened a window of the same number, and a new era begins with one.
  const bool same_holder =
      row->token == known.token && is_mine(*row, request, now) == is_mine(known, request, now);
  const bool same_cursor = load_cursor(d.destination, known.shard).seq == batch.seq;
  return same_holder && same_cursor ? Secured::kYes : Secured::kReadAgain;
}

// A batch with nothing to hand out: its events, if there are any, wait behind earlier ones of their keys.
bool is_progress(const Batch &batch) {
  return std::all_of(batch.events, batch.events + batch.event_count,
                     [](const Event &event) { return event.held; });
}

// Stores the progress of such a batch, which parks its events. That takes no lease.
Secured record_progress(const Destination &d, const Request &request, const ShardRow &known,
                        const Batch &batch) {
  return pg::spi([&] {
    ShardRow row;
    const Secured locked = lock_as_read(d, request, known, batch, GetCurrentTimestamp(), &row);
    if (locked != Secured::kYes) return locked;
    record_locked(d, batch, nullptr, false, row);
    return Secured::kReadAgain;
  });
}

// Makes the lease and the window of a batch that was read fit to hand out. Under a live lease of this session
// with its window stored there is nothing to do, and nothing is written.
Secured secure(const Destination &d, const Request &request, const ShardRow &known, Batch *batch) {
  const TimestampTz now = GetCurrentTimestamp();
  const bool mine = is_mine(known, request, now);
  const bool renew = mine && renewal_is_due(known, request, now);
  const bool any_held = std::any_of(batch->events, batch->events + batch->event_count,
                                    [](const Event &event) { return event.held; });
  if (mine && !renew && !any_held && !batch->opens_window)
    return is_current(d) ? Secured::kYes : Secured::kLost;
  // What a crash must not take back, whatever the session says of its commits: who has the lease, and which
  // events are parked and therefore were not handed out. A window that is lost only makes its batch stale.
  if (!mine || renew || any_held) ForceSyncCommit();

  return pg::spi([&] {
    ShardRow row;
    const Secured locked = lock_as_read(d, request, known, *batch, now, &row);
    if (locked != Secured::kYes) return locked;
    if (!mine) {
      batch->claim = take_shard(d.destination, row, {request.session, 0}, now + request.lease_us);
      row.token = batch->claim.token;
    } else if (renew) {
      extend_lease(d.destination, batch->claim.shard, now + request.lease_us);
    }
    if (batch->opens_window) {
      store_window(*batch);
      batch->opens_window = false;
    }
    if (any_held) park_held(d, batch);
    return Secured::kYes;
  });
}

bool time_is_up(const Request &request) {
  return GetCurrentTimestamp() > request.search_until || RETRYSAFE_FAULT("fetch.time_is_up");
}

// The next batch of one shard; null when it has nothing, or none before the time is up, or is somebody
// else's.
Batch *fetch_shard(const Destination &d, const Request &request, ShardRow *row) {
  MemoryContext memory = CurrentMemoryContext;
  for (bool got_past_some = false;; got_past_some = true) {
    if (got_past_some && time_is_up(request)) {
      announce_at_commit();
      return nullptr;
    }
    const Claim claim{d.destination, row->shard, row->token, row->lease_until};
    Batch *batch = read_batch(d, claim, request.max_events, request.max_bytes);
    if (!batch) return nullptr;
    RETRYSAFE_FAULT_POINT("fetch.after_read");
    const Secured secured =
        is_progress(*batch) ? record_progress(d, request, *row, *batch) : secure(d, request, *row, batch);
    if (secured == Secured::kYes) return batch;
    if (secured == Secured::kLost) return nullptr;
    // The lease may be somebody else's by now.
    const bool there = pg::spi([&] {
      ShardRow *rows;
      const int32 count = list_shards(d.destination, memory, &rows);
      for (int32 i = 0; i < count; ++i)
        if (rows[i].shard == row->shard) {
          *row = rows[i];
          return may_work(*row, request, GetCurrentTimestamp());
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
        release({d.destination, rows[i].shard, rows[i].token, 0}, false);
        announce_at_commit();
        rows[i].holder = nullptr;
        let_go[i] = true;
        --mine;
        continue;
      }
      if (!may_work(rows[i], request, now)) continue;
      if (rows[i].retry_at > now) continue;  // the destination was unreachable a moment ago
      if (Batch *batch = fetch_shard(d, request, &rows[i])) return batch;
      if (n + 1 < count && time_is_up(request)) {
        fetch_next_behind(d.destination, i);
        announce_at_commit();
        return nullptr;
      }
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
  handle.token = batch.claim.token + first_token(batch.log, GetWALInsertionTimeLine());
  handle.window_no = batch.window_no;
  handle.from = batch.from;
  handle.to = batch.to;
  handle.check = batch.check;
  // A lease, a window, events parked: what this transaction has written goes with it, and so does the batch.
  if (TransactionIdIsValid(GetTopTransactionIdIfAny()))
    handle.transaction = U64FromFullTransactionId(GetCurrentFullTransactionId());
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

}  // namespace

void fetch_next_behind(int32 destination, int32 shard) noexcept {
  last_destination = destination;
  last_shard = shard;
}

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
  for (;;) {
    const Destination *d = load_destination(name);
    if (!d)
      pg::raise(kUnknownDestination, "Name a destination that outbox_create_destination made.",
                "destination \"%s\" does not exist", pg::shown_name(name));
    if (is_kind(d->kind, kinds::function))
      pg::raise(kNotFetchable, "Workers call its function inside the database.",
                "destination \"%s\" of kind \"function\" cannot be fetched from", name);
    if (d->lost) raise_lost(d->name);
    if (d->paused) return Datum{0};
    move_due_events_without_worker();
    request.search_until = pg::may_work_until(kMaxSearchUs);
    const Batch *batch = fetch(*d, request);
    if (batch) return_batch(*batch, reinterpret_cast<ReturnSetInfo *>(fcinfo->resultinfo));
    if (batch || is_current(*d)) return Datum{0};
  }
}
