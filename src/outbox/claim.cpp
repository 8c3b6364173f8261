// Claims: the right to work a shard for a while.
#include <cstring>

#include "outbox/engine.hpp"
#include "outbox/shard.hpp"
#include "pg/error.hpp"
#include "pg/index_scan.hpp"
#include "pg/statement.hpp"

#include "pg/server.hpp"

namespace retrysafe::outbox {

namespace {

// A back-off that began later than now: the clock has been set back since, and its time means nothing any
// more.
#define SHARD_COLUMNS                                                  \
  "shard, token, holder, holder_pid, timeline, lease_until, failures," \
  " CASE WHEN error_at <= clock_timestamp() THEN retry_at END"

ShardRow shard_row(uint64 number, int first_column, MemoryContext memory) {
  const pg::Row row(number);
  ShardRow s;
  s.shard = row.int32_at(first_column);
  s.token = row.int64_at(first_column + 1);
  s.holder = row.text_at(first_column + 2, memory);
  s.holder_pid = row.is_null(first_column + 3) ? 0 : row.int32_at(first_column + 3);
  s.timeline = static_cast<TimeLineID>(row.int32_at(first_column + 4));
  s.lease_until =
      row.is_null(first_column + 5) ? DT_NOBEGIN : DatumGetTimestampTz(row.datum(first_column + 5));
  s.failures = row.int32_at(first_column + 6);
  s.retry_at = row.is_null(first_column + 7) ? DT_NOBEGIN : DatumGetTimestampTz(row.datum(first_column + 7));
  return s;
}

constinit pg::Statement lock_waiting{"SELECT " SHARD_COLUMNS
                                     " FROM @.outbox_shards WHERE destination = $1 AND shard = $2 FOR UPDATE",
                                     {INT4OID, INT4OID}};
constinit pg::Statement lock_skipping{
    "SELECT " SHARD_COLUMNS
    " FROM @.outbox_shards WHERE destination = $1 AND shard = $2 FOR UPDATE SKIP LOCKED",
    {INT4OID, INT4OID}};
constinit pg::Statement lock_all{
    "SELECT FROM @.outbox_shards WHERE destination = $1 ORDER BY shard FOR UPDATE", {INT4OID}};
constinit pg::Statement select_failures{
    "SELECT FROM @.outbox_shards WHERE destination = $1 AND shard = $2 AND failures > 0", {INT4OID, INT4OID}};
constinit pg::Statement select_shards{
    "SELECT " SHARD_COLUMNS " FROM @.outbox_shards WHERE destination = $1 ORDER BY shard", {INT4OID}};

// For workers: shards in back-off rest, and so do those that pull clients have to themselves.
constinit pg::Statement select_candidates{
    "SELECT s.destination, s.shard, s.token, s.holder, s.holder_pid, s.timeline, s.lease_until, s.failures,"
    " s.retry_at FROM @.outbox_shards s JOIN @.outbox_destinations d ON d.destination = s.destination"
    " WHERE ($1 = 0 OR d.destination = $1) AND d.workers AND NOT d.paused"
    " AND (s.retry_at IS NULL OR s.retry_at <= clock_timestamp() OR s.error_at > clock_timestamp())"
    " ORDER BY s.lease_until NULLS FIRST, s.destination, s.shard",
    {INT4OID}};

constinit pg::Statement update_holder{
    "UPDATE @.outbox_shards SET token = token + 1, holder = $3, holder_pid = $4, timeline = $5, lease_until "
    "= $6"
    " WHERE destination = $1 AND shard = $2 RETURNING token",
    {INT4OID, INT4OID, TEXTOID, INT4OID, INT4OID, TIMESTAMPTZOID}};
constinit pg::Statement update_lease{
    "UPDATE @.outbox_shards SET lease_until = $3 WHERE destination = $1 AND shard = $2",
    {INT4OID, INT4OID, TIMESTAMPTZOID}};
constinit pg::Statement clear_holder{
    // The end of the lease stays: the shard that was not worked for the longest time is claimed first.
    "UPDATE @.outbox_shards SET holder = NULL, holder_pid = NULL, lease_until = clock_timestamp()"
    " WHERE destination = $1 AND shard = $2",
    {INT4OID, INT4OID}};

constinit pg::Statement select_destination{
    "SELECT destination, name, kind, options::text, run_as, event_types, shards, max_attempts,"
    " (extract(epoch FROM backoff) * 1000000)::bigint, (extract(epoch FROM backoff_max) * 1000000)::bigint,"
    " on_exhausted = 'block', batch_events, batch_bytes, (extract(epoch FROM lease) * 1000000)::bigint, "
    "paused,"
    " xmin, lost_at IS NOT NULL FROM @.outbox_destinations WHERE destination = $1",
    {INT4OID}};
constinit pg::Statement find_destination{"SELECT destination FROM @.outbox_destinations WHERE name = $1",
                                         {TEXTOID}};

void read_types(const pg::Row &row, int column, MemoryContext memory, Destination *d) {
  d->type_count = -1;
  struct varlena *array = row.varlena_at(column, memory);
  if (!array) return;
  Datum *types;
  bool *nulls;
  int count;
  deconstruct_array(reinterpret_cast<ArrayType *>(array), TEXTOID, -1, false, TYPALIGN_INT, &types, &nulls,
                    &count);
  auto **texts = static_cast<const char **>(MemoryContextAlloc(memory, sizeof(char *) * (count + 1)));
  int kept = 0;
  uint64 digest = 1;  // no type at all is another choice than all of them
  for (int i = 0; i < count; ++i) {
    if (nulls[i]) continue;
    texts[kept++] = MemoryContextStrdup(memory, TextDatumGetCString(types[i]));
    const char *type = texts[kept - 1];
    digest = hash_bytes_extended(reinterpret_cast<const unsigned char *>(type),
                                 static_cast<int>(strlen(type)), digest);
  }
  d->types = texts;
  d->types_digest = digest;
  d->type_count = kept;
}

}  // namespace

const char *session_name(const char *kind) {
  // Start time and pid, as log_line_prefix %c shows them.
  return psprintf("%s %lx.%x", kind, static_cast<unsigned long>(MyStartTime),
                  static_cast<unsigned>(MyProcPid));
}

bool is_free(const ShardRow &row, TimestampTz now) {
  if (!row.holder || row.lease_until <= now || row.timeline != GetWALInsertionTimeLine()) return true;
  if (row.holder_pid == 0) return row.lease_until > now + kLongestLeaseUs;  // the clock has been set back
  // A process that took over the pid of a dead worker passes for it until the lease ends, unless it is this
  // one.
  if (row.holder_pid == MyProcPid) return strcmp(row.holder, session_name("worker")) != 0;
  return BackendPidGetProc(row.holder_pid) == nullptr;
}

bool lock_shard(int32 destination, int32 shard, bool wait, ShardRow *row) {
  MemoryContext memory = CurrentMemoryContext;
  pg::Statement &statement = wait ? lock_waiting : lock_skipping;
  if (statement.run({pg::value(destination), pg::value(shard)}) == 0) return false;
  *row = shard_row(0, 1, memory);
  return true;
}

void lock_all_shards(int32 destination) {
  lock_all.run({pg::value(destination)});
}

int32 list_shards(int32 destination, MemoryContext memory, ShardRow **rows) {
  const auto count = static_cast<int32>(select_shards.run({pg::value(destination)}));
  *rows = static_cast<ShardRow *>(MemoryContextAlloc(memory, sizeof(ShardRow) * (count + 1)));
  for (int32 i = 0; i < count; ++i) (*rows)[i] = shard_row(i, 1, memory);
  return count;
}

bool is_backing_off(int32 destination, int32 shard) {
  return select_failures.run({pg::value(destination), pg::value(shard)}) > 0;
}

Claim take_shard(int32 destination, const ShardRow &row, const Holder &holder, TimestampTz lease_until) {
  update_holder.run({pg::value(destination), pg::value(row.shard), pg::value(holder.name),
                     holder.pid == 0 ? pg::null_value() : pg::value(holder.pid),
                     pg::value(static_cast<int32>(GetWALInsertionTimeLine())),
                     pg::value(TimestampTzGetDatum(lease_until))});
  return {destination, row.shard, pg::Row(0).int64_at(1), lease_until};
}

void extend_lease(int32 destination, int32 shard, TimestampTz lease_until) {
  update_lease.run({pg::value(destination), pg::value(shard), pg::value(TimestampTzGetDatum(lease_until))});
}

void free_shard(int32 destination, int32 shard) {
  clear_holder.run({pg::value(destination), pg::value(shard)});
}

bool is_valid(const ShardRow &row, const Claim &claim, TimestampTz now) {
  return row.token == claim.token && row.holder && row.lease_until > now;
}

void raise_stale(const Claim &claim) {
  pg::raise(
      kStaleBatch,
      "Nothing of the batch was recorded by this call. Its events come again with the next fetch; finish a "
      "batch within its lease, or ask for a longer one.",
      "the lease of shard %d ended before the batch was recorded", claim.shard);
}

Holder this_worker() {
  return {session_name("worker"), MyProcPid};
}

bool claim(int32 destination, const Holder &holder, int64 lease_us, Claim *claim) {
  struct Candidate {
    int32 destination;
    ShardRow row;
  };
  MemoryContext memory = CurrentMemoryContext;
  return pg::spi([&] {
    const uint64 count = select_candidates.run({pg::value(destination)});
    auto *candidates = static_cast<Candidate *>(palloc(sizeof(Candidate) * (count + 1)));
    for (uint64 i = 0; i < count; ++i) candidates[i] = {pg::Row(i).int32_at(1), shard_row(i, 2, memory)};
    for (uint64 i = 0; i < count; ++i) {
      const Candidate &c = candidates[i];
      ShardRow now_locked;
      // reclaim() takes its own ones, whose leases ran out while there was nothing to do, one by one.
      if (c.row.holder && strcmp(c.row.holder, holder.name) == 0) continue;
      if (!is_free(c.row, GetCurrentTimestamp())) continue;
      if (!lock_shard(c.destination, c.row.shard, false, &now_locked)) continue;
      const TimestampTz now = GetCurrentTimestamp();
      if (!is_free(now_locked, now)) continue;
      *claim = take_shard(c.destination, now_locked, holder, now + lease_us);
      return true;
    }
    return false;
  });
}

bool reclaim(Claim *claim, const Holder &holder, int64 lease_us) {
  return pg::spi([&] {
    ShardRow row;
    if (!lock_shard(claim->destination, claim->shard, true, &row)) return false;
    const TimestampTz now = GetCurrentTimestamp();
    if (!is_free(row, now)) return false;
    *claim = take_shard(claim->destination, row, holder, now + lease_us);
    return true;
  });
}

bool claim_neglected(int32 destination, const Holder &holder, int64 lease_us, int64 free_for_us,
                     Claim *claim) {
  MemoryContext memory = CurrentMemoryContext;
  const Destination *d = load_destination(destination);
  if (!d) return false;
  ShardRow *rows;
  const int32 count = pg::spi([&] { return list_shards(destination, memory, &rows); });
  const TimestampTz now = GetCurrentTimestamp();
  for (int32 i = 0; i < count; ++i) {
    const ShardRow &row = rows[i];
    if (row.holder && strcmp(row.holder, holder.name) == 0) continue;
    if (!is_free(row, now) || row.lease_until > now - free_for_us || row.retry_at > now) continue;
    Claim taken{destination, row.shard, row.token, row.lease_until};
    if (!read_batch(*d, taken, 1, d->batch_bytes) || !reclaim(&taken, holder, lease_us)) continue;
    *claim = taken;
    return true;
  }
  return false;
}

bool renew(Claim *claim, int64 lease_us) {
  const TimestampTz now = GetCurrentTimestamp();
  if (claim->lease_until - now > lease_us / 2) return true;
  return pg::spi([&] {
    ShardRow row;
    if (!lock_shard(claim->destination, claim->shard, true, &row)) return false;
    if (!is_valid(row, *claim, GetCurrentTimestamp())) return false;
    claim->lease_until = GetCurrentTimestamp() + lease_us;
    extend_lease(claim->destination, claim->shard, claim->lease_until);
    return true;
  });
}

bool is_held(const Claim &claim) {
  return pg::spi([&] {
    ShardRow row;
    return lock_shard(claim.destination, claim.shard, true, &row) &&
           is_valid(row, claim, GetCurrentTimestamp());
  });
}

void release(const Claim &claim, bool wait) {
  pg::spi([&] {
    ShardRow row;
    if (lock_shard(claim.destination, claim.shard, wait, &row) && row.token == claim.token && row.holder)
      free_shard(claim.destination, claim.shard);
  });
}

Destination *load_destination(int32 destination) {
  MemoryContext memory = CurrentMemoryContext;
  return pg::spi([&]() -> Destination * {
    if (select_destination.run({pg::value(destination)}) == 0) return nullptr;
    auto *d = static_cast<Destination *>(MemoryContextAllocZero(memory, sizeof(Destination)));
    const pg::Row row(0);
    d->destination = row.int32_at(1);
    d->name = row.text_at(2, memory);
    d->kind = row.text_at(3, memory);
    d->options = row.text_at(4, memory);
    d->run_as = row.text_at(5, memory);
    read_types(row, 6, memory, d);
    d->shards = row.int32_at(7);
    d->max_attempts = row.int32_at(8);
    d->backoff_us = row.int64_at(9);
    d->backoff_max_us = row.int64_at(10);
    d->block_when_exhausted = row.bool_at(11);
    d->batch_events = row.int32_at(12);
    d->batch_bytes = row.int32_at(13);
    d->lease_us = row.int64_at(14);
    d->paused = row.bool_at(15);
    d->version = DatumGetTransactionId(row.datum(16));
    d->lost = row.bool_at(17);
    return d;
  });
}

Destination *load_destination(const char *name) {
  const int32 destination =
      pg::spi([&] { return find_destination.run({pg::value(name)}) == 0 ? 0 : pg::Row(0).int32_at(1); });
  return destination == 0 ? nullptr : load_destination(destination);
}

bool is_current(const Destination &d) {
  const pg::Extension &e = pg::extension();
  ScanKeyData key;
  pg::int4_equals(&key, 1, d.destination);
  Snapshot snapshot = pg::latest_snapshot_of(e.outbox_destinations);
  pg::IndexScan scan = pg::begin_scan(e.outbox_destinations, e.outbox_destinations_pkey, snapshot, &key, 1);
  const bool current = scan.next() && scan.writer() == d.version;
  scan.end();
  UnregisterSnapshot(snapshot);
  return current;
}

}  // namespace retrysafe::outbox
