#include "outbox/retention.hpp"

#include "outbox/cursor.hpp"
#include "outbox/progress.hpp"
#include "outbox/shard.hpp"
#include "outbox/snapshot.hpp"
#include "pg/boundary.hpp"
#include "pg/index_scan.hpp"
#include "pg/statement.hpp"
#include "settings.hpp"

#include "pg/server.hpp"

namespace retrysafe::outbox {

namespace {

struct Shard {
  int32 destination, shard;
};

constinit pg::Statement select_shards{
    "SELECT destination, shard FROM @.outbox_shards ORDER BY destination, shard", {}};

// While the event itself is kept, its parked row tells when it was sent.
constinit pg::Statement delete_settled{
    "DELETE FROM @.outbox_parked WHERE ctid = ANY (ARRAY("
    " SELECT ctid FROM @.outbox_parked WHERE state IN ('delivered', 'discarded') AND settled_at < $1 AND id "
    "<= $2"
    " LIMIT $3))",
    {TIMESTAMPTZOID, INT8OID, INT4OID}};

TimestampTz cutoff() {
  return GetCurrentTimestamp() - static_cast<int64>(settings::outbox_retention) * USECS_PER_SEC;
}

Shard *all_shards(uint64 *count) {
  MemoryContext memory = CurrentMemoryContext;
  return pg::spi([&] {
    *count = select_shards.run({});
    auto *list = static_cast<Shard *>(MemoryContextAlloc(memory, (*count + 1) * sizeof(Shard)));
    for (uint64 i = 0; i < *count; ++i) list[i] = {pg::Row(i).int32_at(1), pg::Row(i).int32_at(2)};
    return list;
  });
}

// --- the log -----------------------------------------------------------------------------------------------

// Up to here a shard had recorded everything that was written, by a time.
int64 passed_position(const Shard &s, TimestampTz time) {
  BatchEnd batch;
  if (!last_batch_before(s.destination, s.shard, time, &batch)) return 0;
  const StoredWindow *window = load_window(s.destination, s.shard, batch.window_no);
  if (window && batch.position < window->snapshot.ceiling)
    window = load_window(s.destination, s.shard, batch.window_no - 1);
  return window ? window->snapshot.floor : 0;
}

bool is_delivered(const storage::SealedPiece &piece) {
  if (piece.sealed_at > cutoff()) return false;
  uint64 count;
  const Shard *shards = all_shards(&count);
  for (uint64 i = 0; i < count; ++i)
    if (passed_position(shards[i], cutoff()) < piece.sealed_position) return false;
  return true;
}

// --- progress ----------------------------------------------------------------------------------------------

// Copies the rows of a shard in this piece whose number is not below `first`.
void copy_forward(const Oid (&tables)[pg::kRingPieces], Oid index, int piece, const Shard &s, int64 first) {
  ScanKeyData keys[3];
  pg::int4_equals(&keys[0], 1, s.destination);
  pg::int4_equals(&keys[1], 2, s.shard);
  pg::int8_compares(&keys[2], 3, BTGreaterEqualStrategyNumber, F_INT8GE, first);
  Snapshot snapshot = RegisterSnapshot(GetLatestSnapshot());
  pg::IndexScan scan = pg::begin_scan(tables[piece], index, snapshot, keys, 3);
  while (scan.next()) {
    slot_getallattrs(scan.slot);
    storage::insert_into_ring(storage::RingName::kProgress, tables, scan.slot->tts_values,
                              scan.slot->tts_isnull);
  }
  scan.end();
  UnregisterSnapshot(snapshot);
}

// The first window that tells what the shard has done and has to do.
int64 first_needed_window(const Shard &s, int64 window_no) {
  const StoredWindow *window = load_window(s.destination, s.shard, window_no);
  while (window && window->resumed_at >= 0) window = load_window(s.destination, s.shard, --window_no);
  return window_no - 1;
}

// Nothing that the piece records is about an event that is still there. Where a shard stands goes on to the
// active piece.
bool is_history(const storage::SealedPiece &piece) {
  if (piece.sealed_position > storage::position_before_log() + 1) return false;
  const pg::Extension &e = pg::extension();
  uint64 count;
  const Shard *shards = all_shards(&count);
  for (uint64 i = 0; i < count; ++i) {
    const Shard &s = shards[i];
    ShardRow row;
    if (!pg::spi([&] { return lock_shard(s.destination, s.shard, true, &row); })) continue;
    const Cursor cursor = load_cursor(s.destination, s.shard);
    const int64 window = first_needed_window(s, cursor.window_no);
    copy_forward(e.outbox_windows_pieces, e.outbox_windows_pkey_pieces[piece.piece], piece.piece, s, window);
    copy_forward(e.outbox_batches_pieces, e.outbox_batches_pkey_pieces[piece.piece], piece.piece, s,
                 cursor.seq);
  }
  return true;
}

storage::RingKeeper keeper_of(storage::RingName ring) {
  const pg::Extension &e = pg::extension();
  const bool log = ring == storage::RingName::kLog;
  return {ring,
          log ? 1 : 2,
          {log ? &e.outbox_log_pieces : &e.outbox_windows_pieces, log ? nullptr : &e.outbox_batches_pieces},
          settings::rotation_age_us(settings::outbox_rotation_age, settings::outbox_retention),
          settings::rotation_bytes(settings::outbox_rotation_size),
          nullptr,
          log ? is_delivered : is_history};
}

}  // namespace

// Progress goes first: what it has sealed by the time when the log turns is about the older pieces of the log
// only.
storage::Turn turn_outbox_rings() {
  const storage::Turn progress = storage::turn(keeper_of(storage::RingName::kProgress));
  if (progress == storage::Turn::kDone) return progress;
  const storage::Turn log = storage::turn(keeper_of(storage::RingName::kLog));
  return log == storage::Turn::kNothing ? progress : log;
}

int64 remove_settled(int32 max_rows) {
  return pg::spi([&] {
    return static_cast<int64>(
        delete_settled.run({pg::value(TimestampTzGetDatum(cutoff())),
                            pg::value(storage::position_before_log()), pg::value(max_rows)}));
  });
}

}  // namespace retrysafe::outbox

using namespace retrysafe;

RETRYSAFE_SQL_FUNCTION(retrysafe_outbox_cleanup) {
  if (PG_ARGISNULL(0) || PG_GETARG_INT32(0) < 1)
    pg::raise(kInvalidParameter, "It must be at least 1.", "max_rows is out of range");
  pg::require_read_committed("outbox_cleanup");
  const int64 removed = outbox::remove_settled(PG_GETARG_INT32(0));
  const bool turned = outbox::turn_outbox_rings() == storage::Turn::kDone;
  PG_RETURN_INT64(removed + (turned ? 1 : 0));
}

// outbox_passed_position(destination, shard) → bigint
RETRYSAFE_SQL_FUNCTION(retrysafe_outbox_passed_position) {
  PG_RETURN_INT64(outbox::passed_position({PG_GETARG_INT32(0), PG_GETARG_INT32(1)}, DT_NOEND));
}
