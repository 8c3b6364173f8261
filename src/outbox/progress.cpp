#include "outbox/progress.hpp"

#include "outbox/log_columns.hpp"
#include "pg/extension.hpp"
#include "pg/index_scan.hpp"
#include "storage/ring.hpp"

#include "pg/server.hpp"

namespace retrysafe::outbox {

namespace {

constexpr int64 kAny = -1;

bool load_from(int piece, int32 destination, int32 shard, int64 seq, ScanDirection direction,
               Snapshot snapshot, BatchEnd *batch) {
  const pg::Extension &e = pg::extension();
  ScanKeyData keys[3];
  pg::int4_equals(&keys[0], 1, destination);
  pg::int4_equals(&keys[1], 2, shard);
  pg::int8_compares(&keys[2], 3, BTEqualStrategyNumber, F_INT8EQ, seq);
  pg::IndexScan scan = pg::begin_scan(e.outbox_batches_pieces[piece], e.outbox_batches_pkey_pieces[piece],
                                      snapshot, keys, seq == kAny ? 2 : 3);
  const bool found = scan.next(direction);
  if (found) {
    bool null;
    batch->seq = DatumGetInt64(scan.datum(batch_column::kSeq, &null));
    batch->window_no = DatumGetInt64(scan.datum(batch_column::kWindowNo, &null));
    batch->position = DatumGetInt64(scan.datum(batch_column::kPosition, &null));
    batch->published_at = DatumGetTimestampTz(scan.datum(batch_column::kPublishedAt, &null));
  }
  scan.end();
  return found;
}

// The batch of that number; for kAny the first or, backwards, the last one. Numbers grow from piece to piece.
bool load_batch(int32 destination, int32 shard, int64 seq, ScanDirection direction, BatchEnd *batch) {
  const storage::RingView view = storage::open_view(storage::RingName::kProgress);
  const storage::Ring &ring = view.ring;
  bool found = false;
  for (int i = 0; i < ring.count && !found; ++i)
    found = load_from(ScanDirectionIsForward(direction) && seq == kAny ? ring.pieces[i] : ring.newest(i),
                      destination, shard, seq, direction, view.snapshot, batch);
  storage::close_view(view);
  return found;
}

// The first batch that fulfils a condition which holds for all later ones too; false when none does.
template <class Condition>
bool first_batch_where(int32 destination, int32 shard, Condition condition, BatchEnd *batch) {
  BatchEnd last, first;
  if (!last_batch(destination, shard, &last) || !condition(last)) return false;
  if (!load_batch(destination, shard, kAny, ForwardScanDirection, &first)) return false;
  *batch = last;
  int64 low = first.seq;
  while (low < batch->seq) {
    BatchEnd middle;
    const int64 seq = low + (batch->seq - low) / 2;
    // A row that retention removes under our eyes is one of the oldest.
    if (load_batch(destination, shard, seq, ForwardScanDirection, &middle) && condition(middle))
      *batch = middle;
    else
      low = seq + 1;
  }
  return true;
}

}  // namespace

bool last_batch(int32 destination, int32 shard, BatchEnd *batch) {
  return load_batch(destination, shard, kAny, BackwardScanDirection, batch);
}

bool batch_covering(int32 destination, int32 shard, int64 window_no, int64 id, BatchEnd *batch) {
  return first_batch_where(
      destination, shard, [&](const BatchEnd &b) { return b.covers(window_no, id); }, batch);
}

bool last_batch_before(int32 destination, int32 shard, TimestampTz time, BatchEnd *batch) {
  BatchEnd newer;
  const bool any_newer = first_batch_where(
      destination, shard, [&](const BatchEnd &b) { return b.published_at >= time; }, &newer);
  if (!any_newer) return last_batch(destination, shard, batch);
  if (newer.seq > 0) return load_batch(destination, shard, newer.seq - 1, ForwardScanDirection, batch);
  *batch = newer;
  return newer.window_no == 0;
}

}  // namespace retrysafe::outbox
