#include "idempotency/records.hpp"

#include "idempotency/record_columns.hpp"
#include "pg/error.hpp"
#include "pg/extension.hpp"
#include "pg/index_scan.hpp"
#include "pg/statement.hpp"
#include "pg/table_insert.hpp"
#include "storage/ring.hpp"

namespace retrysafe::idempotency {

namespace {

using namespace record_column;

// Records that live as long as retrysafe.idem_retention says are in the ring, where they go together; one
// with a ttl of its own would hold back a whole piece, or die with it.
//
// The key can be there already, expired: the new record takes its place. Whether it had expired was decided
// when the key was begun ($9); nobody but the owner of the key writes it since.
constinit pg::Statement kSaveWithTtl{
    "INSERT INTO @.idem_records_with_ttl AS r"
    " (key, scope, request_hash, status, response_json, created_at, completed_at, expires_at, txid)"
    " VALUES ($1, $2, $3, $4, $5, $6, $7, $8, $10)"
    " ON CONFLICT (key, scope) DO UPDATE SET request_hash = excluded.request_hash, status = excluded.status,"
    " response_json = excluded.response_json, created_at = excluded.created_at,"
    " completed_at = excluded.completed_at, expires_at = excluded.expires_at, txid = excluded.txid"
    " WHERE r.expires_at <= $9",
    {TEXTOID, TEXTOID, BYTEAOID, TEXTOID, JSONBOID, TIMESTAMPTZOID, TIMESTAMPTZOID, TIMESTAMPTZOID,
     TIMESTAMPTZOID, XID8OID}};

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

pg::IndexScan begin_key_scan(Oid table, Oid index, const Key &key) {
  ScanKeyData keys[2];
  pg::text_equals(&keys[0], 1, PointerGetDatum(key.key));
  pg::text_equals(&keys[1], 2, PointerGetDatum(key.scope));
  return pg::begin_scan(table, index, SnapshotSelf, keys, 2);
}

// The newest of the ones in this table and the one found before.
Record *newest_in(Oid table, Oid index, const Key &key, Record *newest) {
  pg::IndexScan scan = begin_key_scan(table, index, key);
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

// A key that is used again before the piece with its expired record is emptied. False: there is a record
// alive, or none that can be removed.
bool remove_expired(Oid table, Oid index, const Key &key, TimestampTz begun_at) {
  pg::IndexScan scan = begin_key_scan(table, index, key);
  bool removed = false;
  while (scan.next()) {
    if (expiry(scan) > begun_at) continue;
    pg::delete_row(scan.table, &scan.slot->tts_tid);
    removed = true;
  }
  scan.end();
  return removed;
}

bool save_in_ring(const Claim &claim, const pg::NewRow &row) {
  storage::lock_rings();
  const int piece = storage::active_piece(storage::RingName::kRecords);
  const Oid table = pg::extension().idem_records_pieces[piece];
  const Oid index = pg::extension().idem_records_pkey_pieces[piece];
  const bool saved =
      pg::insert_row(table, row, index) ||
      (remove_expired(table, index, claim.key, claim.terms->begun_at) && pg::insert_row(table, row, index));
  storage::unlock_rings();
  return saved;
}

}  // namespace

// SnapshotSelf sees what is committed at this instant. An MVCC snapshot would be too old after waiting for
// the owner, and would take predicate locks on index pages that unrelated keys share; a dirty one would hand
// out an answer that may still be rolled back. It is not one instant for the whole scan, though: while an
// expired record is being replaced the scan may meet the old version and the new one (the newest wins), or
// neither of them (then the caller goes on to the lock, and looks again when no writer can be left).
const Record *find_record(const Key &key) {
  const storage::Ring &ring = storage::ring(storage::RingName::kRecords);
  const pg::Extension &e = pg::extension();
  Record *newest = nullptr;
  for (int i = 0; i < ring.count; ++i) {
    const int piece = ring.newest(i);
    newest = newest_in(e.idem_records_pieces[piece], e.idem_records_pkey_pieces[piece], key, newest);
    if (newest && newest->is_alive(GetCurrentTimestamp())) break;  // the older pieces have older ones
  }
  if (pg::is_untouched(e.idem_records_with_ttl)) return newest;  // many never give a ttl
  return newest_in(e.idem_records_with_ttl, e.idem_records_with_ttl_pkey, key, newest);
}

void save_record(const Claim &claim, TimestampTz completed_at, TimestampTz expires_at, const text *status,
                 const Jsonb *response) {
  PreventCommandIfReadOnly("idem_complete()");  // an insertion past the executor would not notice
  const Terms &terms = *claim.terms;
  const Datum txid = FullTransactionIdGetDatum(GetTopFullTransactionId());
  bool saved;
  if (terms.ttl) {
    saved = pg::spi([&] {
              return kSaveWithTtl.run(
                  {pg::value(claim.key.key), pg::value(claim.key.scope), pg::value(terms.request_hash),
                   pg::value(status), pg::value(response), pg::value(TimestampTzGetDatum(terms.begun_at)),
                   pg::value(TimestampTzGetDatum(completed_at)), pg::value(TimestampTzGetDatum(expires_at)),
                   pg::value(TimestampTzGetDatum(terms.begun_at)), pg::value(txid)});
            }) == 1;
  } else {
    const Datum values[]{PointerGetDatum(claim.key.key),
                         PointerGetDatum(claim.key.scope),
                         PointerGetDatum(terms.request_hash),
                         PointerGetDatum(status),
                         PointerGetDatum(response),
                         TimestampTzGetDatum(terms.begun_at),
                         TimestampTzGetDatum(completed_at),
                         TimestampTzGetDatum(expires_at),
                         txid};
    bool nulls[kTxid]{};
    nulls[kResponse - 1] = response == nullptr;
    saved = save_in_ring(claim, pg::new_row(values, nulls));
  }
  // Only somebody who writes to the table by hand, past the lock on the key, can have been there first.
  if (!saved)
    pg::raise_serialization_failure(
        "could not serialize access: the idempotency key was completed by another transaction meanwhile",
        "Retry the transaction. If that never helps, look for a trigger on table idem_records that returns "
        "null.");
}

bool remove_record(const Key &key) {
  return pg::spi([&] { return kRemove.run({pg::value(key.key), pg::value(key.scope)}); }) > 0;
}

}  // namespace retrysafe::idempotency
