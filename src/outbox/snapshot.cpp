#include "outbox/snapshot.hpp"

#include <algorithm>

#include "outbox/cursor.hpp"
#include "outbox/durability.hpp"
#include "outbox/log_columns.hpp"
#include "pg/fault_point.hpp"
#include "pg/index_scan.hpp"
#include "pg/statement.hpp"
#include "storage/ring.hpp"

#include "pg/server.hpp"

namespace retrysafe::outbox {

namespace {

// The server keeps this struct to itself, but it is the stored form of a type and so cannot change.
struct ServerSnapshot {
  int32 header;
  uint32 count;
  uint64 xmin;
  uint64 xmax;
  uint64 xip[FLEXIBLE_ARRAY_MEMBER];
};

ServerSnapshot *to_server(const StoredSnapshot &snapshot) {
  const size_t size = offsetof(ServerSnapshot, xip) + sizeof(uint64) * snapshot.xip_count;
  auto *out = static_cast<ServerSnapshot *>(palloc0(size));
  SET_VARSIZE(out, size);
  out->count = static_cast<uint32>(snapshot.xip_count);
  out->xmin = snapshot.xmin;
  out->xmax = snapshot.xmax;
  std::copy_n(snapshot.xip, snapshot.xip_count, out->xip);
  return out;
}

// Every id in a snapshot is older than `next`, by less than the 2^32 that the short form holds.
uint64 widen(TransactionId xid, FullTransactionId next) {
  if (!TransactionIdIsNormal(xid)) return xid;
  uint32 epoch = EpochFromFullTransactionId(next);
  if (xid > XidFromFullTransactionId(next)) --epoch;
  return (static_cast<uint64>(epoch) << 32) | xid;
}

}  // namespace

int64 last_log_position() {
  LOCAL_FCINFO(call, 1);
  InitFunctionCallInfoData(*call, nullptr, 1, InvalidOid, nullptr, nullptr);
  call->args[0].value = ObjectIdGetDatum(pg::extension().outbox_log_id_seq);
  call->args[0].isnull = false;
  const Datum result = pg_sequence_last_value(call);
  if (RETRYSAFE_FAULT("reader.fresh_sequence") && call->isnull) return 1;
  return call->isnull ? 0 : DatumGetInt64(result);
}

StoredSnapshot take_snapshot(int32 era, int64 first_id) {
  StoredSnapshot s{};
  s.era = era;
  s.first_id = first_id;
  // The order matters: the floor comes before `next`, so that a transaction numbered `next` or above draws
  // its ids above the floor; the ceiling comes after the snapshot, so that nothing the snapshot sees is above
  // it.
  s.floor = pg::as_owner([] { return last_log_position(); });
  Snapshot server = RegisterSnapshot(GetLatestSnapshot());
  const FullTransactionId next = ReadNextFullTransactionId();
  s.ceiling = pg::as_owner([] { return last_log_position(); });

  s.next = U64FromFullTransactionId(next);
  s.xmin = widen(server->xmin, next);
  s.xmax = widen(server->xmax, next);
  // Subtransactions are of no interest: the log holds the number of the whole transaction, and the server
  // lists those in full, however many subtransactions there are.
  auto *xip = static_cast<uint64 *>(palloc(sizeof(uint64) * (server->xcnt + 1)));
  uint64 *end = xip;
  for (uint32 i = 0; i < server->xcnt; ++i) *end++ = widen(server->xip[i], next);
  // The server leaves our own number out, and what we emit in this transaction would count as done.
  const FullTransactionId own = GetTopFullTransactionIdIfAny();
  if (FullTransactionIdIsValid(own) && U64FromFullTransactionId(own) < s.xmax &&
      !RETRYSAFE_FAULT("reader.no_own_xid")) {
    *end++ = U64FromFullTransactionId(own);
    s.xmin = std::min(s.xmin, U64FromFullTransactionId(own));
  }
  // While it is being prepared, a transaction is listed twice.
  std::sort(xip, end);
  end = std::unique(xip, end);
  s.xip = xip;
  s.xip_count = static_cast<int32>(end - xip);
  UnregisterSnapshot(server);
  return s;
}

StoredSnapshot *copy_snapshot(const StoredSnapshot &snapshot, MemoryContext memory) {
  auto *copy = static_cast<StoredSnapshot *>(
      MemoryContextAlloc(memory, sizeof(StoredSnapshot) + sizeof(uint64) * snapshot.xip_count));
  *copy = snapshot;
  auto *xip = reinterpret_cast<uint64 *>(copy + 1);
  std::copy_n(snapshot.xip, snapshot.xip_count, xip);
  copy->xip = xip;
  return copy;
}

bool same_snapshot(const StoredSnapshot &a, const StoredSnapshot &b) {
  return a.era == b.era && a.floor == b.floor && a.xmin == b.xmin && a.xmax == b.xmax && a.next == b.next &&
         a.ceiling == b.ceiling && std::equal(a.xip, a.xip + a.xip_count, b.xip, b.xip + b.xip_count);
}

namespace {

constinit pg::Statement remove_open_window{
    "DELETE FROM @.outbox_windows WHERE destination = $1 AND shard = $2 AND window_no > $3",
    {INT4OID, INT4OID, INT8OID}};

StoredWindow *load_from(int piece, int32 destination, int32 shard, int64 window_no, Snapshot snapshot) {
  const pg::Extension &e = pg::extension();
  ScanKeyData keys[3];
  pg::int4_equals(&keys[0], 1, destination);
  pg::int4_equals(&keys[1], 2, shard);
  pg::int8_compares(&keys[2], 3, BTEqualStrategyNumber, F_INT8EQ, window_no);
  pg::IndexScan scan =
      pg::begin_scan(e.outbox_windows_pieces[piece], e.outbox_windows_pkey_pieces[piece], snapshot, keys, 3);
  StoredWindow *window = nullptr;
  if (scan.next()) {
    window = static_cast<StoredWindow *>(palloc0(sizeof(StoredWindow)));
    bool null;
    StoredSnapshot &s = window->snapshot;
    s.era = DatumGetInt32(scan.datum(window_column::kEra, &null));
    s.floor = DatumGetInt64(scan.datum(window_column::kFloor, &null));
    const auto *server = reinterpret_cast<const ServerSnapshot *>(
        PG_DETOAST_DATUM_COPY(scan.datum(window_column::kSnapshot, &null)));
    s.xmin = server->xmin;
    s.xmax = server->xmax;
    s.xip = server->xip;
    s.xip_count = static_cast<int32>(server->count);
    s.next = DatumGetUInt64(scan.datum(window_column::kNext, &null));
    s.ceiling = DatumGetInt64(scan.datum(window_column::kCeiling, &null));
    window->taken_at = DatumGetTimestampTz(scan.datum(window_column::kTakenAt, &null));
    const Datum resumed_at = scan.datum(window_column::kResumedAt, &null);
    window->resumed_at = null ? -1 : DatumGetInt64(resumed_at);
  }
  scan.end();
  return window;
}

}  // namespace

StoredWindow *load_window(int32 destination, int32 shard, int64 window_no) {
  const storage::RingView view = storage::open_view(storage::RingName::kProgress);
  StoredWindow *window = nullptr;
  for (int i = 0; i < view.ring.count && !window; ++i)
    window = load_from(view.ring.newest(i), destination, shard, window_no, view.snapshot);
  storage::close_view(view);
  if (window) window->snapshot.first_id = first_id_of_era(window->snapshot.era);
  return window;
}

namespace {

constinit pg::Statement select_token{
    "SELECT token FROM @.outbox_shards WHERE destination = $1 AND shard = $2", {INT4OID, INT4OID}};

constinit pg::Statement end_leases{
    "UPDATE @.outbox_shards SET token = token + 1, holder = NULL, holder_pid = NULL"
    " WHERE destination = $1 AND shard = $2",
    {INT4OID, INT4OID}};

constinit pg::Statement count_shards{"SELECT shards FROM @.outbox_destinations WHERE destination = $1",
                                     {INT4OID}};

}  // namespace

void store_window(int32 destination, int32 shard, int64 window_no, const StoredSnapshot &s,
                  int64 resumed_at) {
  const Datum values[]{
      Int32GetDatum(destination), Int32GetDatum(shard),     Int64GetDatum(window_no),
      Int32GetDatum(s.era),       Int64GetDatum(s.floor),   PointerGetDatum(to_server(s)),
      UInt64GetDatum(s.next),     Int64GetDatum(s.ceiling), TimestampTzGetDatum(GetCurrentTimestamp()),
      Int64GetDatum(resumed_at)};
  bool nulls[window_column::kResumedAt]{};
  nulls[window_column::kResumedAt - 1] = resumed_at < 0;
  (void)storage::insert_into_ring(storage::RingName::kProgress, pg::extension().outbox_windows_pieces,
                                  pg::new_row(values, nulls));
}

// A window that was opened and of which nothing was recorded is as good as none.
void store_window(const Batch &b) {
  const int32 destination = b.claim.destination, shard = b.claim.shard;
  if (load_window(destination, shard, b.window_no))
    remove_open_window.run({pg::value(destination), pg::value(shard), pg::value(b.window_no - 1)});
  store_window(destination, shard, b.window_no, b.window, b.resumed_at);
}

void store_batch(const BatchRow &b) {
  const Datum values[]{Int32GetDatum(b.destination),
                       Int32GetDatum(b.shard),
                       Int64GetDatum(b.seq),
                       Int64GetDatum(b.window_no),
                       Int64GetDatum(b.position),
                       Int64GetDatum(b.token),
                       Int32GetDatum(b.delivered),
                       Int32GetDatum(b.parked),
                       Int64GetDatum(b.total_delivered),
                       Int64GetDatum(b.total_parked),
                       TimestampTzGetDatum(GetCurrentTimestamp())};
  const bool nulls[batch_column::kPublishedAt]{};
  (void)storage::insert_into_ring(storage::RingName::kProgress, pg::extension().outbox_batches_pieces,
                                  pg::new_row(values, nulls));
}

namespace {

// Inside pg::spi.
int32 shards_of(int32 destination) {
  count_shards.run({pg::value(destination)});
  return pg::Row(0).int32_at(1);
}

// The first cursor of a shard: at the end of a window.
void store_first_cursor(int32 destination, int32 shard, int64 window_no, const StoredSnapshot &window,
                        int64 total_delivered, int64 total_parked) {
  store_window(destination, shard, window_no, window, -1);
  select_token.run({pg::value(destination), pg::value(shard)});
  store_batch({destination, shard, 0, window_no, window.ceiling, pg::Row(0).int64_at(1), 0, 0,
               total_delivered, total_parked});
}

}  // namespace

void store_start(int32 destination, const StoredSnapshot &start) {
  pg::spi([&] {
    const int32 shards = shards_of(destination);
    for (int32 shard = 0; shard < shards; ++shard) store_first_cursor(destination, shard, 0, start, 0, 0);
  });
}

void store_continuation(int32 destination, const StoredSnapshot &start, const StoredSnapshot &done,
                        int64 total_delivered, int64 total_parked) {
  pg::spi([&] {
    const int32 shards = shards_of(destination);
    for (int32 shard = 0; shard < shards; ++shard) {
      store_window(destination, shard, 0, start, -1);
      store_first_cursor(destination, shard, 1, done, shard == 0 ? total_delivered : 0,
                         shard == 0 ? total_parked : 0);
    }
  });
}

void begin_era_for_shard(int32 destination, int32 shard, const StoredSnapshot &snapshot) {
  const Cursor cursor = load_cursor(destination, shard);
  flush_wal();  // as for every window before something of it is published
  pg::spi([&] {
    // Whoever holds a batch of the old era is too late with it.
    end_leases.run({pg::value(destination), pg::value(shard)});
    remove_open_window.run({pg::value(destination), pg::value(shard), pg::value(cursor.window_no)});
    store_window(destination, shard, cursor.window_no + 1, snapshot, cursor.position);
  });
}

}  // namespace retrysafe::outbox
