#include "idempotency/records.hpp"

#include "pg/error.hpp"
#include "pg/extension.hpp"
#include "pg/index_scan.hpp"
#include "pg/statement.hpp"

namespace retrysafe::idempotency {

namespace {

enum : AttrNumber {
  kKey = 1,
  kScope,
  kRequestHash,
  kStatus,
  kResponse,
  kCreatedAt,
  kCompletedAt,
  kExpiresAt
};

// The key can be there already, expired: the new record takes its place. Whether it had expired was decided
// when the key was begun ($9); nobody but the owner of the key writes it since.
constinit pg::Statement kSave{
    "INSERT INTO @.idem_records AS r"
    " (key, scope, request_hash, status, response_json, created_at, completed_at, expires_at)"
    " VALUES ($1, $2, $3, $4, $5, $6, $7, $8)"
    " ON CONFLICT (key, scope) DO UPDATE SET request_hash = excluded.request_hash, status = excluded.status,"
    " response_json = excluded.response_json, created_at = excluded.created_at,"
    " completed_at = excluded.completed_at, expires_at = excluded.expires_at"
    " WHERE r.expires_at <= $9",
    {TEXTOID, TEXTOID, BYTEAOID, TEXTOID, JSONBOID, TIMESTAMPTZOID, TIMESTAMPTZOID, TIMESTAMPTZOID,
     TIMESTAMPTZOID}};

constinit pg::Statement kRemove{"DELETE FROM @.idem_records WHERE key = $1 AND scope = $2",
                                {TEXTOID, TEXTOID}};

varlena *copy_column(pg::IndexScan &scan, AttrNumber column) {
  bool null;
  const Datum d = scan.datum(column, &null);
  return null ? nullptr : PG_DETOAST_DATUM_COPY(d);
}

TimestampTz expiry(pg::IndexScan &scan) {
  bool null;
  return DatumGetTimestampTz(scan.datum(kExpiresAt, &null));
}

}  // namespace

// SnapshotSelf sees what is committed at this instant. An MVCC snapshot would be too old after waiting for
// the owner, and would take predicate locks on index pages that unrelated keys share; a dirty one would hand
// out an answer that may still be rolled back. It is not one instant for the whole scan, though: while an
// expired record is being replaced the scan may meet the old version and the new one (the newest wins), or
// neither of them (then the caller goes on to the lock, and looks again when no writer can be left).
const Record *find_record(const Key &key) {
  ScanKeyData keys[2];
  pg::text_equals(&keys[0], 1, PointerGetDatum(key.key));
  pg::text_equals(&keys[1], 2, PointerGetDatum(key.scope));
  const pg::Extension &e = pg::extension();
  pg::IndexScan scan = pg::begin_scan(e.idem_records, e.idem_records_pkey, SnapshotSelf, keys, 2);
  Record *newest = nullptr;
  while (scan.next()) {
    if (!scan.transaction_can_see())
      pg::raise_serialization_failure(
          "could not serialize access: the idempotency key was completed by a transaction that this one "
          "cannot see",
          "Retry the transaction.");
    if (newest && newest->expires_at >= expiry(scan)) continue;
    if (!newest) newest = static_cast<Record *>(palloc(sizeof(Record)));
    newest->request_hash = copy_column(scan, kRequestHash);
    newest->status = copy_column(scan, kStatus);
    newest->response = reinterpret_cast<Jsonb *>(copy_column(scan, kResponse));
    newest->expires_at = expiry(scan);
  }
  scan.end();
  return newest;
}

void save_record(const Claim &claim, TimestampTz completed_at, TimestampTz expires_at, const text *status,
                 const Jsonb *response) {
  const uint64 written = pg::spi([&] {
    return kSave.run(
        {pg::value(claim.key.key), pg::value(claim.key.scope), pg::value(claim.terms->request_hash),
         pg::value(status), pg::value(response), pg::value(TimestampTzGetDatum(claim.terms->begun_at)),
         pg::value(TimestampTzGetDatum(completed_at)), pg::value(TimestampTzGetDatum(expires_at)),
         pg::value(TimestampTzGetDatum(claim.terms->begun_at))});
  });
  // Only somebody who writes to the table by hand, past the lock on the key, can have been there first.
  if (written == 0)
    pg::raise_serialization_failure(
        "could not serialize access: the idempotency key was completed by another transaction meanwhile",
        "Retry the transaction.");
}

bool remove_record(const Key &key) {
  return pg::spi([&] { return kRemove.run({pg::value(key.key), pg::value(key.scope)}); }) > 0;
}

}  // namespace retrysafe::idempotency
