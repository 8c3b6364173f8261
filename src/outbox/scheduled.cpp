#include "outbox/scheduled.hpp"

#include "outbox/engine.hpp"
#include "outbox/event_key.hpp"
#include "pg/boundary.hpp"
#include "pg/statement.hpp"

namespace retrysafe::outbox {

namespace {

// Order within an ordering key is kept without a lock over all movers: an event stays while an earlier due
// one of its key is held by another transaction (a mover that has not committed, or outbox_cancel). Positions
// are drawn after the mover's transaction id, which the caller passes, and in the order of delivery times.
// Returns how many were moved, and the last one that was looked at: where the next batch begins, so that
// events that stay hold up those of their key only.
constinit pg::Statement move_batch{
    "WITH due AS MATERIALIZED ("
    "  SELECT ctid AS tid, ordering_key, deliver_after, created_at FROM @.outbox_scheduled"
    "   WHERE deliver_after <= $3 AND (deliver_after, created_at) >= ($4, $5)"
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
    "), placed AS ("
    "INSERT INTO @.outbox_log (id, txid, scope, idempotency_key, event_key, event_type, ordering_key, "
    "payload, "
    "headers, created_at) "
    "SELECT nextval($1), $2, scope, idempotency_key, event_key, event_type, ordering_key, payload, headers, "
    "created_at"
    "  FROM (SELECT * FROM moved ORDER BY deliver_after, created_at) m "
    "ON CONFLICT (event_key, scope) DO NOTHING"
    ") "
    "SELECT (SELECT count(*) FROM moved), deliver_after, created_at FROM due"
    " ORDER BY deliver_after DESC, created_at DESC LIMIT 1",
    {REGCLASSOID, XID8OID, TIMESTAMPTZOID, TIMESTAMPTZOID, TIMESTAMPTZOID}};

constinit pg::Statement select_next{"SELECT min(deliver_after) FROM @.outbox_scheduled", {}};

// The condition on the key guards against a row that took the place of the one found.
constinit pg::Statement delete_event{
    "DELETE FROM @.outbox_scheduled WHERE ctid = $1 AND event_key = $2 AND scope = $3",
    {TIDOID, TEXTOID, TEXTOID}};

}  // namespace

int64 move_due_events() {
  const TimestampTz now = GetCurrentTimestamp();
  if (next_scheduled_due() > now) return 0;
  const FullTransactionId transaction = GetTopFullTransactionId();
  int64 total = 0;
  TimestampTz deliver_after = DT_NOBEGIN;
  TimestampTz created_at = DT_NOBEGIN;
  for (bool more = true; more;) {
    CHECK_FOR_INTERRUPTS();
    more = pg::spi([&] {
      // Statistics of a table that fills and empties all the time say nothing. A batch must not cost a scan
      // of all delayed events.
      const int nest = NewGUCNestLevel();
      (void)set_config_option("enable_seqscan", "off", PGC_USERSET, PGC_S_SESSION, GUC_ACTION_SAVE, true, 0,
                              false);
      const uint64 batches = move_batch.run(
          {pg::value(ObjectIdGetDatum(pg::extension().outbox_log_id_seq)),
           pg::value(FullTransactionIdGetDatum(transaction)), pg::value(TimestampTzGetDatum(now)),
           pg::value(TimestampTzGetDatum(deliver_after)), pg::value(TimestampTzGetDatum(created_at))});
      AtEOXact_GUC(true, nest);
      if (batches == 0) return false;
      const pg::Row row(0);
      const int64 moved = row.int64_at(1);
      const TimestampTz last_deliver_after = DatumGetTimestampTz(row.datum(2));
      const TimestampTz last_created_at = DatumGetTimestampTz(row.datum(3));
      const bool forward = last_deliver_after != deliver_after || last_created_at != created_at;
      total += moved;
      deliver_after = last_deliver_after;
      created_at = last_created_at;
      return moved > 0 || forward;
    });
  }
  return total;
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
  FoundEvent found = find_scheduled_event(event_key, scope);
  if (found.place == Place::kNowhere) PG_RETURN_BOOL(false);
  const uint64 deleted = pg::spi([&] {
    return delete_event.run({pg::value(PointerGetDatum(&found.tid)), pg::value(event_key), pg::value(scope)});
  });
  PG_RETURN_BOOL(deleted == 1);
}
