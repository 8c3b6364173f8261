#include "outbox/window.hpp"

#include <algorithm>

#include "outbox/durability.hpp"
#include "outbox/log_columns.hpp"
#include "outbox/shard.hpp"
#include "outbox/snapshot.hpp"
#include "pg/error.hpp"
#include "pg/extension.hpp"
#include "pg/fault_point.hpp"

#include "pg/server.hpp"

namespace retrysafe::outbox {

namespace {

// --- what this process passed over -------------------------------------------------------------------------

constexpr int64 kStoreProgressAfterMs = 10 * 1000;

struct PassedOver {
  ShardKey key;
  uint64 generation;     // of the extension
  int64 seq;             // of the cursor that was passed on from
  TransactionId writer;  // of that cursor
  uint64 types_digest;   // of the event types that were looked for
  StoredSnapshot *done;  // all it sees is done; null: nothing remembered
  int64 window_no;       // under which it is, or would be, stored
  bool stored;
  bool advances;  // positions were drawn since: the backlog is to show that there is nothing left
  instr_time since;
};

HTAB *passed_over() {
  static constinit HTAB *table = nullptr;
  if (!table) {
    HASHCTL control{};
    control.keysize = sizeof(ShardKey);
    control.entrysize = sizeof(PassedOver);
    control.hcxt = TopMemoryContext;
    table = hash_create("retrysafe windows passed over", 16, &control, HASH_ELEM | HASH_BLOBS | HASH_CONTEXT);
  }
  return table;
}

// Only while the cursor is still the same row, and the same events are wanted: others may be among those that
// were passed over. Null otherwise.
PassedOver *remembered(const Destination &d, int32 shard, const Cursor &cursor) {
  const ShardKey key{d.destination, shard};
  auto *entry = static_cast<PassedOver *>(hash_search(passed_over(), &key, HASH_FIND, nullptr));
  if (!entry || !entry->done) return nullptr;
  const bool good = entry->generation == pg::extension().generation && entry->seq == cursor.seq &&
                    entry->writer == cursor.writer && entry->types_digest == d.types_digest;
  return good ? entry : nullptr;
}

int64 ms_until_due(const PassedOver &memory) {
  instr_time passed;
  INSTR_TIME_SET_CURRENT(passed);
  INSTR_TIME_SUBTRACT(passed, memory.since);
  return std::max<int64>(0, kStoreProgressAfterMs - static_cast<int64>(INSTR_TIME_GET_MILLISEC(passed)));
}

// --- windows -----------------------------------------------------------------------------------------------

[[noreturn]] void raise_window_missing(int32 destination, int32 shard, int64 window_no) {
  pg::raise(kCursorMissing, "Restore table outbox_windows, or drop the destination and create it again.",
            "window " INT64_FORMAT " of shard %d of destination %d is missing", window_no, shard,
            destination);
}

StoredWindow *existing_window(int32 destination, int32 shard, int64 window_no) {
  StoredWindow *w = load_window(destination, shard, window_no);
  if (!w) raise_window_missing(destination, shard, window_no);
  return w;
}

Done *everything_in(const StoredSnapshot *snapshot) {
  auto *done = static_cast<Done *>(palloc0(sizeof(Done)));
  done->snapshot = snapshot;
  return done;
}

// What was done before a stored window of which all up to a position is done: it is told by the windows
// before it that were left half read, back to one of which nothing is left by now.
const Done *done_before(int32 destination, int32 shard, int64 window_no, const StoredWindow &window,
                        int64 position) {
  check_stack_depth();  // rows that somebody else wrote may tell of windows without end
  const StoredWindow *previous = existing_window(destination, shard, window_no - 1);
  Done *done = everything_in(&previous->snapshot);
  if (window.resumed_at >= 0 && std::max(window.resumed_at, position) < previous->snapshot.ceiling) {
    done->position = window.resumed_at;
    done->before = done_before(destination, shard, window_no - 1, *previous, window.resumed_at);
  }
  return done;
}

OpenWindow make_open(int32 destination, int32 shard, int64 window_no, const StoredWindow &stored,
                     int64 position) {
  const Done *done = done_before(destination, shard, window_no, stored, position);
  return {{done, &stored.snapshot}, window_no, true, position};
}

// What a new window sees.
const StoredSnapshot *snapshot_for(const ShardKey &key, int64 window_no, const StoredSnapshot &done,
                                   const Era &era) {
  if (const StoredSnapshot *kept = window_kept_back(key, window_no, done))
    return copy_snapshot(*kept, CurrentMemoryContext);
  auto *now = static_cast<StoredSnapshot *>(palloc(sizeof(StoredSnapshot)));
  *now = take_snapshot(era.era, era.first_id);
  return now;
}

}  // namespace

bool load_open_window(int32 destination, int32 shard, int64 window_no, OpenWindow *open) {
  if (window_no < 1) return false;
  const StoredWindow *stored = load_window(destination, shard, window_no);
  if (!stored) return false;
  *open = make_open(destination, shard, window_no, *stored, 0);
  return true;
}

OpenWindow open_window(const Destination &d, int32 shard, const Cursor &cursor, const Era &era) {
  const StoredSnapshot *done;
  int64 next_no;
  PassedOver *memory = remembered(d, shard, cursor);
  if (memory && memory->done->era != era.era) memory = nullptr;
  if (memory && memory->stored) {
    // The row may have gone with the transaction that wrote it.
    const StoredWindow *stored = load_window(d.destination, shard, memory->window_no);
    if (!stored || !same_snapshot(stored->snapshot, *memory->done)) memory = nullptr;
  }
  if (memory) {
    done = memory->done;
    next_no = memory->stored ? memory->window_no + 1 : memory->window_no;
  } else {
    const StoredWindow *current = existing_window(d.destination, shard, cursor.window_no);
    // A window of an old era is not read on, whatever is left of it: its transaction ids mean nothing here.
    if (current->snapshot.era == era.era && cursor.position < current->snapshot.ceiling)
      return make_open(d.destination, shard, cursor.window_no, *current, cursor.position);
    done = &current->snapshot;
    next_no = cursor.window_no + 1;
  }

  // A pull client stores the window that it opens, before anything of it is recorded.
  if (const StoredWindow *next = load_window(d.destination, shard, next_no)) {
    const OpenWindow open = make_open(d.destination, shard, next_no, *next, 0);
    if (goes_on_from(open, cursor)) return open;
  }

  if (done->era != era.era) raise_window_missing(d.destination, shard, next_no);
  const Done *all = everything_in(copy_snapshot(*done, CurrentMemoryContext));
  return {{all, snapshot_for({d.destination, shard}, next_no, *done, era)}, next_no, false, 0};
}

bool goes_on_from(const OpenWindow &open, const Cursor &cursor) {
  const int64 resumed_at = open.window.done->resumed_at();
  return resumed_at < 0 || open.window_no != cursor.window_no + 1 || resumed_at == cursor.position;
}

OpenWindow reopen_window(const Destination &d, int32 shard, const Cursor &cursor, const OpenWindow &open,
                         const Era &era) {
  const bool half_read = open.window_no == cursor.window_no;
  const Done *done = open.window.done;
  if (half_read) {
    Done *left = everything_in(open.window.now);
    left->before = done;
    left->position = cursor.position;
    done = left;
  }
  const int64 window_no = half_read ? open.window_no + 1 : open.window_no;
  const StoredSnapshot *now = snapshot_for({d.destination, shard}, window_no, *done->snapshot, era);
  return {{done, now}, window_no, false, 0};
}

void pass_over(const Destination &d, int32 shard, const Cursor &cursor, const OpenWindow &open) {
  PassedOver *known = remembered(d, shard, cursor);
  StoredSnapshot *done = copy_snapshot(*open.window.now, TopMemoryContext);
  const ShardKey key{d.destination, shard};
  const uint64 generation = pg::extension().generation;  // may raise, and must not from here on
  bool found;
  auto *entry = static_cast<PassedOver *>(hash_search(passed_over(), &key, HASH_ENTER, &found));
  if (found && entry->done) pfree(entry->done);
  if (!known) {
    entry->generation = generation;
    entry->seq = cursor.seq;
    entry->writer = cursor.writer;
    entry->types_digest = d.types_digest;
    INSTR_TIME_SET_CURRENT(entry->since);
  }
  entry->done = done;
  entry->window_no = open.window_no;
  entry->stored = open.stored;
  entry->advances = done->ceiling > cursor.position;
}

// The oldest piece of the log goes when the stored progress of all shards is past it.
bool retention_waits(const PassedOver &memory, int32 destination, int32 shard, const Cursor &cursor) {
  const int64 position = storage::ring(storage::RingName::kLog).waiting_position;
  if (position == 0 || memory.done->floor < position) return false;
  const StoredWindow *stored = load_window(destination, shard, cursor.window_no);
  const bool half_read = stored && cursor.position < stored->snapshot.ceiling;  // as far as is recorded
  return stored && (half_read || stored->snapshot.floor < position);
}

bool progress_is_due(const Destination &d, int32 shard, const Cursor &cursor, OpenWindow *done) {
  PassedOver *memory = remembered(d, shard, cursor);
  if (!memory) return false;
  const bool old_enough = ms_until_due(*memory) == 0 || RETRYSAFE_FAULT("reader.store_progress");
  if (!(memory->advances && old_enough) && !retention_waits(*memory, d.destination, shard, cursor))
    return false;
  const StoredSnapshot *snapshot = copy_snapshot(*memory->done, CurrentMemoryContext);
  *done = {{nullptr, snapshot}, memory->window_no, memory->stored, snapshot->ceiling};
  return true;
}

int64 ms_until_progress_is_due(const Claim &claim) {
  const ShardKey key{claim.destination, claim.shard};
  auto *entry = static_cast<PassedOver *>(hash_search(passed_over(), &key, HASH_FIND, nullptr));
  return entry && entry->done && entry->advances ? ms_until_due(*entry) : -1;
}

// --- rows --------------------------------------------------------------------------------------------------

void WindowScan::begin(const Window &window, int64 after, int64 up_to, int64 bound) {
  window_ = window;
  after_ = position_ = after;
  up_to_ = std::min(up_to, window.now->ceiling);
  bound_ = bound;
  late_ = nullptr;
  late_count_ = late_capacity_ = 0;
  current_late_ = -1;
  main_open_ = false;
  main_piece_ = 0;
  looked_at_ = 0;
  // Rows are never changed and what the window sees has ended, so any later snapshot shows the same rows of
  // it.
  log_ = storage::open_view(storage::RingName::kLog);
  if (!window.crosses_eras() && after < window.scan_floor()) find_late_writers();
}

// Transactions that were running, or may have been, when the last window began. Looked up only when this
// window sees their end: a prepared bulk writer is not scanned again in every window.
void WindowScan::find_late_writers() {
  const StoredSnapshot &done = *window_.done->snapshot;
  for (int32 i = 0; i < done.xip_count; ++i)
    if (window_.is_late(done.xip[i])) add_late_writer(done.xip[i]);

  if (done.xmax >= done.next || RETRYSAFE_FAULT("reader.no_late_range")) return;
  for (int i = 0; i < log_.ring.count; ++i) find_late_writers_in(log_.ring.pieces[i]);
}

// [xmax, next) is a range of numbers, most of which wrote nothing (one transaction with many subtransactions
// makes it long). The entries of the index tell which did; rows are not looked at.
void WindowScan::find_late_writers_in(int piece) {
  const pg::Extension &e = pg::extension();
  const StoredSnapshot &done = *window_.done->snapshot;
  uint64 from = done.xmax;
  ScanKeyData keys[2];
  pg::xid8_compares(&keys[0], 1, BTGreaterEqualStrategyNumber, F_XID8GE, from);
  pg::xid8_compares(&keys[1], 1, BTLessStrategyNumber, F_XID8LT, done.next);
  pg::IndexScan writers =
      pg::begin_scan(e.outbox_log_pieces[piece], e.outbox_log_txid_pieces[piece], log_.snapshot, keys, 2);
  writers.scan->xs_want_itup = true;
  for (;;) {
    keys[0].sk_argument = UInt64GetDatum(from);
    index_rescan(writers.scan, keys, 2, nullptr, 0);
    if (!index_getnext_tid(writers.scan, ForwardScanDirection)) break;
    bool null;
    const uint64 txid =
        DatumGetUInt64(index_getattr(writers.scan->xs_itup, 1, writers.scan->xs_itupdesc, &null));
    if (window_.is_late(txid)) add_late_writer_in(piece, txid);
    from = txid + 1;
  }
  writers.end();
}

void WindowScan::add_late_writer(uint64 txid) {
  for (int i = 0; i < log_.ring.count; ++i) add_late_writer_in(log_.ring.pieces[i], txid);
}

void WindowScan::add_late_writer_in(int piece, uint64 txid) {
  const pg::Extension &e = pg::extension();
  const StoredSnapshot &done = *window_.done->snapshot;
  ScanKeyData keys[3];
  pg::xid8_compares(&keys[0], 1, BTEqualStrategyNumber, F_XID8EQ, txid);
  // Rows from before the era carry numbers of another cluster.
  pg::int8_compares(&keys[1], 2, BTGreaterStrategyNumber, F_INT8GT, std::max(after_, done.first_id - 1));
  pg::int8_compares(&keys[2], 2, BTLessEqualStrategyNumber, F_INT8LE, std::min(window_.scan_floor(), up_to_));
  LateWriter writer{
      pg::begin_scan(e.outbox_log_pieces[piece], e.outbox_log_txid_pieces[piece], log_.snapshot, keys, 3), 0};
  if (!advance(&writer)) {
    writer.scan.end();
    return;
  }
  if (late_count_ == late_capacity_) {
    late_capacity_ = late_capacity_ == 0 ? 8 : 2 * late_capacity_;
    const Size size = sizeof(LateWriter) * late_capacity_;
    late_ = static_cast<LateWriter *>(late_ ? repalloc(late_, size) : palloc(size));
  }
  late_[late_count_++] = writer;
}

bool WindowScan::advance(LateWriter *writer) {
  if (!writer->scan.next()) return false;
  bool null;
  writer->id = DatumGetInt64(writer->scan.datum(log_column::kId, &null));
  return true;
}

bool WindowScan::next_of_main() {
  for (;;) {
    if (main_open_) {
      if (main_.next()) return true;
      main_.end();
      main_open_ = false;
      ++main_piece_;
    }
    if (main_piece_ == log_.ring.count) return false;
    const pg::Extension &e = pg::extension();
    const int piece = log_.ring.pieces[main_piece_];
    ScanKeyData keys[2];
    pg::int8_compares(&keys[0], 1, BTGreaterStrategyNumber, F_INT8GT,
                      std::max(position_, window_.scan_floor()));
    pg::int8_compares(&keys[1], 1, BTLessEqualStrategyNumber, F_INT8LE, up_to_);
    main_ =
        pg::begin_scan(e.outbox_log_pieces[piece], e.outbox_log_pkey_pieces[piece], log_.snapshot, keys, 2);
    main_open_ = true;
  }
}

WindowScan::Step WindowScan::next() {
  // The row that was returned last stays in its slot until now.
  if (current_late_ >= 0) {
    LateWriter *writer = &late_[current_late_];
    current_late_ = -1;
    if (!advance(writer)) {
      writer->scan.end();
      *writer = late_[--late_count_];
    }
  }
  if (late_count_ > 0) {
    if (looked_at_ >= bound_) return Step::kPause;
    ++looked_at_;
    LateWriter *first = std::min_element(
        late_, late_ + late_count_, [](const LateWriter &a, const LateWriter &b) { return a.id < b.id; });
    current_late_ = static_cast<int>(first - late_);
    id_ = position_ = first->id;
    slot_ = first->scan.slot;
    return Step::kRow;
  }

  for (;;) {
    if (looked_at_ >= bound_) return Step::kPause;
    if (!next_of_main()) {
      position_ = std::max(position_, up_to_);
      return Step::kEnd;
    }
    ++looked_at_;
    bool null;
    const int64 id = DatumGetInt64(main_.datum(log_column::kId, &null));
    const uint64 txid = DatumGetUInt64(main_.datum(log_column::kTxid, &null));
    position_ = id;
    if (window_.holds(id, txid)) {
      id_ = id;
      slot_ = main_.slot;
      return Step::kRow;
    }
  }
}

void WindowScan::end() {
  for (int i = 0; i < late_count_; ++i) late_[i].scan.end();
  if (main_open_) main_.end();
  storage::close_view(log_);
}

}  // namespace retrysafe::outbox
