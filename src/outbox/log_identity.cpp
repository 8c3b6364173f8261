#include "outbox/log_identity.hpp"

#include <algorithm>
#include <cstring>

#include "outbox/append.hpp"
#include "pg/error.hpp"
#include "pg/extension.hpp"
#include "pg/index_scan.hpp"
#include "pg/statement.hpp"

namespace retrysafe::outbox {

namespace {

// Columns of outbox_eras.
enum : AttrNumber {
  kEra = 1,
  kLog,
  kFirstId,
  kSystemIdentifier,
  kDatabase,
  kExtension,
  kTimeline,
  kRestoreMark
};

constinit pg::Statement log_is_empty{"SELECT NOT EXISTS (SELECT FROM @.outbox_log)", {}};

// A restore can leave the sequence behind the rows; positions of the new era are above everything there is.
constinit pg::Statement skip_positions{
    "SELECT setval($1, greatest(nextval($1), (SELECT max(id) FROM @.outbox_log) + 1,"
    " (SELECT max(ceiling) FROM @.outbox_windows) + 1,"
    " (SELECT max(greatest(since_position, sealed_position)) FROM @.ring_pieces) + 1))",
    {REGCLASSOID}};

constinit pg::Statement insert_era{
    "INSERT INTO @.outbox_eras (era, log, first_id, system_identifier, database, extension, timeline, "
    "restore_mark) "
    "VALUES ($1, $2, $3, $4, $5, $6, $7, nullif($8, ''))",
    {INT4OID, UUIDOID, INT8OID, INT8OID, OIDOID, OIDOID, INT4OID, TEXTOID}};

}  // namespace

Uuid new_log_uuid() {
  Uuid bits;
  if (!pg_strong_random(bits.data(), bits.size())) elog(ERROR, "retrysafe: could not generate random values");
  return random_uuid_from_bits(bits);
}

// Under SnapshotSelf: the newest committed era counts, whatever the transaction's own snapshot is, and a
// serializable transaction is not tied to others by it.
bool current_era(Era *era) {
  const pg::Extension &e = pg::extension();
  pg::IndexScan scan = pg::begin_scan(e.outbox_eras, e.outbox_eras_pkey, SnapshotSelf, nullptr, 0);
  const bool found = scan.next(BackwardScanDirection);
  if (found) {
    bool null;
    era->era = DatumGetInt32(scan.datum(kEra, &null));
    std::memcpy(era->log.data(), DatumGetUUIDP(scan.datum(kLog, &null))->data, era->log.size());
    era->first_id = DatumGetInt64(scan.datum(kFirstId, &null));
    era->system_identifier = static_cast<uint64>(DatumGetInt64(scan.datum(kSystemIdentifier, &null)));
    era->database = DatumGetObjectId(scan.datum(kDatabase, &null));
    era->extension = DatumGetObjectId(scan.datum(kExtension, &null));
    era->timeline = static_cast<TimeLineID>(DatumGetInt32(scan.datum(kTimeline, &null)));
    const Datum mark = scan.datum(kRestoreMark, &null);
    era->restore_mark[0] = '\0';
    if (!null) text_to_cstring_buffer(DatumGetTextPP(mark), era->restore_mark, sizeof era->restore_mark);
  }
  scan.end();
  return found;
}

Era ensure_era() {
  Era era;
  if (current_era(&era)) return era;
  // One session makes the first era, the others wait here and find it.
  LockRelationOid(pg::extension().outbox_eras, ShareRowExclusiveLock);
  if (current_era(&era)) return era;
  // Rows that are there already may come from another cluster: they belong before this era, and those who
  // write some more are waited for.
  const bool empty = pg::spi([] {
    log_is_empty.run({});
    return pg::Row(0).bool_at(1);
  });
  if (!empty) LockRelationOid(pg::extension().outbox_log, ShareRowExclusiveLock);
  begin_era(1, new_log_uuid());
  if (!current_era(&era)) elog(ERROR, "retrysafe: the new era is not there");
  return era;
}

void begin_era(int32 era, const Uuid &log) {
  pg::spi([&] {
    int64 first_id = 0;
    log_is_empty.run({});
    if (!pg::Row(0).bool_at(1) || era > 1) {
      skip_positions.run({pg::value(ObjectIdGetDatum(pg::extension().outbox_log_id_seq))});
      first_id = pg::Row(0).int64_at(1);
      // Rows below first_id count as committed, and those of this very transaction are not.
      if (const int64 own = first_position_of_transaction(); own > 0) first_id = std::min(first_id, own);
    }
    insert_era.run({pg::value(era), pg::value(UUIDPGetDatum(reinterpret_cast<const pg_uuid_t *>(log.data()))),
                    pg::value(first_id), pg::value(static_cast<int64>(GetSystemIdentifier())),
                    pg::value(ObjectIdGetDatum(MyDatabaseId)),
                    pg::value(ObjectIdGetDatum(pg::extension().oid)),
                    pg::value(static_cast<int32>(GetWALInsertionTimeLine())), pg::value(restore_mark())});
  });
}

}  // namespace retrysafe::outbox
