#include "outbox/cursor.hpp"

#include "outbox/log_columns.hpp"
#include "pg/error.hpp"
#include "pg/extension.hpp"
#include "pg/index_scan.hpp"
#include "storage/ring.hpp"

#include "pg/server.hpp"

namespace retrysafe::outbox {

namespace {

bool newest_in(int piece, int32 destination, int32 shard, Snapshot snapshot, Cursor *cursor) {
  const pg::Extension &e = pg::extension();
  ScanKeyData keys[2];
  pg::int4_equals(&keys[0], 1, destination);
  pg::int4_equals(&keys[1], 2, shard);
  pg::IndexScan scan =
      pg::begin_scan(e.outbox_batches_pieces[piece], e.outbox_batches_pkey_pieces[piece], snapshot, keys, 2);
  const bool found = scan.next(BackwardScanDirection);
  if (found) {
    bool null;
    cursor->seq = DatumGetInt64(scan.datum(batch_column::kSeq, &null));
    cursor->window_no = DatumGetInt64(scan.datum(batch_column::kWindowNo, &null));
    cursor->position = DatumGetInt64(scan.datum(batch_column::kPosition, &null));
    cursor->writer = scan.writer();
    cursor->total_delivered = DatumGetInt64(scan.datum(batch_column::kTotalDelivered, &null));
    cursor->total_parked = DatumGetInt64(scan.datum(batch_column::kTotalParked, &null));
  }
  scan.end();
  return found;
}

}  // namespace

Cursor load_cursor(int32 destination, int32 shard) {
  const storage::RingView view = storage::open_view(storage::RingName::kProgress);
  Cursor cursor;
  bool found = false;
  for (int i = 0; i < view.ring.count && !found; ++i)
    found = newest_in(view.ring.newest(i), destination, shard, view.snapshot, &cursor);
  storage::close_view(view);
  if (!found)
    pg::raise(
        kCursorMissing,
        "Restore table outbox_batches, or drop the destination and create it again with the start_at of your "
        "choice.",
        "the progress of shard %d of destination %d is missing", shard, destination);
  return cursor;
}

int64 first_id_of_era(int32 era) {
  const pg::Extension &e = pg::extension();
  ScanKeyData key;
  pg::int4_equals(&key, 1, era);
  Snapshot snapshot = pg::latest_snapshot_of(e.outbox_eras);
  pg::IndexScan scan = pg::begin_scan(e.outbox_eras, e.outbox_eras_pkey, snapshot, &key, 1);
  if (!scan.next())
    pg::raise(kCursorMissing, "Restore table outbox_eras.", "era %d of the outbox is missing", era);
  bool null;
  const int64 first_id = DatumGetInt64(scan.datum(3, &null));
  scan.end();
  UnregisterSnapshot(snapshot);
  return first_id;
}

}  // namespace retrysafe::outbox
