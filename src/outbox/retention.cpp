#include "outbox/retention.hpp"

#include "outbox/cursor.hpp"
#include "outbox/emit.hpp"
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

// Also those that have no row, because somebody removed it: they keep what they have not had.
constinit pg::Statement select_shards{
    "SELECT destination, shard FROM @.outbox_destinations, generate_series(0, shards - 1) AS shard"
    " WHERE $1 OR lost_at IS NULL ORDER BY destination, shard",
    {BOOLOID}};

// Whoever is just altering it may be about to drop it. He is not waited for.
constinit pg::Statement update_lost{
    "UPDATE @.outbox_destinations SET paused = true, lost_at = clock_timestamp()"
    " WHERE destination = (SELECT destination FROM @.outbox_destinations"
    "                       WHERE destination = $1 AND lost_at IS NULL FOR UPDATE SKIP LOCKED) RETURNING "
    "name",
    {INT4OID}};

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

enum class Lost { kToo, kNot };

Shard *all_shards(Lost lost, uint64 *count) {
  MemoryContext memory = CurrentMemoryContext;
  return pg::spi([&] {
    *count = select_shards.run({pg::value(lost == Lost::kToo)});
    auto *list = static_cast<Shard *>(MemoryContextAlloc(memory, (*count + 1) * sizeof(Shard)));
    for (uint64 i = 0; i < *count; ++i) list[i] = {pg::Row(i).int32_at(1), pg::Row(i).int32_at(2)};
    return list;
  });
}

// The last window before this one that was read to its end before this one began. Windows that were left half
// read when an era ended are passed over: the rest of what they hold is in the next one.
int64 last_finished_window(const Shard &s, int64 window_no) {
  const StoredWindow *window = load_window(s.destination, s.shard, window_no);
  while (window && window->resumed_at >= 0) window = load_window(s.destination, s.shard, --window_no);
  return window_no - 1;
}

// --- the log -----------------------------------------------------------------------------------------------

// Up to here a shard had recorded everything that was written, by a time.
int64 passed_position(const Shard &s, TimestampTz time) {
  BatchEnd batch;
  if (!last_batch_before(s.destination, s.shard, time, &batch)) return 0;
  const StoredWindow *window = load_window(s.destination, s.shard, batch.window_no);
  if (window && batch.position < window->snapshot.ceiling)
    window = load_window(s.destination, s.shard, last_finished_window(s, batch.window_no));
  return window ? window->snapshot.floor : 0;
}

// The destination that is furthest behind, of those that keep the piece; 0: none does.
int32 worst_laggard(const storage::SealedPiece &piece, TimestampTz time) {
  uint64 count;
  const Shard *shards = all_shards(Lost::kNot, &count);
  int32 worst = 0;
  int64 lowest = piece.sealed_position;
  for (uint64 i = 0; i < count; ++i) {
    const int64 passed = passed_position(shards[i], time);
    if (passed >= lowest) continue;
    lowest = passed;
    worst = shards[i].destination;
  }
  return worst;
}

// Loudly: its events are not delivered any more, and those that are removed never will be.
void give_up(int32 destination) {
  pg::spi([&] {
    if (update_lost.run({pg::value(destination)}) == 0) return;
    pg::log_with_hint("Drop it and create it again, or raise retrysafe.max_retained_bytes.",
                      "destination \"%s\" is lost: because of it the log grew beyond "
                      "retrysafe.max_retained_bytes (%d MB)",
                      pg::Row(0).text_at(1, CurrentMemoryContext), settings::max_retained_bytes);
  });
  announce_at_commit();
}

// Who has had everything has to look once more, to say so.
constexpr int64 kPatienceUs = USECS_PER_MINUTE;

storage::Turn release_log(const storage::SealedPiece &piece) {
  const TimestampTz time = cutoff();
  if (piece.sealed_at > time) return storage::Turn::kNothing;
  // Only where nothing but a destination keeps it: giving one up would not make the log smaller otherwise.
  if (settings::max_retained_bytes > 0 && piece.sealed_at <= GetCurrentTimestamp() - kPatienceUs &&
      storage::bytes_in_use(storage::RingName::kLog) > int64{settings::max_retained_bytes} << 20)
    if (const int32 laggard = worst_laggard(piece, DT_NOEND)) give_up(laggard);
  return worst_laggard(piece, time) == 0 ? storage::Turn::kDone : storage::Turn::kNothing;
}

// --- progress ----------------------------------------------------------------------------------------------

// Copies the rows of a shard in this piece whose number is not below `first`. An earlier attempt to retire
// the piece may have copied them already.
void copy_forward(const Oid (&tables)[pg::kRingPieces], const Oid (&indexes)[pg::kRingPieces], int piece,
                  const Shard &s, int64 first) {
  ScanKeyData keys[3];
  pg::int4_equals(&keys[0], 1, s.destination);
  pg::int4_equals(&keys[1], 2, s.shard);
  pg::int8_compares(&keys[2], 3, BTGreaterEqualStrategyNumber, F_INT8GE, first);
  Snapshot snapshot = pg::latest_snapshot_of(tables[piece]);
  pg::IndexScan scan = pg::begin_scan(tables[piece], indexes[piece], snapshot, keys, 3);
  while (scan.next()) {
    slot_getallattrs(scan.slot);
    const pg::NewRow row{scan.slot->tts_values, scan.slot->tts_isnull, scan.slot->tts_tupleDescriptor->natts};
    (void)storage::insert_into_ring(storage::RingName::kProgress, tables, row, &indexes);
  }
  scan.end();
  UnregisterSnapshot(snapshot);
}

// A client may have the row locked for as long as its transaction is open: it is not waited for.
bool lock_at_once(const Shard &s) {
  return pg::spi([&] {
    ShardRow row;
    return lock_shard(s.destination, s.shard, false, &row);
  });
}

// Nothing that the piece records is about an event that is still there. Where a shard stands goes on to the
// active piece.
storage::Turn release_progress(const storage::SealedPiece &piece) {
  if (piece.sealed_position > storage::position_before_log() + 1) return storage::Turn::kNothing;
  const pg::Extension &e = pg::extension();
  uint64 count;
  const Shard *shards = all_shards(Lost::kToo, &count);
  for (uint64 i = 0; i < count; ++i)
    if (!lock_at_once(shards[i])) return storage::Turn::kBlocked;
  for (uint64 i = 0; i < count; ++i) {
    const Shard &s = shards[i];
    const Cursor cursor = load_cursor(s.destination, s.shard);
    copy_forward(e.outbox_windows_pieces, e.outbox_windows_pkey_pieces, piece.piece, s,
                 last_finished_window(s, cursor.window_no));
    copy_forward(e.outbox_batches_pieces, e.outbox_batches_pkey_pieces, piece.piece, s, cursor.seq);
  }
  return storage::Turn::kDone;
}

storage::RingKeeper keeper_of(storage::RingName ring) {
  return {ring, settings::rotation_age_us(settings::outbox_rotation_age, settings::outbox_retention),
          settings::rotation_bytes(settings::outbox_rotation_size),
          // A dump would have the places of destinations neither here nor where they were copied to. Events
          // that it misses were delivered.
          ring == storage::RingName::kProgress, nullptr,
          ring == storage::RingName::kLog ? release_log : release_progress};
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
  pg::require_read_committed("outbox_cleanup()");
  // Of a log that is not to be published nothing is taken away.
  if (const char *why; outbox::publishing_suspended(&why)) PG_RETURN_INT64(0);
  const int64 removed = outbox::remove_settled(PG_GETARG_INT32(0));
  const bool turned = storage::may_turn_in(fcinfo) && outbox::turn_outbox_rings() == storage::Turn::kDone;
  PG_RETURN_INT64(removed + (turned ? 1 : 0));
}

// outbox_passed_position(destination, shard, by) → bigint
RETRYSAFE_SQL_FUNCTION(retrysafe_outbox_passed_position) {
  PG_RETURN_INT64(
      outbox::passed_position({PG_GETARG_INT32(0), PG_GETARG_INT32(1)}, PG_GETARG_TIMESTAMPTZ(2)));
}
