// What became of a batch.
#include "outbox/record.hpp"

#include <algorithm>
#include <cstring>

#include "core/backoff.hpp"
#include "outbox/cursor.hpp"
#include "outbox/key_set.hpp"
#include "outbox/parked.hpp"
#include "outbox/snapshot.hpp"
#include "pg/error.hpp"
#include "pg/random.hpp"
#include "pg/statement.hpp"

#include "pg/server.hpp"

namespace retrysafe::outbox {

namespace {

constinit pg::Statement end_backoff{
    "UPDATE @.outbox_shards SET failures = 0, retry_at = NULL WHERE destination = $1 AND shard = $2",
    {INT4OID, INT4OID}};

constinit pg::Statement back_off{
    "UPDATE @.outbox_shards SET failures = $3, retry_at = $4, last_error = $5, error_at = clock_timestamp()"
    " WHERE destination = $1 AND shard = $2",
    {INT4OID, INT4OID, INT4OID, TIMESTAMPTZOID, TEXTOID}};

constinit pg::Statement set_error{
    "UPDATE @.outbox_shards SET last_error = $4, error_at = clock_timestamp()"
    " WHERE destination = $1 AND shard = $2 AND token = $3",
    {INT4OID, INT4OID, INT8OID, TEXTOID}};

struct Tally {
  int32 delivered = 0;
  int32 parked = 0;
  int64 position;  // that the cursor reaches
};

constexpr Outcome kAllDelivered{Status::kDelivered, -1, nullptr};

// The last event of the log of which it is known what became of it; -1: none.
int32 last_settled(const Batch &batch, const Outcome *outcomes) {
  int32 i = batch.event_count - 1;
  while (i >= 0 && (batch.events[i].parked || batch.events[i].held ||
                    (outcomes && outcomes[i].status == Status::kNotTried)))
    --i;
  return i;
}

Tally record_events(const Destination &d, const Batch &batch, const Outcome *outcomes, bool away) {
  const int32 shard = batch.claim.shard;
  KeySet touched(batch.event_count);  // needs a look at who is first in line now
  KeySet held(batch.event_count);     // later events of these keys wait
  KeySet failed(batch.event_count);   // the publisher may not have gone on with these
  const int32 last = away ? -1 : last_settled(batch, outcomes);
  Tally tally;
  tally.position = batch.to;

  for (int32 i = 0; i < batch.event_count; ++i) {
    const Event &event = batch.events[i];
    const Outcome &outcome = outcomes ? outcomes[i] : kAllDelivered;
    const bool final = outcome.status == Status::kFailedFinal;
    const bool has_failed = final || outcome.status == Status::kFailedRetry;
    FailedAttempt attempt{final, 0, outcome.reason};
    if (has_failed) attempt.wait_us = std::max(outcome.retry_after_us, backoff_of(d, event));

    if (event.parked) {
      if (outcome.status == Status::kDelivered) {
        settle_delivered(d.destination, shard, event.id);
        touched.add(event.ordering_key);
        ++tally.delivered;
      } else if (has_failed && !held.has(event.ordering_key)) {
        if (fail_again(d, shard, event, attempt)) held.add(event.ordering_key);
        touched.add(event.ordering_key);
      }
      continue;
    }

    if (!event.held && outcome.status == Status::kDelivered) {
      ++tally.delivered;
    } else if (event.held || held.has(event.ordering_key) ||
               (!has_failed && failed.has(event.ordering_key))) {
      park_blocked(d.destination, shard, event);
      touched.add(event.ordering_key);
      ++tally.parked;
    } else if (has_failed) {
      if (park_failed(d, shard, event, attempt)) held.add(event.ordering_key);
      failed.add(event.ordering_key);
      touched.add(event.ordering_key);
      ++tally.parked;
    } else if (i < last) {
      // Progress is a position and knows no holes: what was delivered behind this one would come again.
      park_untried(d.destination, shard, event);
      held.add(event.ordering_key);
      touched.add(event.ordering_key);
      ++tally.parked;
    } else {
      tally.position = event.id - 1;
      break;
    }
  }
  for (int32 i = 0; i < touched.count(); ++i) restore_head(d, shard, touched.at(i));
  // Those behind the position are counted when it gets past them.
  for (int32 i = 0; i < batch.already_parked_count; ++i) {
    const int64 id = batch.already_parked[i].id;
    tally.parked += id > batch.from && id <= tally.position;
  }
  return tally;
}

// It may have been altered since the batch was read. Who changes whether dead events hold back others takes
// the locks of all shards, and then settles who waits: under the lock of one of them either we see the
// change, or it sees what we have parked.
const Destination *as_it_is_now(const Destination &d, const Claim &claim) {
  if (is_current(d)) return &d;
  const Destination *altered = load_destination(d.destination);
  if (!altered) raise_stale(claim);
  return altered;
}

}  // namespace

int32 record_locked(const Destination &d, const Batch &batch, const Outcome *outcomes, bool away,
                    const ShardRow &row) {
  const Cursor cursor = load_cursor(d.destination, batch.claim.shard);
  if (cursor.seq != batch.seq) raise_stale(batch.claim);
  const Tally tally = record_events(d, batch, outcomes, away);

  // A window that took over what another one had left is opened at each attempt, and stored when it has
  // brought something: else an outage would leave one row behind another.
  const bool brought = tally.delivered > 0 || tally.parked > 0 || tally.position == batch.to;
  if (batch.resumed_at >= 0 && !brought) return 0;
  const bool moved = tally.position > batch.from;
  if (!moved && tally.delivered == 0 && tally.parked == 0) return 0;
  if (moved && batch.opens_window) store_window(batch);
  store_batch({d.destination, batch.claim.shard, cursor.seq + 1, moved ? batch.window_no : cursor.window_no,
               moved ? tally.position : cursor.position, row.token, tally.delivered, tally.parked,
               cursor.total_delivered + tally.delivered, cursor.total_parked + tally.parked});
  if (tally.delivered > 0 && row.failures > 0)
    end_backoff.run({pg::value(d.destination), pg::value(batch.claim.shard)});
  return tally.delivered;
}

void record(const Destination &d, Batch *batch, const Outcome *outcomes, bool away) {
  pg::spi([&] {
    ShardRow row;
    if (!lock_shard(d.destination, batch->claim.shard, true, &row) ||
        !is_valid(row, batch->claim, GetCurrentTimestamp()))
      raise_stale(batch->claim);
    record_locked(*as_it_is_now(d, batch->claim), *batch, outcomes, away, row);
  });
}

TimestampTz record_unreachable(const Destination &d, const Claim &claim, const char *reason,
                               int64 retry_after_us) {
  return pg::spi([&] {
    ShardRow row;
    if (!lock_shard(d.destination, claim.shard, true, &row) || !is_valid(row, claim, GetCurrentTimestamp()))
      raise_stale(claim);
    const int32 failures = row.failures == PG_INT32_MAX ? row.failures : row.failures + 1;
    const int64 wait = backoff(d.backoff_us, d.backoff_max_us, failures, pg::random_uint32());
    const TimestampTz retry_at = GetCurrentTimestamp() + std::max(wait, retry_after_us);
    back_off.run({pg::value(d.destination), pg::value(claim.shard), pg::value(failures),
                  pg::value(TimestampTzGetDatum(retry_at)), pg::value(reason)});
    return retry_at;
  });
}

void record_error(const Claim &claim, const char *error) {
  pg::spi([&] {
    set_error.run(
        {pg::value(claim.destination), pg::value(claim.shard), pg::value(claim.token), pg::value(error)});
  });
}

}  // namespace retrysafe::outbox
