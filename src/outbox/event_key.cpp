#include "outbox/event_key.hpp"

#include "pg/error.hpp"
#include "pg/extension.hpp"
#include "pg/index_scan.hpp"

namespace retrysafe::outbox {

namespace {

// Columns of outbox_log; outbox_scheduled has the same ones from `scope` on, without the two before it.
enum : AttrNumber { kId = 1, kTxid, kScope, kIdempotencyKey, kEventKey, kEventType, kOrderingKey, kPayload };

struct EventTable {
  Place place;
  Oid table;
  Oid index;
  AttrNumber missing;  // how many of the first columns it lacks
};

EventTable event_table(Place place) {
  const pg::Extension &e = pg::extension();
  if (place == Place::kScheduled)
    return {place, e.outbox_scheduled, e.outbox_scheduled_event_key, kScope - 1};
  return {place, e.outbox_log, e.outbox_log_event_key, 0};
}

pg::IndexScan begin_key_scan(const EventTable &in, SnapshotData *dirty, Datum event_key, Datum scope) {
  ScanKeyData keys[2];
  pg::text_equals(&keys[0], 1, event_key);
  pg::text_equals(&keys[1], 2, scope);
  InitDirtySnapshot(*dirty);
  return pg::begin_scan(in.table, in.index, dirty, keys, 2);
}

varlena *copy_column(pg::IndexScan &scan, AttrNumber column) {
  bool null;
  const Datum d = scan.datum(column, &null);
  return null ? nullptr : PG_DETOAST_DATUM_COPY(d);
}

FoundEvent copy_event(const EventTable &in, pg::IndexScan &scan) {
  FoundEvent event{};
  event.place = in.place;
  event.tid = scan.slot->tts_tid;
  bool null;
  if (in.place == Place::kLog) event.id = DatumGetInt64(scan.datum(kId, &null));
  event.idempotency_key = copy_column(scan, kIdempotencyKey - in.missing);
  event.event_type = copy_column(scan, kEventType - in.missing);
  event.ordering_key = copy_column(scan, kOrderingKey - in.missing);
  event.payload = reinterpret_cast<Jsonb *>(copy_column(scan, kPayload - in.missing));
  return event;
}

FoundEvent find_in(Place place, Datum event_key, Datum scope) {
  const EventTable in = event_table(place);
  for (;;) {
    CHECK_FOR_INTERRUPTS();
    SnapshotData dirty;
    pg::IndexScan scan = begin_key_scan(in, &dirty, event_key, scope);
    if (!scan.next()) {
      scan.end();
      return FoundEvent{};
    }
    // A dirty snapshot tells who is inserting (xmin) or deleting (xmax) the row, when that is still going on
    // in another transaction. The subtransaction is enough to wait for: the server goes on to its parents.
    const TransactionId inserter = dirty.xmin;
    const TransactionId writer = TransactionIdIsValid(inserter) ? inserter : dirty.xmax;
    if (!TransactionIdIsValid(writer)) {
      if (!scan.transaction_can_see())
        pg::raise_serialization_failure(
            "could not serialize access: the event key was used by a transaction that this one cannot see",
            "Retry the transaction.");
      const FoundEvent event = copy_event(in, scan);
      scan.end();
      return event;
    }
    ItemPointerData tid = scan.slot->tts_tid;
    const uint32 speculation = dirty.speculativeToken;
    scan.end();
    // A speculative inserter may still back down and go on with its transaction.
    if (TransactionIdIsValid(inserter) && speculation != 0) {
      SpeculativeInsertionWait(inserter, speculation);
    } else {
      Relation table = table_open(in.table, AccessShareLock);  // for the error context while waiting
      XactLockTableWait(writer, table, &tid, XLTW_InsertIndex);
      table_close(table, NoLock);
    }
  }
}

}  // namespace

FoundEvent find_event(Datum event_key, Datum scope) {
  const FoundEvent scheduled = find_scheduled_event(event_key, scope);
  return scheduled.place == Place::kScheduled ? scheduled : find_in(Place::kLog, event_key, scope);
}

FoundEvent find_scheduled_event(Datum event_key, Datum scope) {
  return find_in(Place::kScheduled, event_key, scope);
}

bool is_taken(Place place, Datum event_key, Datum scope) {
  SnapshotData dirty;
  pg::IndexScan scan = begin_key_scan(event_table(place), &dirty, event_key, scope);
  const bool taken = scan.next();
  scan.end();
  return taken;
}

}  // namespace retrysafe::outbox
