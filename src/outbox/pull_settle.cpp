// What a client of the pull API does with a batch that it has: outbox_ack, outbox_nack, outbox_record; and
// with its lease: outbox_renew, outbox_release.
//
// What a fetch handed out, any session may acknowledge. One that is not the holder (behind a transaction
// pooler the next transaction may run anywhere) also gives the shard back, since nobody knows where the next
// fetch will run.
#include <cstring>

#include "core/batch_handle.hpp"
#include "outbox/emit.hpp"
#include "outbox/engine.hpp"
#include "outbox/handed_out.hpp"
#include "outbox/key_set.hpp"
#include "outbox/outcomes.hpp"
#include "outbox/parked.hpp"
#include "outbox/pull_arguments.hpp"
#include "outbox/pull_fetch.hpp"
#include "outbox/record.hpp"
#include "outbox/shard.hpp"
#include "pg/boundary.hpp"
#include "pg/error.hpp"
#include "pg/statement.hpp"

#include "pg/server.hpp"

namespace retrysafe::outbox {

namespace {

void give_back_unless_mine(const BatchHandle &handle, const ShardRow &row) {
  if (strcmp(row.holder, session_name("session")) == 0) return;
  free_shard(handle.destination, handle.shard);
  announce_at_commit();
}

}  // namespace

}  // namespace retrysafe::outbox

using namespace retrysafe;
using namespace retrysafe::outbox;

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
  if (all) fetch_next_behind(handle.destination, handle.shard);
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
  if (outcomes) check_outcomes(outcomes);
  const char *unreachable = PG_ARGISNULL(2) ? nullptr : clipped(text_to_cstring(PG_GETARG_TEXT_PP(2)));
  const int64 retry_after = retry_after_argument(fcinfo, 3);

  const TimestampTz retry_at = pg::spi([&]() -> TimestampTz {
    HandedOut out;
    find_handed_out(handle, &out);
    record_locked(*out.destination, out.batch, outcomes ? outcomes_of(outcomes, handle, out) : nullptr,
                  unreachable != nullptr, out.row);
    const TimestampTz rest =
        unreachable ? record_unreachable(*out.destination, out.batch.claim, unreachable, retry_after)
                    : DT_NOBEGIN;
    give_back_unless_mine(handle, out.row);
    return rest;
  });
  fetch_next_behind(handle.destination, handle.shard);
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
