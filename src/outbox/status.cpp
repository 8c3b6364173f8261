#include "outbox/status.hpp"

#include <algorithm>

#include "core/routing.hpp"
#include "outbox/cursor.hpp"
#include "outbox/log_columns.hpp"
#include "outbox/progress.hpp"
#include "outbox/shard.hpp"
#include "outbox/snapshot.hpp"
#include "pg/boundary.hpp"
#include "pg/index_scan.hpp"
#include "pg/statement.hpp"
#include "storage/ring.hpp"

#include "pg/server.hpp"

namespace retrysafe::outbox {

namespace {

// An event of the log, as far as its way to a destination depends on it.
struct Traits {
  int64 id;
  uint64 txid;
  const text *event_type;
  const text *ordering_key;  // null: none
};

std::string_view view(const text *t) {
  return {VARDATA_ANY(t), VARSIZE_ANY_EXHDR(t)};
}

bool wants(ArrayType *event_types, const text *event_type) {
  if (!event_types) return true;
  ArrayIterator iterator = array_create_iterator(event_types, 0, nullptr);
  Datum pattern;
  bool null;
  bool found = false;
  while (!found && array_iterate(iterator, &pattern, &null))
    found = !null && type_matches(view(DatumGetTextPP(pattern)), view(event_type));
  array_free_iterator(iterator);
  return found;
}

int32 shard_of(const Traits &event, int32 shards) {
  const auto count = static_cast<uint32>(shards);
  return static_cast<int32>(event.ordering_key ? shard_of_key(view(event.ordering_key), count)
                                               : retrysafe::shard_of(event.id, count));
}

int64 first_window(int32 destination, int32 shard) {
  const pg::Extension &e = pg::extension();
  ScanKeyData keys[2];
  pg::int4_equals(&keys[0], 1, destination);
  pg::int4_equals(&keys[1], 2, shard);
  const storage::RingView view = storage::open_view(storage::RingName::kProgress);
  int64 number = -1;
  for (int i = 0; i < view.ring.count && number < 0; ++i) {
    const int piece = view.ring.pieces[i];
    pg::IndexScan scan = pg::begin_scan(e.outbox_windows_pieces[piece], e.outbox_windows_pkey_pieces[piece],
                                        view.snapshot, keys, 2);
    bool null;
    if (scan.next()) number = DatumGetInt64(scan.datum(window_column::kWindowNo, &null));
    scan.end();
  }
  storage::close_view(view);
  return number;
}

bool window_sees(int32 destination, int32 shard, int64 window_no, const Traits &event) {
  StoredWindow *window = load_window(destination, shard, window_no);
  const bool seen = window && window->snapshot.sees(event.id, event.txid);
  if (window) pfree(window);
  return seen;
}

// The window that brought the event: windows are nested, so it is the first one that sees it. -1: none does.
int64 window_of(int32 destination, int32 shard, const Traits &event, int64 last) {
  int64 low = first_window(destination, shard);
  if (low < 0 || !window_sees(destination, shard, last, event)) return -1;
  int64 high = last;
  while (low < high) {
    const int64 middle = low + (high - low) / 2;
    if (window_sees(destination, shard, middle, event))
      high = middle;
    else
      low = middle + 1;
  }
  // A window that was left half read: the rest came with the next one.
  for (; low < last; ++low) {
    StoredWindow *next = load_window(destination, shard, low + 1);
    const bool left_before = next && next->resumed_at >= 0 && event.id > next->resumed_at;
    if (next) pfree(next);
    if (!left_before) break;
  }
  return low;
}

enum class Fate { kNotWanted, kPending, kRecorded };

struct Parked {
  bool found;
  Fate fate;
  TimestampTz settled_at;
};

Parked parked(int32 destination, int32 shard, int64 id) {
  const pg::Extension &e = pg::extension();
  ScanKeyData keys[3];
  pg::int4_equals(&keys[0], 1, destination);
  pg::int4_equals(&keys[1], 2, shard);
  pg::int8_compares(&keys[2], 3, BTEqualStrategyNumber, F_INT8EQ, id);
  Snapshot snapshot = pg::latest_snapshot_of(e.outbox_parked);
  pg::IndexScan scan = pg::begin_scan(e.outbox_parked, e.outbox_parked_pkey, snapshot, keys, 3);
  Parked result{};
  result.found = scan.next();
  if (result.found) {
    bool null;
    const std::string_view state = view(DatumGetTextPP(scan.datum(parked_column::kState, &null)));
    result.fate = state == "delivered"   ? Fate::kRecorded
                  : state == "discarded" ? Fate::kNotWanted
                                         : Fate::kPending;
    result.settled_at = DatumGetTimestampTz(scan.datum(parked_column::kSettledAt, &null));
  }
  scan.end();
  UnregisterSnapshot(snapshot);
  return result;
}

Fate fate_at(int32 destination, int32 shards, ArrayType *event_types, const Traits &event,
             TimestampTz *when) {
  if (!wants(event_types, event.event_type)) return Fate::kNotWanted;
  const int32 shard = shard_of(event, shards);
  BatchEnd batch;
  if (!last_batch(destination, shard, &batch)) return Fate::kPending;
  const int64 window = window_of(destination, shard, event, batch.window_no);
  if (window == 0) return Fate::kNotWanted;  // from before the start of the destination
  if (window < 0 || !batch_covering(destination, shard, window, event.id, &batch)) return Fate::kPending;
  const Parked exception = parked(destination, shard, event.id);
  *when = exception.found ? exception.settled_at : batch.published_at;
  return exception.found ? exception.fate : Fate::kRecorded;
}

Traits traits(pg::IndexScan &scan) {
  bool null;
  Traits event;
  event.id = DatumGetInt64(scan.datum(log_column::kId, &null));
  event.txid = DatumGetUInt64(scan.datum(log_column::kTxid, &null));
  event.event_type = DatumGetTextPP(scan.datum(log_column::kEventType, &null));
  const Datum key = scan.datum(log_column::kOrderingKey, &null);
  event.ordering_key = null ? nullptr : DatumGetTextPP(key);
  return event;
}

constinit pg::Statement select_parked{
    "SELECT FROM @.outbox_parked WHERE destination = $1 AND state IN ('retry', 'blocked', 'dead') LIMIT 1",
    {INT4OID}};

}  // namespace

// Rows at or below every shard's floor and cursor whose transactions ended before every shard's snapshot are
// recorded; the others are found by id or by txid.
bool has_pending(int32 destination, int32 shards, ArrayType *event_types, const StoredSnapshot &upto) {
  if (pg::spi([&] { return select_parked.run({pg::value(destination)}) > 0; })) return true;
  int64 floor = upto.floor;
  uint64 xmin = upto.xmin;
  for (int32 shard = 0; shard < shards; ++shard) {
    const Cursor cursor = load_cursor(destination, shard);
    const StoredWindow *window = load_window(destination, shard, cursor.window_no);
    if (!window) return true;
    // What is left of windows before it is among what is read by id.
    const bool half_read = cursor.position < window->snapshot.ceiling;
    const int64 own_floor = half_read && window->resumed_at >= 0 ? 0 : window->snapshot.floor;
    floor = std::min({floor, cursor.position, own_floor});
    xmin = std::min(xmin, window->snapshot.xmin);
  }

  const pg::Extension &e = pg::extension();
  ScanKeyData by_id, by_txid;
  pg::int8_compares(&by_id, 1, BTGreaterStrategyNumber, F_INT8GT, floor);
  pg::xid8_compares(&by_txid, 1, BTGreaterEqualStrategyNumber, F_XID8GE, xmin);
  const storage::RingView view = storage::open_view(storage::RingName::kLog);
  bool found = false;
  const auto look = [&](Oid table, Oid index, ScanKey key) {
    pg::IndexScan scan = pg::begin_scan(table, index, view.snapshot, key, 1);
    while (!found && scan.next()) {
      CHECK_FOR_INTERRUPTS();
      const Traits event = traits(scan);
      TimestampTz when;
      found = upto.sees(event.id, event.txid) &&
              fate_at(destination, shards, event_types, event, &when) == Fate::kPending;
    }
    scan.end();
  };
  for (int i = 0; i < view.ring.count; ++i) {
    const int piece = view.ring.pieces[i];
    look(e.outbox_log_pieces[piece], e.outbox_log_pkey_pieces[piece], &by_id);
    look(e.outbox_log_pieces[piece], e.outbox_log_txid_pieces[piece], &by_txid);
  }
  storage::close_view(view);
  return found;
}

}  // namespace retrysafe::outbox

using namespace retrysafe;
using namespace retrysafe::outbox;

// For the view outbox_events: when a destination recorded an event; infinity while it has not, null where it
// does not want the event.
RETRYSAFE_SQL_FUNCTION(retrysafe_outbox_recorded_at) {
  for (int i : {0, 1, 3, 4, 5})
    if (PG_ARGISNULL(i)) PG_RETURN_NULL();
  const Traits event{PG_GETARG_INT64(3), DatumGetUInt64(PG_GETARG_DATUM(4)), PG_GETARG_TEXT_PP(5),
                     PG_ARGISNULL(6) ? nullptr : PG_GETARG_TEXT_PP(6)};
  const int32 shards = PG_GETARG_INT32(1);
  if (shards < 1) PG_RETURN_NULL();
  TimestampTz when = 0;
  switch (fate_at(PG_GETARG_INT32(0), shards, PG_ARGISNULL(2) ? nullptr : PG_GETARG_ARRAYTYPE_P(2), event,
                  &when)) {
    case Fate::kNotWanted:
      PG_RETURN_NULL();
    case Fate::kPending:
      PG_RETURN_TIMESTAMPTZ(DT_NOEND);
    case Fate::kRecorded:
      break;
  }
  PG_RETURN_TIMESTAMPTZ(when);
}
