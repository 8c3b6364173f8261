#include "outbox/cursor.hpp"

#include "pg/error.hpp"
#include "pg/extension.hpp"
#include "pg/index_scan.hpp"

#include "pg/server.hpp"

namespace retrysafe::outbox {

Cursor load_cursor(int32 destination, int32 shard) {
  const pg::Extension &e = pg::extension();
  ScanKeyData keys[2];
  pg::int4_equals(&keys[0], 1, destination);
  pg::int4_equals(&keys[1], 2, shard);
  Snapshot snapshot = RegisterSnapshot(GetLatestSnapshot());
  pg::IndexScan scan = pg::begin_scan(e.outbox_batches, e.outbox_batches_pkey, snapshot, keys, 2);
  if (!scan.next(BackwardScanDirection))
    pg::raise(
        kCursorMissing,
        "Restore table outbox_batches, or drop the destination and create it again with the start_at of your "
        "choice.",
        "the progress of shard %d of destination %d is missing", shard, destination);
  bool null;
  Cursor cursor;
  cursor.seq = DatumGetInt64(scan.datum(3, &null));
  cursor.window_no = DatumGetInt64(scan.datum(4, &null));
  cursor.position = DatumGetInt64(scan.datum(5, &null));
  cursor.writer = DatumGetTransactionId(slot_getsysattr(scan.slot, MinTransactionIdAttributeNumber, &null));
  cursor.total_delivered = DatumGetInt64(scan.datum(9, &null));
  cursor.total_parked = DatumGetInt64(scan.datum(10, &null));
  scan.end();
  UnregisterSnapshot(snapshot);
  return cursor;
}

int64 first_id_of_era(int32 era) {
  const pg::Extension &e = pg::extension();
  ScanKeyData key;
  pg::int4_equals(&key, 1, era);
  Snapshot snapshot = RegisterSnapshot(GetLatestSnapshot());
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
