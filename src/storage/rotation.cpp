#include "storage/rotation.hpp"

#include <algorithm>

#include "pg/error.hpp"
#include "pg/fault_point.hpp"
#include "pg/latch.hpp"
#include "pg/statement.hpp"
#include "pg/whole_statement.hpp"
#include "storage/ring_columns.hpp"

#include "pg/server.hpp"

namespace retrysafe::storage {

namespace {

constinit pg::Statement select_pieces{
    "SELECT generation, since, sealed_at, sealed_position, needed_until, retired FROM @.ring_pieces"
    " WHERE ring = $1 ORDER BY generation",
    {TEXTOID}};

constinit pg::Statement insert_piece{
    "INSERT INTO @.ring_pieces (ring, generation, since, since_position)"
    " SELECT $1, $2, clock_timestamp(), CASE WHEN is_called THEN last_value ELSE last_value - 1 END"
    " FROM @.outbox_log_id_seq",
    {TEXTOID, INT8OID}};

constinit pg::Statement update_sealed{
    "UPDATE @.ring_pieces SET sealed_at = clock_timestamp(), sealed_position = nextval($3), needed_until = $4"
    " WHERE ring = $1 AND generation = $2",
    {TEXTOID, INT8OID, REGCLASSOID, TIMESTAMPTZOID}};

constinit pg::Statement correct_times{
    "UPDATE @.ring_pieces SET since = least(since, clock_timestamp()),"
    " sealed_at = CASE WHEN sealed_at > clock_timestamp() THEN clock_timestamp() ELSE sealed_at END"
    " WHERE ring = $1",
    {TEXTOID}};

constinit pg::Statement update_retired{
    "UPDATE @.ring_pieces SET retired = true WHERE ring = $1 AND generation = $2", {TEXTOID, INT8OID}};

constinit pg::Statement delete_piece{"DELETE FROM @.ring_pieces WHERE ring = $1 AND generation = $2",
                                     {TEXTOID, INT8OID}};

constinit pg::Statement select_position_before_log{
    "SELECT since_position FROM @.ring_pieces WHERE ring = 'log' ORDER BY generation LIMIT 1", {}};

struct Piece {
  int64 generation;
  TimestampTz since;
  bool sealed;
  SealedPiece seal;
  bool retired;
};

// By generation; the last one is active. Inside pg::spi.
int load_pieces(const char *ring, Piece (&pieces)[pg::kRingPieces]) {
  const uint64 count = select_pieces.run({pg::value(ring)});
  if (count > pg::kRingPieces) elog(ERROR, "retrysafe: ring \"%s\" has too many pieces", ring);
  for (uint64 i = 0; i < count; ++i) {
    const pg::Row row(i);
    Piece &p = pieces[i];
    p.generation = row.int64_at(1);
    p.since = DatumGetTimestampTz(row.datum(2));
    p.sealed = !row.is_null(3);
    if (p.sealed)
      p.seal = {piece_of(p.generation), DatumGetTimestampTz(row.datum(3)), row.int64_at(4),
                row.is_null(5) ? DT_NOBEGIN : DatumGetTimestampTz(row.datum(5))};
    p.retired = row.bool_at(6);
  }
  return static_cast<int>(count);
}

bool try_to_lock(const RingKeeper &keeper, int piece, LOCKMODE mode) {
  const RingTables tables = tables_of(keeper.ring);
  for (int i = 0; i < tables.count; ++i)
    if (!ConditionalLockRelationOid((*tables.pieces[i])[piece], mode)) return false;
  return true;
}

int64 bytes_of_piece(RingName ring, int piece) {
  const RingTables tables = tables_of(ring);
  int64 bytes = 0;
  for (int i = 0; i < tables.count; ++i)
    bytes += DatumGetInt64(
        DirectFunctionCall1(pg_total_relation_size, ObjectIdGetDatum((*tables.pieces[i])[piece])));
  return bytes;
}

bool has_rows(const RingKeeper &keeper, int piece) {
  const RingTables tables = tables_of(keeper.ring);
  bool found = false;
  for (int i = 0; i < tables.count; ++i) {
    Relation table = table_open((*tables.pieces[i])[piece], AccessShareLock);
    found = found || RelationGetNumberOfBlocks(table) > 0;
    table_close(table, NoLock);
  }
  return found;
}

// Excludes those who insert for the rest of the transaction. They hold their lock for microseconds, so that
// it is free again and again; waiting for it in the queue would make others wait behind.
bool exclude_writers() {
  constexpr int kTries = 100;
  for (int i = 0; i < kTries; ++i) {
    if (ConditionalLockRelationOid(pg::extension().ring_pieces, ShareRowExclusiveLock)) return true;
    pg::pause(1, pg::Wait::kRingLock);
  }
  return false;
}

// Every process reads the pieces anew. Their next insertion waits until this transaction has ended: not for
// the disk. What they commit afterwards is behind this commit in WAL.
void announce_change() {
  CacheInvalidateRelcacheByRelid(pg::extension().ring_pieces);
  (void)set_config_option("synchronous_commit", "off", PGC_USERSET, PGC_S_SESSION, GUC_ACTION_LOCAL, true, 0,
                          false);
}

void truncate_piece(const RingKeeper &keeper, int piece) {
  const RingTables tables = tables_of(keeper.ring);
  auto *statement = makeNode(TruncateStmt);
  for (int i = 0; i < tables.count; ++i) {
    RangeVar *table = makeRangeVar(pstrdup(NameStr(pg::extension().schema_name)),
                                   get_rel_name((*tables.pieces[i])[piece]), -1);
    table->inh = false;
    statement->relations = lappend(statement->relations, table);
  }
  statement->behavior = DROP_RESTRICT;
  ExecuteTruncate(statement);
}

// TRUNCATE locks these as well, and would wait.
bool try_to_lock_toast(const RingKeeper &keeper, int piece) {
  const RingTables tables = tables_of(keeper.ring);
  for (int i = 0; i < tables.count; ++i) {
    Relation table = table_open((*tables.pieces[i])[piece], NoLock);
    const Oid toast = table->rd_rel->reltoastrelid;
    table_close(table, NoLock);
    if (OidIsValid(toast) && !ConditionalLockRelationOid(toast, AccessExclusiveLock)) return false;
  }
  return true;
}

// Does every snapshot that somebody may look with see what became of that generation last? Transaction ids go
// round: one from long ago means nothing any more, and vacuum has marked its row as frozen by then.
bool is_seen_by_all(RingName ring, int64 generation) {
  const Snapshot snapshot = pg::latest_snapshot_of(pg::extension().ring_pieces);
  pg::IndexScan scan = begin_scan_for(ring, generation, snapshot);
  bool seen = false;
  if (scan.next()) {
    const HeapTupleHeader row = ExecFetchSlotHeapTuple(scan.slot, false, nullptr)->t_data;
    seen = TransactionIdPrecedes(HeapTupleHeaderGetXmin(row), GetOldestNonRemovableTransactionId(scan.table));
  }
  scan.end();
  UnregisterSnapshot(snapshot);
  return seen;
}

Turn empty(const RingKeeper &keeper, const Piece &p) {
  if (keeper.old_snapshots_need_it && !is_seen_by_all(keeper.ring, p.generation)) return Turn::kBlocked;
  const int piece = piece_of(p.generation);
  if (!try_to_lock(keeper, piece, AccessExclusiveLock) || !try_to_lock_toast(keeper, piece))
    return Turn::kBlocked;
  truncate_piece(keeper, piece);
  delete_piece.run({pg::value(name_of(keeper.ring)), pg::value(p.generation)});
  return Turn::kDone;
}

Turn seal(const RingKeeper &keeper, const Piece &p) {
  const int piece = piece_of(p.generation);
  if (!try_to_lock(keeper, piece, ShareLock) && !RETRYSAFE_FAULT("ring.seal_under_writer"))
    return Turn::kBlocked;
  const TimestampTz needed_until = keeper.needed_until ? keeper.needed_until(piece) : DT_NOBEGIN;
  update_sealed.run({pg::value(name_of(keeper.ring)), pg::value(p.generation),
                     pg::value(ObjectIdGetDatum(pg::extension().outbox_log_id_seq)),
                     pg::value(TimestampTzGetDatum(needed_until))});
  announce_change();
  return Turn::kDone;
}

Turn retire(const RingKeeper &keeper, const Piece &p) {
  if (!exclude_writers()) return Turn::kBlocked;
  update_retired.run({pg::value(name_of(keeper.ring)), pg::value(p.generation)});
  announce_change();
  return Turn::kDone;
}

Turn rotate(const RingKeeper &keeper, int64 generation) {
  if (!exclude_writers()) return Turn::kBlocked;
  insert_piece.run({pg::value(name_of(keeper.ring)), pg::value(generation)});
  announce_change();
  return Turn::kDone;
}

bool is_full(const RingKeeper &keeper, const Piece &active) {
  const int piece = piece_of(active.generation);
  if (!has_rows(keeper, piece)) return false;
  return GetCurrentTimestamp() - active.since >= keeper.max_age_us ||
         bytes_of_piece(keeper.ring, piece) >= keeper.max_bytes;
}

// Locks do not keep a transaction from itself: what it has written, or is about to write further out, would
// be sealed before it has ended.
bool writes_to(RingName ring) {
  if (pg::has_locked(pg::extension().ring_pieces, RowExclusiveLock)) return true;
  const RingTables tables = tables_of(ring);
  for (int i = 0; i < tables.count; ++i)
    for (const Oid piece : *tables.pieces[i])
      if (pg::has_locked(piece, RowExclusiveLock)) return true;
  return false;
}

// The clock has been set back since: what waits for the age of the piece would wait until that time comes
// again.
bool is_of_a_time_to_come(const Piece &p) {
  const TimestampTz now = GetCurrentTimestamp();
  return p.since > now || (p.sealed && p.seal.sealed_at > now);
}

Turn next_step(const RingKeeper &keeper) {
  const char *ring = name_of(keeper.ring);
  Piece pieces[pg::kRingPieces];
  const int count = load_pieces(ring, pieces);
  if (count == 0) return Turn::kNothing;  // the first writer begins it
  if (std::any_of(pieces, pieces + count, is_of_a_time_to_come)) {
    correct_times.run({pg::value(ring)});
    return Turn::kDone;
  }
  Turn result = Turn::kNothing;
  const auto took_step = [&](Turn step) {
    if (step == Turn::kBlocked) result = step;
    return step == Turn::kDone;
  };
  if (pieces[0].retired && took_step(empty(keeper, pieces[0]))) return Turn::kDone;
  for (int i = 0; i < count - 1; ++i)
    if (!pieces[i].sealed && took_step(seal(keeper, pieces[i]))) return Turn::kDone;
  // One at a time, since the others are younger.
  if (count > 1 && pieces[0].sealed && !pieces[0].retired) {
    const Turn released = keeper.release(pieces[0].seal);
    if (took_step(released) && took_step(retire(keeper, pieces[0]))) return Turn::kDone;
  }
  if (count < pg::kRingPieces && is_full(keeper, pieces[count - 1]) &&
      took_step(rotate(keeper, pieces[count - 1].generation + 1)))
    return Turn::kDone;
  return result;
}

}  // namespace

Turn turn(const RingKeeper &keeper) {
  if (writes_to(keeper.ring)) return Turn::kBlocked;
  // One process turns rings at a time. Those who insert are not concerned.
  if (!ConditionalLockRelationOid(pg::extension().ring_pieces, ShareUpdateExclusiveLock))
    return Turn::kBlocked;
  const Turn result = pg::spi([&] { return next_step(keeper); });
  if (result == Turn::kDone) RETRYSAFE_FAULT_POINT("ring.turned");
  return result;
}

bool may_turn_in(FunctionCallInfo fcinfo) {
  if (IsInTransactionBlock(pg::is_whole_statement(fcinfo))) {
    pg::warn(kTransactionGoesOn,
             "Call it by SELECT, with nothing else in the statement, outside of a transaction block.",
             "the rings are not turned: the transaction may go on after the call");
    return false;
  }
  MyXactFlags |= XACT_FLAGS_NEEDIMMEDIATECOMMIT;  // in a pipeline, where more is on its way
  return true;
}

int64 bytes_in_use(RingName name) {
  const Ring &pieces = ring(name);
  int64 bytes = 0;
  for (int i = 0; i < pieces.count; ++i) bytes += bytes_of_piece(name, pieces.pieces[i]);
  return bytes;
}

int64 position_before_log() {
  return pg::spi([] { return select_position_before_log.run({}) == 0 ? 0 : pg::Row(0).int64_at(1); });
}

}  // namespace retrysafe::storage
