#include "outbox/scheduled.hpp"

#include "outbox/append.hpp"
#include "outbox/emit.hpp"
#include "outbox/engine.hpp"
#include "outbox/event_key.hpp"
#include "pg/boundary.hpp"
#include "pg/patience.hpp"
#include "pg/statement.hpp"

namespace retrysafe::outbox {

namespace {

// Order within an ordering key is kept without a lock over all movers: an event stays while an earlier due
// one of its key is held by another transaction (a mover that has not committed, or outbox_cancel). Returns
// those that were moved in the order of delivery times (one row without an event when none was), and the last
// one that was looked at: where the next batch begins, so that events that stay hold up those of their key
// only.
constinit pg::Statement move_batch{
    "WITH due AS MATERIALIZED ("
    "  SELECT ctid AS tid, ordering_key, deliver_after, created_at FROM @.outbox_scheduled"
    "   WHERE deliver_after <= $1 AND (deliver_after, created_at) >= ($2, $3)"
    "   ORDER BY deliver_after, created_at LIMIT 1000 FOR UPDATE SKIP LOCKED"
    "), held AS MATERIALIZED ("
    "  SELECT ordering_key, deliver_after, created_at FROM @.outbox_scheduled"
    "   WHERE (deliver_after, created_at) <"
    "         (SELECT deliver_after, created_at FROM due ORDER BY deliver_after DESC, created_at DESC LIMIT "
    "1)"
    "     AND ordering_key IS NOT NULL AND ctid NOT IN (SELECT tid FROM due)"
    "), moved AS ("
    "  DELETE FROM @.outbox_scheduled s USING due d"
    "   WHERE s.ctid = d.tid AND NOT EXISTS ("
    "     SELECT FROM held h WHERE h.ordering_key = d.ordering_key"
    "        AND (h.deliver_after, h.created_at) < (d.deliver_after, d.created_at))"
    "  RETURNING s.*"
    ") "
    "SELECT last.deliver_after, last.created_at, m.scope, m.idempotency_key,"
    " CASE WHEN m.event_number IS NULL THEN m.event_key END, m.event_type,"
    " m.ordering_key, m.payload, m.headers, m.created_at, coalesce(m.event_number, 0)"
    " FROM (SELECT deliver_after, created_at FROM due ORDER BY deliver_after DESC, created_at DESC LIMIT 1) "
    "last"
    " LEFT JOIN moved m ON true ORDER BY m.deliver_after, m.created_at",
    {TIMESTAMPTZOID, TIMESTAMPTZOID, TIMESTAMPTZOID}};

constinit pg::Statement select_next{"SELECT min(deliver_after) FROM @.outbox_scheduled", {}};

// What is due beyond that waits for the next call: the lanes of a worker stand still meanwhile, and so does
// who fetches.
constexpr int64 kMaxMoveUs = 500 * 1000;

// The condition on the key guards against a row that took the place of the one found.
constinit pg::Statement delete_event{
    "DELETE FROM @.outbox_scheduled WHERE ctid = $1 AND event_key = $2 AND scope = $3",
    {TIDOID, TEXTOID, TEXTOID}};

}  // namespace

namespace {

LogEntry entry_of(const pg::Row &row) {
  const auto pointer = [&](int column) {
    return row.is_null(column) ? nullptr : DatumGetPointer(row.datum(column));
  };
  return {DatumGetTimestampTz(row.datum(10)),         row.int32_at(11),
          reinterpret_cast<const text *>(pointer(3)), reinterpret_cast<const text *>(pointer(4)),
          reinterpret_cast<const text *>(pointer(5)), reinterpret_cast<const text *>(pointer(6)),
          reinterpret_cast<const text *>(pointer(7)), reinterpret_cast<const Jsonb *>(pointer(8)),
          reinterpret_cast<const Jsonb *>(pointer(9))};
}

struct MovedBatch {
  int64 moved;
  TimestampTz deliver_after, created_at;  // of the last one that was looked at
};

// False: there was none to look at.
bool move_one_batch(TimestampTz now, MovedBatch *batch) {
  return pg::spi([&] {
    // Statistics of a table that fills and empties all the time say nothing. A batch must not cost a scan
    // of all delayed events.
    const int nest = NewGUCNestLevel();
    (void)set_config_option("enable_seqscan", "off", PGC_USERSET, PGC_S_SESSION, GUC_ACTION_SAVE, true, 0,
                            false);
    const uint64 rows = move_batch.run({pg::value(TimestampTzGetDatum(now)),
                                        pg::value(TimestampTzGetDatum(batch->deliver_after)),
                                        pg::value(TimestampTzGetDatum(batch->created_at))});
    AtEOXact_GUC(true, nest);
    if (rows == 0) return false;
    batch->deliver_after = DatumGetTimestampTz(pg::Row(0).datum(1));
    batch->created_at = DatumGetTimestampTz(pg::Row(0).datum(2));
    batch->moved = pg::Row(0).is_null(3) ? 0 : static_cast<int64>(rows);
    for (int64 i = 0; i < batch->moved; ++i) {
      const LogEntry entry = entry_of(pg::Row(static_cast<uint64>(i)));
      int64 id;
      if (entry.event_number == 0)
        (void)append_to_log(entry, Repetition::kPossible, nullptr, &id);
      else
        (void)append_numbered(entry);
    }
    return true;
  });
}

}  // namespace

int64 move_due_events() {
  const TimestampTz now = GetCurrentTimestamp();
  if (next_scheduled_due() > now) return 0;
  const TimestampTz until = pg::may_work_until(kMaxMoveUs);
  int64 total = 0;
  MovedBatch batch{0, DT_NOBEGIN, DT_NOBEGIN};
  for (;;) {
    CHECK_FOR_INTERRUPTS();
    const MovedBatch before = batch;
    if (!move_one_batch(now, &batch)) return total;
    total += batch.moved;
    // The events are there with the commit: also for who looked meanwhile, and for the fetch that moved them.
    if (batch.moved > 0) announce_at_commit();
    const bool forward = batch.deliver_after != before.deliver_after || batch.created_at != before.created_at;
    if (batch.moved == 0 && !forward) return total;
    if (total > 0 && GetCurrentTimestamp() > until) return total;
  }
}

TimestampTz next_scheduled_due() {
  return pg::spi([&] {
    select_next.run({});
    const pg::Row row(0);
    return row.is_null(1) ? DT_NOEND : DatumGetTimestampTz(row.datum(1));
  });
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
