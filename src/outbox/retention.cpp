#include "outbox/retention.hpp"

#include <algorithm>

#include "outbox/log_identity.hpp"
#include "outbox/progress.hpp"
#include "outbox/snapshot.hpp"
#include "pg/boundary.hpp"
#include "pg/statement.hpp"
#include "settings.hpp"

#include "pg/server.hpp"

namespace retrysafe::outbox {

namespace {

struct Shard {
  int32 destination, shard;
  int64 done_window;  // the last window that was all recorded before the cutoff
  int64 done_seq;     // and a batch that says so
};

// Rows of the log that every destination had before the cutoff: at or below `ceiling`, and of an earlier era
// or of a transaction below `xmin`. Rows that a snapshot sees besides (above its xmin) wait for a later turn.
struct Done {
  int64 ceiling;
  int64 first_id;
  uint64 xmin;
};

constinit pg::Statement select_shards{
    "SELECT destination, shard FROM @.outbox_shards ORDER BY destination, shard", {}};

// From the low end, so that a turn costs the same however long the log is.
constinit pg::Statement delete_log{
    "DELETE FROM @.outbox_log WHERE id = ANY (ARRAY("
    " SELECT id FROM (SELECT id, txid, created_at FROM @.outbox_log ORDER BY id LIMIT $5) AS oldest"
    " WHERE id <= $1 AND (id < $2 OR txid < $3) AND created_at < $4))",
    {INT8OID, INT8OID, XID8OID, TIMESTAMPTZOID, INT4OID}};

constinit pg::Statement first_kept_position{
    "SELECT coalesce((SELECT id FROM @.outbox_log ORDER BY id LIMIT 1), 9223372036854775807)", {}};

// Windows that brought none of the kept events. Ceilings grow with the number, so these are the lowest ones.
constinit pg::Statement delete_windows{
    "DELETE FROM @.outbox_windows WHERE destination = $1 AND shard = $2 AND window_no = ANY (ARRAY("
    " SELECT window_no FROM @.outbox_windows WHERE destination = $1 AND shard = $2 AND window_no < $3"
    " AND ceiling < $4 ORDER BY window_no LIMIT $5))",
    {INT4OID, INT4OID, INT8OID, INT8OID, INT4OID}};

constinit pg::Statement delete_batches{
    "DELETE FROM @.outbox_batches WHERE destination = $1 AND shard = $2 AND seq = ANY (ARRAY("
    " SELECT seq FROM (SELECT seq, window_no FROM @.outbox_batches WHERE destination = $1 AND shard = $2"
    " AND seq < $3 ORDER BY seq LIMIT $4) AS oldest"
    " WHERE window_no < (SELECT min(window_no) FROM @.outbox_windows WHERE destination = $1 AND shard = "
    "$2)))",
    {INT4OID, INT4OID, INT8OID, INT4OID}};

// While the event itself is kept, its parked row tells when it was sent.
constinit pg::Statement delete_settled{
    "DELETE FROM @.outbox_parked WHERE ctid = ANY (ARRAY("
    " SELECT ctid FROM @.outbox_parked WHERE state IN ('delivered', 'discarded') AND settled_at < $1 AND id "
    "< $2"
    " LIMIT $3))",
    {TIMESTAMPTZOID, INT8OID, INT4OID}};

// What the shard had done before the cutoff. False: nothing that this era can tell.
bool done_before(Shard *shard, TimestampTz cutoff, int32 era, Done *done) {
  BatchEnd batch;
  if (!last_batch_before(shard->destination, shard->shard, cutoff, &batch)) return false;
  const StoredWindow *window = load_window(shard->destination, shard->shard, batch.window_no);
  if (!window) return false;
  const bool complete = batch.position >= window->snapshot.ceiling;
  const int64 done_window = complete ? batch.window_no : batch.window_no - 1;
  if (!complete) window = load_window(shard->destination, shard->shard, done_window);
  if (!window || window->snapshot.era != era) return false;
  shard->done_seq = batch.seq;
  shard->done_window = done_window;
  done->ceiling = std::min(done->ceiling, window->snapshot.ceiling);
  done->first_id = std::min(done->first_id, window->snapshot.first_id);
  done->xmin = std::min(done->xmin, window->snapshot.xmin);
  return true;
}

Shard *all_shards(uint64 *count) {
  MemoryContext memory = CurrentMemoryContext;
  return pg::spi([&] {
    *count = select_shards.run({});
    auto *list = static_cast<Shard *>(MemoryContextAllocZero(memory, (*count + 1) * sizeof(Shard)));
    for (uint64 i = 0; i < *count; ++i) list[i] = {pg::Row(i).int32_at(1), pg::Row(i).int32_at(2), -1, -1};
    return list;
  });
}

}  // namespace

int64 remove_old_events(int32 max_rows) {
  const TimestampTz cutoff =
      GetCurrentTimestamp() - static_cast<int64>(settings::outbox_retention) * USECS_PER_SEC;
  Era era;
  const bool published = current_era(&era);
  uint64 shard_count;
  Shard *shards = all_shards(&shard_count);
  Done done{PG_INT64_MAX, PG_INT64_MAX, PG_UINT64_MAX};
  bool all_told = true;
  for (uint64 i = 0; i < shard_count; ++i)
    all_told = published && done_before(&shards[i], cutoff, era.era, &done) && all_told;

  return pg::spi([&] {
    uint64 removed = 0;
    if (all_told)
      removed += delete_log.run({pg::value(done.ceiling), pg::value(done.first_id),
                                 pg::value(UInt64GetDatum(done.xmin)), pg::value(TimestampTzGetDatum(cutoff)),
                                 pg::value(max_rows)});
    first_kept_position.run({});
    const int64 first_kept = pg::Row(0).int64_at(1);
    for (uint64 i = 0; i < shard_count; ++i) {
      const Shard &s = shards[i];
      if (s.done_seq < 0) continue;
      removed += delete_windows.run({pg::value(s.destination), pg::value(s.shard), pg::value(s.done_window),
                                     pg::value(first_kept), pg::value(max_rows)});
      removed += delete_batches.run(
          {pg::value(s.destination), pg::value(s.shard), pg::value(s.done_seq), pg::value(max_rows)});
    }
    removed += delete_settled.run(
        {pg::value(TimestampTzGetDatum(cutoff)), pg::value(first_kept), pg::value(max_rows)});
    return static_cast<int64>(removed);
  });
}

}  // namespace retrysafe::outbox

using namespace retrysafe;

RETRYSAFE_SQL_FUNCTION(retrysafe_outbox_cleanup) {
  if (PG_ARGISNULL(0) || PG_GETARG_INT32(0) < 1)
    pg::raise(kInvalidParameter, "It must be at least 1.", "max_rows is out of range");
  pg::require_read_committed("outbox_cleanup");
  PG_RETURN_INT64(outbox::remove_old_events(PG_GETARG_INT32(0)));
}
