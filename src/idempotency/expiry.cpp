#include "idempotency/expiry.hpp"

#include <algorithm>

#include "idempotency/record_columns.hpp"
#include "pg/boundary.hpp"
#include "pg/error.hpp"
#include "pg/statement.hpp"
#include "settings.hpp"

namespace retrysafe::idempotency {

namespace {

constinit pg::Statement kRemoveRecords{
    "DELETE FROM @.idem_records_with_ttl WHERE ctid = ANY (ARRAY("
    "SELECT ctid FROM @.idem_records_with_ttl WHERE expires_at <= $1"
    " ORDER BY expires_at LIMIT $2 FOR UPDATE SKIP LOCKED))",
    {TIMESTAMPTZOID, INT8OID}};

constinit pg::Statement kRemoveMessages{
    "DELETE FROM @.inbox_messages WHERE ctid = ANY (ARRAY("
    "SELECT ctid FROM @.inbox_messages WHERE seen_at <= $1"
    " ORDER BY seen_at LIMIT $2 FOR UPDATE SKIP LOCKED))",
    {TIMESTAMPTZOID, INT8OID}};

// Once for each piece, when nobody writes to it any more: an index would cost every request.
TimestampTz last_expiry(int piece) {
  Relation table = table_open(pg::extension().idem_records_pieces[piece], AccessShareLock);
  TupleTableSlot *slot = table_slot_create(table, nullptr);
  TableScanDesc scan = pg::begin_table_scan(table, SnapshotSelf);
  TimestampTz last = DT_NOBEGIN;
  while (table_scan_getnextslot(scan, ForwardScanDirection, slot)) {
    CHECK_FOR_INTERRUPTS();
    bool null;
    last = std::max(last, DatumGetTimestampTz(slot_getattr(slot, record_column::kExpiresAt, &null)));
  }
  table_endscan(scan);
  ExecDropSingleTupleTableSlot(slot);
  table_close(table, NoLock);
  return last;
}

storage::Turn release(const storage::SealedPiece &piece) {
  return piece.needed_until <= GetCurrentTimestamp() ? storage::Turn::kDone : storage::Turn::kNothing;
}

}  // namespace

storage::Turn turn_record_ring() {
  return storage::turn({storage::RingName::kRecords,
                        settings::rotation_age_us(settings::idem_rotation_age, settings::idem_retention),
                        settings::rotation_bytes(settings::idem_rotation_size), false, last_expiry, release});
}

int64 remove_expired(int64 max_rows) {
  const TimestampTz now = GetCurrentTimestamp();
  const TimestampTz oldest_message = now - settings::inbox_retention * USECS_PER_SEC;
  return pg::spi([&] {
    uint64 removed = kRemoveRecords.run({pg::value(TimestampTzGetDatum(now)), pg::value(max_rows)});
    removed += kRemoveMessages.run({pg::value(TimestampTzGetDatum(oldest_message)), pg::value(max_rows)});
    return static_cast<int64>(removed);
  });
}

}  // namespace retrysafe::idempotency

using namespace retrysafe;

// idem_cleanup(max_rows) → bigint
RETRYSAFE_SQL_FUNCTION(retrysafe_idem_cleanup) {
  // An older snapshot would fail on rows that were replaced since, and under SERIALIZABLE the scan could make
  // business transactions fail.
  pg::require_read_committed("idem_cleanup()");
  if (PG_ARGISNULL(0) || PG_GETARG_INT32(0) < 1)
    pg::raise(kInvalidParameter, "It bounds how many rows of each kind one call removes.",
              "max_rows must be 1 or more");
  // Last: others wait for the end of the transaction that has turned a ring.
  const int64 removed = idempotency::remove_expired(PG_GETARG_INT32(0));
  const bool turned = storage::may_turn_in(fcinfo) && idempotency::turn_record_ring() == storage::Turn::kDone;
  PG_RETURN_INT64(removed + (turned ? 1 : 0));
}
