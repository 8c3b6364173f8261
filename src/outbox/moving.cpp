// Moving delayed events that are due into the log.
//
// Order within an ordering key is kept without a lock over all movers: where an event is held by another
// transaction (a mover that has not committed, or outbox_cancel), those of its key behind it stay as well.
// Such keys are remembered while the due events are passed, so that each of these is looked at once. Where
// only a part of them is passed, a key with an earlier event is one of these too, whoever put it there.
#include <algorithm>
#include <utility>

#include "outbox/append.hpp"
#include "outbox/emit.hpp"
#include "outbox/engine.hpp"
#include "outbox/scheduled.hpp"
#include "pg/fault_point.hpp"
#include "pg/finally.hpp"
#include "pg/patience.hpp"
#include "pg/statement.hpp"
#include "pg/text.hpp"
#include "runtime/wakeup.hpp"

#include "pg/server.hpp"

namespace retrysafe::outbox {

namespace {

// What is due beyond that waits for the next call: the lanes of a worker stand still meanwhile, and so does
// who fetches.
constexpr int64 kMaxMoveUs = 500 * 1000;
// So much is moved between two looks at the clock. A single event may be larger.
constexpr int32 kPieceEvents = 1000;
constexpr int64 kPieceBytes = 1024 * 1024;

// The size is what is stored: nothing is read for it.
constinit pg::Statement select_due{
    "SELECT ctid, ordering_key, deliver_after, created_at,"
    " coalesce(pg_column_size(payload), 0) + coalesce(pg_column_size(headers), 0)"
    " FROM @.outbox_scheduled WHERE deliver_after <= $1 AND (deliver_after, created_at) > ($2, $3)"
    " ORDER BY deliver_after, created_at",
    {TIMESTAMPTZOID, TIMESTAMPTZOID, TIMESTAMPTZOID}};

constinit pg::Statement lock_free_ones{
    "SELECT ctid FROM @.outbox_scheduled WHERE ctid = ANY ($1) FOR UPDATE SKIP LOCKED", {TIDARRAYOID}};

constinit pg::Statement take_out{
    "WITH taken AS (DELETE FROM @.outbox_scheduled WHERE ctid = ANY ($1) RETURNING ctid AS tid, *) "
    "SELECT scope, idempotency_key, CASE WHEN event_number IS NULL THEN event_key END, event_type,"
    " ordering_key, payload, headers, created_at, deliver_after, coalesce(event_number, 0)"
    " FROM taken ORDER BY deliver_after, created_at, tid",
    {TIDARRAYOID}};

// --- a pass over what is due -------------------------------------------------------------------------------

enum class KeyState {
  kNew,
  kTried,  // its first event is in the piece
  kFree,
  kHeld
};

// By a hash of 64 bits: keys that share one are taken for one key.
struct Key {
  uint64 hash;
  KeyState state;
};

// One that met only events that stay, and ran out of time, is gone on with by the next call: a long key that
// is held must not hold up those of other keys behind it. It ends at what was due when it began. What came
// due since, and what is behind the place that it has reached, comes with the next one: it was held, a
// transaction gave it back, it was committed meanwhile, or has the very time of the last one.
struct Pass {
  TimestampTz until;  // 0: there is none
  Turn reached;       // of the last event that was looked at
  uint64 generation;  // of the extension
};
constinit Pass pass{};
constexpr Turn kFromTheFirst{DT_NOBEGIN, DT_NOBEGIN};

Pass pass_at(TimestampTz now) {
  const uint64 generation = pg::extension().generation;
  if (pass.until != 0 && pass.until <= now && pass.generation == generation) return pass;
  return {now, kFromTheFirst, generation};
}

// What one call does of a pass.
struct Call {
  Pass pass;  // as it began
  Turn reached;
  TimestampTz until;
  HTAB *keys;
  int64 moved;
};

Call begin_call(const Pass &at, TimestampTz until) {
  HASHCTL control{};
  control.keysize = sizeof(uint64);
  control.entrysize = sizeof(Key);
  control.hcxt = CurrentMemoryContext;
  HTAB *keys = hash_create("retrysafe ordering keys", 16, &control, HASH_ELEM | HASH_BLOBS | HASH_CONTEXT);
  return {at, at.reached, until, keys, 0};
}

// Null: the event has none.
Key *key_of(const Call &call, const pg::Row &row, int column) {
  if (row.is_null(column)) return nullptr;
  const std::string_view bytes = pg::bytes_of(DatumGetTextPP(row.datum(column)));
  const uint64 hash = hash_bytes_extended(reinterpret_cast<const unsigned char *>(bytes.data()),
                                          static_cast<int>(bytes.size()), 0);
  bool found;
  auto *key = static_cast<Key *>(hash_search(call.keys, &hash, HASH_ENTER, &found));
  if (found) return key;
  const Turn passed = call.pass.reached;
  const bool stays = passed != kFromTheFirst && first_turn(row.datum(column)) <= passed;
  key->state = stays ? KeyState::kHeld : KeyState::kNew;
  return key;
}

// --- a piece of it -----------------------------------------------------------------------------------------

struct DueEvent {
  ItemPointerData tid;
  Key *key;  // null: none
};

struct Piece {
  DueEvent events[kPieceEvents];  // in the order of delivery times
  int32 count = 0;
  int64 bytes = 0;
};

ArrayType *tids_of(const DueEvent *events, int32 count) {
  auto *tids = static_cast<Datum *>(palloc(sizeof(Datum) * count));
  for (int32 i = 0; i < count; ++i) tids[i] = PointerGetDatum(&events[i].tid);
  return construct_array(tids, count, TIDOID, sizeof(ItemPointerData), false, TYPALIGN_SHORT);
}

bool comes_before(const ItemPointerData &a, const ItemPointerData &b) {
  return ItemPointerCompare(const_cast<ItemPointerData *>(&a), const_cast<ItemPointerData *>(&b)) < 0;
}

// Keeps of the piece what can be moved, locked.
void lock(Piece *piece) {
  const uint64 rows = lock_free_ones.run({pg::value(tids_of(piece->events, piece->count))});
  auto *locked = static_cast<ItemPointerData *>(palloc(sizeof(ItemPointerData) * (rows + 1)));
  for (uint64 i = 0; i < rows; ++i)
    locked[i] = *reinterpret_cast<ItemPointer>(DatumGetPointer(pg::Row(i).datum(1)));
  std::sort(locked, locked + rows, comes_before);
  int32 kept = 0;
  for (int32 i = 0; i < piece->count; ++i) {
    const DueEvent event = piece->events[i];
    const bool free = std::binary_search(locked, locked + rows, event.tid, comes_before);
    if (event.key && event.key->state != KeyState::kHeld)
      event.key->state = free ? KeyState::kFree : KeyState::kHeld;
    if (free && !(event.key && event.key->state == KeyState::kHeld)) piece->events[kept++] = event;
  }
  piece->count = kept;
}

LogEntry entry_of(const pg::Row &row) {
  const auto pointer = [&](int column) {
    return row.is_null(column) ? nullptr : DatumGetPointer(row.datum(column));
  };
  return {DatumGetTimestampTz(row.datum(8)),
          DatumGetTimestampTz(row.datum(9)),
          row.int32_at(10),
          reinterpret_cast<const text *>(pointer(1)),
          reinterpret_cast<const text *>(pointer(2)),
          reinterpret_cast<const text *>(pointer(3)),
          reinterpret_cast<const text *>(pointer(4)),
          reinterpret_cast<const text *>(pointer(5)),
          reinterpret_cast<const Jsonb *>(pointer(6)),
          reinterpret_cast<const Jsonb *>(pointer(7))};
}

// Returns how many could be, and empties the piece.
int64 move(Piece *piece) {
  if (piece->count == 0) return 0;
  const int64 moved = pg::spi([&]() -> int64 {
    lock(piece);
    if (piece->count == 0) return 0;
    const auto rows = static_cast<int64>(take_out.run({pg::value(tids_of(piece->events, piece->count))}));
    for (int64 i = 0; i < rows; ++i) {
      const LogEntry entry = entry_of(pg::Row(static_cast<uint64>(i)));
      int64 id;
      if (entry.event_number == 0)
        (void)append_to_log(entry, Repetition::kPossible, nullptr, &id);
      else
        (void)append_numbered(entry);
    }
    return rows;
  });
  piece->count = 0;
  piece->bytes = 0;
  return moved;
}

// --- all of it ---------------------------------------------------------------------------------------------

bool time_is_up(TimestampTz until) {
  return GetCurrentTimestamp() > until || RETRYSAFE_FAULT("moving.time_is_up");
}

Portal open_pass(const Pass &at) {
  // Statistics of a table that fills and empties all the time say nothing. To begin must not cost a scan of
  // all delayed events, or a sort, or the time of a compiler.
  const int nest = NewGUCNestLevel();
  for (const char *other_way : {"enable_seqscan", "enable_bitmapscan", "enable_sort", "jit"})
    (void)set_config_option(other_way, "off", PGC_USERSET, PGC_S_SESSION, GUC_ACTION_SAVE, true, 0, false);
  Portal due = select_due.open({pg::value(TimestampTzGetDatum(at.until)),
                                pg::value(TimestampTzGetDatum(at.reached.deliver_after)),
                                pg::value(TimestampTzGetDatum(at.reached.created_at))});
  AtEOXact_GUC(true, nest);
  return due;
}

enum class Passed { kSome, kAll, kOutOfTime };

Passed pass_some(Portal due, Call *call, Piece *piece) {
  CHECK_FOR_INTERRUPTS();
  SPI_cursor_fetch(due, true, kPieceEvents);
  const uint64 count = SPI_processed;
  SPITupleTable *const rows = SPI_tuptable;
  for (uint64 i = 0; i < count; ++i) {
    const pg::Row row(i);
    Key *key = key_of(*call, row, 2);
    // As long as it is not known whether the first event of a key can be moved, none behind it is locked.
    const bool wait = key && key->state == KeyState::kTried;
    if (wait || piece->bytes >= kPieceBytes) {
      call->moved += move(piece);
      if (time_is_up(call->until)) return Passed::kOutOfTime;
    }
    call->reached = {DatumGetTimestampTz(row.datum(3)), DatumGetTimestampTz(row.datum(4))};
    if (key && key->state == KeyState::kHeld) continue;
    if (key && key->state == KeyState::kNew) key->state = KeyState::kTried;
    piece->events[piece->count++] = {*reinterpret_cast<ItemPointer>(DatumGetPointer(row.datum(1))), key};
    piece->bytes += row.int32_at(5);
  }
  SPI_freetuptable(rows);
  call->moved += move(piece);
  if (count < kPieceEvents) return Passed::kAll;
  return time_is_up(call->until) ? Passed::kOutOfTime : Passed::kSome;
}

constinit bool unfinished = false;

// Returns how many were moved. A call that fails leaves the pass where it was.
int64 go_on_with(const Pass &at, TimestampTz until) {
  return pg::spi([&] {
    Call call = begin_call(at, until);
    Portal due = open_pass(at);
    Piece piece;
    Passed passed;
    do passed = pass_some(due, &call, &piece);
    while (passed == Passed::kSome);
    SPI_cursor_close(due);
    unfinished = passed == Passed::kOutOfTime && call.moved == 0;
    pass = unfinished ? Pass{at.until, call.reached, at.generation} : Pass{};
    return call.moved;
  });
}

// A trigger of somebody's on our tables may fetch: that must not overtake what is just being moved.
constinit bool under_way = false;

}  // namespace

int64 move_due_events_without_worker() {
  if (runtime::has_worker() && !waits_by(GetCurrentTimestamp() - kWorkerPatienceUs)) return 0;
  return move_due_events();
}

int64 move_due_events() {
  if (under_way) return 0;
  const TimestampTz now = GetCurrentTimestamp();
  if (next_scheduled_due() > now) return 0;
  // Who fetches looks for events afterwards, for as long.
  const TimestampTz until = now + (pg::may_work_until(2 * kMaxMoveUs) - now) / 2;
  int64 moved = 0;
  under_way = true;
  pg::finally([&] { moved = go_on_with(pass_at(now), until); }, [] { under_way = false; });
  // The events are there with the commit: also for who looked meanwhile, and for the fetch that moved them.
  if (moved > 0) announce_at_commit();
  return moved;
}

bool take_unfinished_move() {
  // Whoever sleeps was told of nothing that comes meanwhile behind the place of a pass.
  if (!unfinished) pass = {};
  return std::exchange(unfinished, false);
}

}  // namespace retrysafe::outbox
