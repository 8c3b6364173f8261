#include "outbox/parked.hpp"

#include <algorithm>
#include <bit>
#include <cstring>

#include "core/backoff.hpp"
#include "core/batch_handle.hpp"
#include "outbox/event_reading.hpp"
#include "outbox/log_columns.hpp"
#include "pg/error.hpp"
#include "pg/extension.hpp"
#include "pg/index_scan.hpp"
#include "pg/random.hpp"
#include "pg/statement.hpp"

#include "pg/server.hpp"

namespace retrysafe::outbox {

namespace {

// How many rows of the index of due ones are looked at in one go.
constexpr int kDueBound = 1000;

// The waiting, or the dead, events of a key above a position, in order.
pg::IndexScan scan_key(Oid index, int32 destination, int32 shard, const char *ordering_key, int64 after,
                       ::Snapshot snapshot) {
  ScanKeyData keys[4];
  pg::int4_equals(&keys[0], 1, destination);
  pg::int4_equals(&keys[1], 2, shard);
  pg::text_equals(&keys[2], 3, CStringGetTextDatum(ordering_key));
  pg::int8_compares(&keys[3], 4, BTGreaterStrategyNumber, F_INT8GT, after);
  return pg::begin_scan(pg::extension().outbox_parked, index, snapshot, keys, 4);
}

int64 id_of(pg::IndexScan *scan) {
  bool null;
  return DatumGetInt64(scan->datum(parked_column::kId, &null));
}

uint64 txid_of(pg::IndexScan *scan) {
  bool null;
  return DatumGetUInt64(scan->datum(parked_column::kTxid, &null));
}

TimestampTz retry_at_of(pg::IndexScan *scan, TimestampTz where_null) {
  bool null;
  const Datum retry_at = scan->datum(parked_column::kRetryAt, &null);
  return null ? where_null : DatumGetTimestampTz(retry_at);
}

const char *ordering_key_of(pg::IndexScan *scan) {
  bool null;
  const Datum key = scan->datum(parked_column::kOrderingKey, &null);
  return null ? nullptr : TextDatumGetCString(key);
}

bool state_is(pg::IndexScan *scan, const char *state) {
  bool null;
  const text *value = DatumGetTextPP(scan->datum(parked_column::kState, &null));
  return VARSIZE_ANY_EXHDR(value) == strlen(state) && memcmp(VARDATA_ANY(value), state, strlen(state)) == 0;
}

// The first event of the key in that index; PG_INT64_MAX when there is none.
int64 first_of_key(Oid index, int32 destination, int32 shard, const char *ordering_key, ::Snapshot snapshot) {
  pg::IndexScan scan = scan_key(index, destination, shard, ordering_key, PG_INT64_MIN, snapshot);
  const int64 id = scan.next() ? id_of(&scan) : PG_INT64_MAX;
  scan.end();
  return id;
}

// The smallest position of the key that holds back later ones.
int64 first_holder(const Destination &d, int32 shard, const char *ordering_key, ::Snapshot snapshot) {
  const pg::Extension &e = pg::extension();
  const int64 waiting = first_of_key(e.outbox_parked_waiting, d.destination, shard, ordering_key, snapshot);
  if (!d.block_when_exhausted) return waiting;
  return std::min(waiting, first_of_key(e.outbox_parked_dead, d.destination, shard, ordering_key, snapshot));
}

bool any_in(Oid index, int32 destination, int32 shard, ::Snapshot snapshot) {
  ScanKeyData keys[2];
  pg::int4_equals(&keys[0], 1, destination);
  pg::int4_equals(&keys[1], 2, shard);
  pg::IndexScan scan = pg::begin_scan(pg::extension().outbox_parked, index, snapshot, keys, 2);
  const bool any = scan.next();
  scan.end();
  return any;
}

Event event_at(pg::IndexScan *scan, const Uuid &log, bool bodies) {
  bool null;
  Event event = read_event(scan->slot, kParkedColumns, log, bodies);
  event.id = id_of(scan);
  event.txid = txid_of(scan);
  event.parked = true;
  event.attempts = DatumGetInt32(scan->datum(parked_column::kAttempts, &null));
  const int32 given_back = DatumGetInt32(scan->datum(parked_column::kGivenBack, &null));
  event.turn =
      first_number(std::bit_cast<Uuid>(event.event_id)) + static_cast<uint32>(event.attempts + given_back);
  return event;
}

}  // namespace

int32 read_due_parked(const Destination &d, int32 shard, const OpenWindow &open, const Uuid &log, int32 most,
                      int64 bytes, Event *events) {
  const pg::Extension &e = pg::extension();
  ::Snapshot snapshot = pg::latest_snapshot_of(e.outbox_parked);
  const TimestampTz now = GetCurrentTimestamp();
  ScanKeyData keys[3];
  pg::int4_equals(&keys[0], 1, d.destination);
  pg::int4_equals(&keys[1], 2, shard);
  ScanKeyEntryInitialize(&keys[2], 0, 3, BTLessEqualStrategyNumber, InvalidOid, InvalidOid, F_TIMESTAMPTZ_LE,
                         TimestampTzGetDatum(now));
  pg::IndexScan due = pg::begin_scan(e.outbox_parked, e.outbox_parked_due, snapshot, keys, 3);
  int32 count = 0;
  const auto got_past = [&](pg::IndexScan *scan) { return open.is_done(id_of(scan), txid_of(scan)); };
  const auto add = [&](pg::IndexScan *scan) {
    events[count] = event_at(scan, log, true);
    bytes -= body_size(events[count]);
    if (count > 0 && bytes < 0) return false;
    return ++count < most && bytes > 0;
  };
  bool room = true;
  for (int looked_at = 0; room && looked_at < kDueBound && due.next(); ++looked_at) {
    const char *key = ordering_key_of(&due);
    const int64 head = id_of(&due);
    if (key && (!got_past(&due) || first_holder(d, shard, key, snapshot) != head)) continue;
    room = add(&due);
    if (!key) continue;
    const int64 dead = d.block_when_exhausted
                           ? first_of_key(e.outbox_parked_dead, d.destination, shard, key, snapshot)
                           : PG_INT64_MAX;
    pg::IndexScan behind = scan_key(e.outbox_parked_waiting, d.destination, shard, key, head, snapshot);
    while (room && behind.next() && id_of(&behind) < dead && got_past(&behind) &&
           retry_at_of(&behind, DT_NOBEGIN) <= now)
      room = add(&behind);
    behind.end();
  }
  due.end();
  UnregisterSnapshot(snapshot);
  return count;
}

bool read_waiting(int32 destination, int32 shard, const Uuid &log, int64 id, Event *event) {
  ::Snapshot snapshot = pg::latest_snapshot_of(pg::extension().outbox_parked);
  ScanKeyData keys[3];
  pg::int4_equals(&keys[0], 1, destination);
  pg::int4_equals(&keys[1], 2, shard);
  pg::int8_compares(&keys[2], 3, BTEqualStrategyNumber, F_INT8EQ, id);
  const pg::Extension &e = pg::extension();
  pg::IndexScan scan = pg::begin_scan(e.outbox_parked, e.outbox_parked_pkey, snapshot, keys, 3);
  const bool found = scan.next() && (state_is(&scan, "retry") || state_is(&scan, "blocked"));
  if (found) *event = event_at(&scan, log, false);
  scan.end();
  UnregisterSnapshot(snapshot);
  return found;
}

bool any_key_is_held(const Destination &d, int32 shard) {
  const pg::Extension &e = pg::extension();
  ::Snapshot snapshot = pg::latest_snapshot_of(e.outbox_parked);
  const bool any = any_in(e.outbox_parked_waiting, d.destination, shard, snapshot) ||
                   (d.block_when_exhausted && any_in(e.outbox_parked_dead, d.destination, shard, snapshot));
  UnregisterSnapshot(snapshot);
  return any;
}

bool is_held(const Destination &d, int32 shard, const char *ordering_key, int64 id) {
  ::Snapshot snapshot = pg::latest_snapshot_of(pg::extension().outbox_parked);
  const bool held = first_holder(d, shard, ordering_key, snapshot) < id;
  UnregisterSnapshot(snapshot);
  return held;
}

int32 find_parked(int32 destination, int32 shard, const Event *events, int32 count, bool *parked) {
  if (count == 0) return 0;
  const pg::Extension &e = pg::extension();
  ::Snapshot snapshot = pg::latest_snapshot_of(e.outbox_parked);
  ScanKeyData keys[4];
  pg::int4_equals(&keys[0], 1, destination);
  pg::int4_equals(&keys[1], 2, shard);
  pg::int8_compares(&keys[2], 3, BTGreaterEqualStrategyNumber, F_INT8GE, events[0].id);
  pg::int8_compares(&keys[3], 3, BTLessEqualStrategyNumber, F_INT8LE, events[count - 1].id);
  pg::IndexScan scan = pg::begin_scan(e.outbox_parked, e.outbox_parked_pkey, snapshot, keys, 4);
  int32 found = 0;
  if (scan.next()) {
    for (int32 i = 0; i < count; ++i) {
      keys[2].sk_argument = keys[3].sk_argument = Int64GetDatum(events[i].id);
      index_rescan(scan.scan, keys, 4, nullptr, 0);
      parked[i] = scan.next();
      found += parked[i];
    }
  }
  scan.end();
  UnregisterSnapshot(snapshot);
  return found;
}

TimestampTz next_parked_due(int32 destination, int32 shard) {
  const pg::Extension &e = pg::extension();
  ::Snapshot snapshot = pg::latest_snapshot_of(e.outbox_parked);
  ScanKeyData keys[2];
  pg::int4_equals(&keys[0], 1, destination);
  pg::int4_equals(&keys[1], 2, shard);
  pg::IndexScan scan = pg::begin_scan(e.outbox_parked, e.outbox_parked_due, snapshot, keys, 2);
  TimestampTz due = DT_NOEND;
  if (scan.next()) due = retry_at_of(&scan, DT_NOEND);
  scan.end();
  UnregisterSnapshot(snapshot);
  return due;
}

namespace {

// Copied from the log, which still has the event: its shard has not got past it.
constinit pg::Statement insert_parked{
    "INSERT INTO @.outbox_parked (destination, shard, id, state, attempts, retry_at, reason, settled_at, "
    "txid, created_at, deliver_after, scope, idempotency_key, event_key, event_type, ordering_key, payload, "
    "headers)"
    " SELECT $1, $2, id, $4, $5, $6, $7, $8, txid, created_at, deliver_after, scope, idempotency_key,"
    " coalesce(event_key, idempotency_key || '~' || event_number), event_type, ordering_key, payload, headers"
    " FROM @.outbox_log WHERE id = $3"
    " ON CONFLICT (destination, shard, id) DO NOTHING",
    {INT4OID, INT4OID, INT8OID, TEXTOID, INT4OID, TIMESTAMPTZOID, TEXTOID, TIMESTAMPTZOID}};

constinit pg::Statement update_failed{
    "UPDATE @.outbox_parked SET state = $4, attempts = $5, retry_at = $6, reason = $7, settled_at = $8"
    " WHERE destination = $1 AND shard = $2 AND id = $3 AND state IN ('retry', 'blocked')",
    {INT4OID, INT4OID, INT8OID, TEXTOID, INT4OID, TIMESTAMPTZOID, TEXTOID, TIMESTAMPTZOID}};

constinit pg::Statement update_given_back{
    "UPDATE @.outbox_parked SET state = 'blocked', given_back = given_back + 1"
    " WHERE destination = $1 AND shard = $2 AND id = $3 AND state IN ('retry', 'blocked')",
    {INT4OID, INT4OID, INT8OID}};

constinit pg::Statement update_delivered{
    "UPDATE @.outbox_parked SET state = 'delivered', retry_at = NULL, settled_at = clock_timestamp()"
    " WHERE destination = $1 AND shard = $2 AND id = $3 AND state IN ('retry', 'blocked')",
    {INT4OID, INT4OID, INT8OID}};

// One that failed while it was not first keeps its time, and waits for that too when its turn comes.
constinit pg::Statement make_first{
    "UPDATE @.outbox_parked SET state = 'retry', retry_at = greatest(retry_at, clock_timestamp())"
    " WHERE destination = $1 AND shard = $2 AND id = $3 AND state = 'blocked'",
    {INT4OID, INT4OID, INT8OID}};

constinit pg::Statement make_follower{
    "UPDATE @.outbox_parked SET state = 'blocked' WHERE destination = $1 AND shard = $2 AND id = $3 AND "
    "state = 'retry'",
    {INT4OID, INT4OID, INT8OID}};

constinit pg::Statement select_keys_behind_dead{
    "SELECT DISTINCT shard, ordering_key FROM @.outbox_parked d WHERE destination = $1 AND state = 'dead'"
    " AND EXISTS (SELECT FROM @.outbox_parked w WHERE w.destination = d.destination AND w.shard = d.shard"
    " AND w.ordering_key = d.ordering_key AND w.state IN ('retry', 'blocked'))",
    {INT4OID}};

// Progress goes past what was parked: it has to be there, from now on or from before.
void park(int32 destination, int32 shard, const Event &event, const char *state, int32 attempts,
          const pg::Parameter &retry_at, const char *reason, const pg::Parameter &settled_at) {
  bool is_there =
      insert_parked.run({pg::value(destination), pg::value(shard), pg::value(event.id), pg::value(state),
                         pg::value(attempts), retry_at, pg::value(reason), settled_at}) == 1;
  if (!is_there) (void)find_parked(destination, shard, &event, 1, &is_there);
  if (!is_there) pg::raise(kRowRefused, pg::kRowRefusedHint, "the event is not parked");
}

// What becomes of an event that has failed once more.
struct Failure {
  const char *state;
  int32 attempts;
  pg::Parameter retry_at, settled_at;
  bool holds_back;  // later events of its key
};

Failure failure_of(const Destination &d, const Event &event, const FailedAttempt &attempt) {
  const int32 attempts = event.attempts + 1;
  const TimestampTz now = GetCurrentTimestamp();
  if (attempt.final || attempts >= d.max_attempts)
    return {"dead", attempts, pg::null_value(), pg::value(TimestampTzGetDatum(now)), d.block_when_exhausted};
  return {"retry", attempts, pg::value(TimestampTzGetDatum(now + attempt.wait_us)), pg::null_value(), true};
}

}  // namespace

int64 backoff_of(const Destination &d, const Event &event) {
  return backoff(d.backoff_us, d.backoff_max_us, event.attempts + 1, pg::random_uint32());
}

bool park_failed(const Destination &d, int32 shard, const Event &event, const FailedAttempt &attempt) {
  const Failure failure = failure_of(d, event, attempt);
  park(d.destination, shard, event, failure.state, failure.attempts, failure.retry_at, attempt.reason,
       failure.settled_at);
  return failure.holds_back;
}

bool fail_again(const Destination &d, int32 shard, const Event &event, const FailedAttempt &attempt) {
  const Failure failure = failure_of(d, event, attempt);
  update_failed.run({pg::value(d.destination), pg::value(shard), pg::value(event.id),
                     pg::value(failure.state), pg::value(failure.attempts), failure.retry_at,
                     pg::value(attempt.reason), failure.settled_at});
  return failure.holds_back;
}

void park_blocked(int32 destination, int32 shard, const Event &event) {
  park(destination, shard, event, "blocked", event.attempts, pg::null_value(), nullptr, pg::null_value());
}

void park_untried(int32 destination, int32 shard, const Event &event) {
  park(destination, shard, event, "retry", event.attempts,
       pg::value(TimestampTzGetDatum(GetCurrentTimestamp())), nullptr, pg::null_value());
}

void give_back(int32 destination, int32 shard, int64 id) {
  update_given_back.run({pg::value(destination), pg::value(shard), pg::value(id)});
}

void settle_delivered(int32 destination, int32 shard, int64 id) {
  update_delivered.run({pg::value(destination), pg::value(shard), pg::value(id)});
}

void restore_head(const Destination &d, int32 shard, const char *ordering_key) {
  if (!ordering_key) return;
  const pg::Extension &e = pg::extension();
  ::Snapshot snapshot = pg::latest_snapshot_of(e.outbox_parked);
  const int64 first = first_of_key(e.outbox_parked_waiting, d.destination, shard, ordering_key, snapshot);
  const bool held = d.block_when_exhausted &&
                    first_of_key(e.outbox_parked_dead, d.destination, shard, ordering_key, snapshot) < first;
  const int64 head = held ? PG_INT64_MAX : first;
  bool head_is_retry = false;
  // One that was first stays behind each event that was parked or revived in front of it.
  pg::IndexScan scan =
      scan_key(e.outbox_parked_retry, d.destination, shard, ordering_key, PG_INT64_MIN, snapshot);
  while (scan.next()) {
    const int64 id = id_of(&scan);
    if (id == head)
      head_is_retry = true;
    else
      make_follower.run({pg::value(d.destination), pg::value(shard), pg::value(id)});
  }
  scan.end();
  UnregisterSnapshot(snapshot);
  if (head != PG_INT64_MAX && !head_is_retry)
    make_first.run({pg::value(d.destination), pg::value(shard), pg::value(head)});
}

void restore_heads_behind_dead(const Destination &d) {
  struct Key {
    int32 shard;
    const char *ordering_key;
  };
  MemoryContext memory = CurrentMemoryContext;
  const uint64 count = select_keys_behind_dead.run({pg::value(d.destination)});
  auto *keys = static_cast<Key *>(MemoryContextAllocHuge(memory, (count + 1) * sizeof(Key)));
  for (uint64 i = 0; i < count; ++i) keys[i] = {pg::Row(i).int32_at(1), pg::Row(i).text_at(2, memory)};
  for (uint64 i = 0; i < count; ++i) restore_head(d, keys[i].shard, keys[i].ordering_key);
}

}  // namespace retrysafe::outbox
