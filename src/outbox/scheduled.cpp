#include "outbox/scheduled.hpp"

#include "outbox/event_key.hpp"
#include "outbox/log_columns.hpp"
#include "pg/boundary.hpp"
#include "pg/index_scan.hpp"
#include "pg/statement.hpp"

namespace retrysafe::outbox {

namespace {

constinit pg::Statement select_next{
    "SELECT min(deliver_after) FROM @.outbox_scheduled WHERE deliver_after > $1", {TIMESTAMPTZOID}};

// The condition on the key guards against a row that took the place of the one found.
constinit pg::Statement delete_event{
    "DELETE FROM @.outbox_scheduled WHERE ctid = $1 AND event_key = $2 AND scope = $3",
    {TIDOID, TEXTOID, TEXTOID}};

Turn first_in(Oid index, ScanKey keys, int key_count) {
  Turn turn{DT_NOEND, DT_NOEND};
  const Oid table = pg::extension().outbox_scheduled;
  if (pg::is_untouched(table)) return turn;
  pg::IndexScan scan = pg::begin_scan(table, index, SnapshotSelf, keys, key_count);
  bool null;
  if (scan.next())
    turn = {DatumGetTimestampTz(scan.datum(scheduled_column::kDeliverAfter, &null)),
            DatumGetTimestampTz(scan.datum(scheduled_column::kCreatedAt, &null))};
  scan.end();
  return turn;
}

}  // namespace

TimestampTz next_scheduled_due(TimestampTz after) {
  return pg::spi([&] {
    select_next.run({pg::value(TimestampTzGetDatum(after))});
    const pg::Row row(0);
    return row.is_null(1) ? DT_NOEND : DatumGetTimestampTz(row.datum(1));
  });
}

Turn first_turn(Datum ordering_key) {
  ScanKeyData key;
  pg::text_equals(&key, 1, ordering_key);
  return first_in(pg::extension().outbox_scheduled_ordering_key, &key, 1);
}

bool waits_by(TimestampTz due) {
  return first_in(pg::extension().outbox_scheduled_deliver_after, nullptr, 0).deliver_after <= due;
}

}  // namespace retrysafe::outbox

using namespace retrysafe;
using namespace retrysafe::outbox;

// outbox_cancel(event_key, scope) → boolean
RETRYSAFE_SQL_FUNCTION(retrysafe_outbox_cancel) {
  PreventCommandIfReadOnly("outbox_cancel()");
  PreventCommandIfParallelMode("outbox_cancel()");
  const Datum event_key = PG_GETARG_DATUM(0);
  const Datum scope = PG_GETARG_DATUM(1);
  // Found by index first: a search by SQL would take predicate locks on its neighbours under SERIALIZABLE.
  // There are several where an idempotency key was used again: numbers are given again then.
  for (bool cancelled = false;; cancelled = true) {
    FoundEvent found = find_scheduled_event(event_key, scope);
    if (found.place == Place::kNowhere) PG_RETURN_BOOL(cancelled);
    const uint64 deleted = pg::spi([&] {
      return delete_event.run(
          {pg::value(PointerGetDatum(&found.tid)), pg::value(event_key), pg::value(scope)});
    });
    if (deleted == 0) PG_RETURN_BOOL(cancelled);
  }
}
