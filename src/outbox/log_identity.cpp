#include "outbox/log_identity.hpp"

#include <cstring>

#include "pg/error.hpp"
#include "pg/extension.hpp"
#include "pg/index_scan.hpp"
#include "pg/statement.hpp"

namespace retrysafe::outbox {

namespace {

// Columns of outbox_eras.
enum : AttrNumber { kEra = 1, kLog, kFirstId, kSystemIdentifier, kDatabase, kTimeline };

constinit pg::Statement insert_first_era{
    "INSERT INTO @.outbox_eras (era, log, first_id, system_identifier, database, timeline) "
    "VALUES (1, $1, 0, $2, $3, $4)",
    {UUIDOID, INT8OID, OIDOID, INT4OID}};

Uuid new_uuid() {
  Uuid bits;
  if (!pg_strong_random(bits.data(), bits.size()))
    ereport(ERROR, (errcode(ERRCODE_INTERNAL_ERROR), errmsg("could not generate random values")));
  return random_uuid_from_bits(bits);
}

}  // namespace

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
    era->timeline = static_cast<TimeLineID>(DatumGetInt32(scan.datum(kTimeline, &null)));
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
  const Uuid log = new_uuid();
  pg::spi([&] {
    insert_first_era.run({pg::value(UUIDPGetDatum(reinterpret_cast<const pg_uuid_t *>(log.data()))),
                          pg::value(static_cast<int64>(GetSystemIdentifier())),
                          pg::value(ObjectIdGetDatum(MyDatabaseId)),
                          pg::value(static_cast<int32>(GetWALInsertionTimeLine()))});
  });
  if (!current_era(&era)) elog(ERROR, "retrysafe: the new era is not there");
  return era;
}

}  // namespace retrysafe::outbox
