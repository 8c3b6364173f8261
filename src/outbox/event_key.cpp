#include "outbox/event_key.hpp"

#include "core/event_fields.hpp"
#include "outbox/log_columns.hpp"
#include "pg/error.hpp"
#include "pg/index_scan.hpp"
#include "storage/ring.hpp"

#include "pg/server.hpp"

namespace retrysafe::outbox {

namespace {

// outbox_scheduled has the columns of outbox_log from `scope` on.
struct EventTable {
  Place place;
  Oid table;
  Oid index;
  AttrNumber missing;  // how many columns fewer it has before `scope`
};

EventTable scheduled_events() {
  const pg::Extension &e = pg::extension();
  return {Place::kScheduled, e.outbox_scheduled, e.outbox_scheduled_event_key,
          log_column::kScope - AttrNumber{scheduled_column::kScope}};
}

EventTable piece_of_log(int piece) {
  const pg::Extension &e = pg::extension();
  return {Place::kLog, e.outbox_log_pieces[piece], e.outbox_log_event_key_pieces[piece], 0};
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
  if (in.place == Place::kLog) event.id = DatumGetInt64(scan.datum(log_column::kId, &null));
  event.idempotency_key = copy_column(scan, log_column::kIdempotencyKey - in.missing);
  event.event_type = copy_column(scan, log_column::kEventType - in.missing);
  event.ordering_key = copy_column(scan, log_column::kOrderingKey - in.missing);
  event.payload = reinterpret_cast<Jsonb *>(copy_column(scan, log_column::kPayload - in.missing));
  return event;
}

// A row that is there counts before one that another transaction is busy with, and may be about to take back
// because of it.
//
// Nobody begins to wait because of a row that was taken back. So those who lost a race do not wait in a
// circle: each had taken its own row back before it looked for the one that it waits for.
FoundEvent look_in(const EventTable &in, Datum event_key, Datum scope, KeyWriter *writer) {
  SnapshotData dirty;
  pg::IndexScan scan = begin_key_scan(in, &dirty, event_key, scope);
  FoundEvent event{};
  while (event.place == Place::kNowhere && scan.next()) {
    // A dirty snapshot tells who is inserting (xmin) or deleting (xmax) the row, when that is still going on
    // in another transaction. The subtransaction is enough to wait for: the server goes on to its parents.
    const bool inserting = TransactionIdIsValid(dirty.xmin);
    const TransactionId xid = inserting ? dirty.xmin : dirty.xmax;
    if (TransactionIdIsValid(xid)) {
      if (!writer->is_busy() && !scan.is_taken_back())
        *writer = {xid, inserting, dirty.speculativeToken, in.table, scan.slot->tts_tid};
      continue;
    }
    if (!scan.transaction_can_see())
      pg::raise_serialization_failure(
          "could not serialize access: the event key was used by a transaction that this one cannot see",
          "Retry the transaction.");
    event = copy_event(in, scan);
  }
  scan.end();
  return event;
}

}  // namespace

void append_numbered_key(StringInfo to, std::string_view idempotency_key, int32 number) {
  appendBinaryStringInfo(to, idempotency_key.data(), static_cast<int>(idempotency_key.size()));
  char digits[12];
  const int count = pg_ltoa(number, digits);
  appendStringInfoChar(to, kNumberMark);
  appendBinaryStringInfo(to, digits, count);
}

FoundEvent find_scheduled_event(Datum event_key, Datum scope) {
  if (pg::is_untouched(pg::extension().outbox_scheduled)) return FoundEvent{};  // most never delay an event
  for (;;) {
    CHECK_FOR_INTERRUPTS();
    KeyWriter writer{};
    const FoundEvent event = look_in(scheduled_events(), event_key, scope, &writer);
    if (event.place != Place::kNowhere || !writer.is_busy()) return event;
    wait_for(writer);
  }
}

FoundEvent look_in_log(Datum event_key, Datum scope, KeyWriter *writer, Pieces pieces) {
  const storage::Ring &ring = storage::ring(storage::RingName::kLog);
  FoundEvent event{};
  for (int i = pieces == Pieces::kOlder ? 1 : 0; i < ring.count && event.place == Place::kNowhere; ++i)
    event = look_in(piece_of_log(ring.newest(i)), event_key, scope, writer);
  return event;
}

FoundEvent find_event(Datum event_key, Datum scope) {
  const FoundEvent scheduled = find_scheduled_event(event_key, scope);
  if (scheduled.place != Place::kNowhere) return scheduled;
  for (;;) {
    CHECK_FOR_INTERRUPTS();
    KeyWriter writer{};
    const FoundEvent event = look_in_log(event_key, scope, &writer, Pieces::kAll);
    if (event.place != Place::kNowhere || !writer.is_busy()) return event;
    wait_for(writer);
  }
}

void wait_for(const KeyWriter &writer) {
  // A speculative inserter may still back down and go on with its transaction.
  if (writer.inserting && writer.speculation != 0) {
    SpeculativeInsertionWait(writer.xid, writer.speculation);
    return;
  }
  Relation table = table_open(writer.table, AccessShareLock);  // for the error context while waiting
  ItemPointerData tid = writer.tid;
  XactLockTableWait(writer.xid, table, &tid, XLTW_InsertIndex);
  table_close(table, NoLock);
}

bool is_taken(Place place, Datum event_key, Datum scope) {
  const auto taken_in = [&](const EventTable &in) {
    SnapshotData dirty;
    pg::IndexScan scan = begin_key_scan(in, &dirty, event_key, scope);
    bool taken = false;
    while (!taken && scan.next()) taken = !scan.is_taken_back();
    scan.end();
    return taken;
  };
  if (place == Place::kScheduled)
    return !pg::is_untouched(pg::extension().outbox_scheduled) && taken_in(scheduled_events());
  const storage::Ring &ring = storage::ring(storage::RingName::kLog);
  for (int i = 0; i < ring.count; ++i)
    if (taken_in(piece_of_log(ring.pieces[i]))) return true;
  return false;
}

}  // namespace retrysafe::outbox
