#include "outbox/append.hpp"

#include "outbox/log_columns.hpp"
#include "pg/error.hpp"
#include "pg/fault_point.hpp"
#include "pg/lock_owner.hpp"
#include "pg/table_insert.hpp"
#include "pg/xact_events.hpp"
#include "storage/ring.hpp"

#include "pg/server.hpp"

namespace retrysafe::outbox {

namespace {

constinit int64 first_position = 0;
constinit Oid first_sequence = InvalidOid;  // that drew it: the extension can be made anew in a transaction

Datum datum(const void *value, bool *null) {
  *null = value == nullptr;
  return PointerGetDatum(value);
}

// A new era locks out writers before it draws its first position: none may hold a position without this lock.
void lock_log() {
  const Oid log = pg::extension().outbox_log;
  pg::in_subtransaction([&] { LockRelationOid(log, RowExclusiveLock); });
}

// One that a session had drawn ahead would lie below what readers have passed when it is used.
int64 draw_position(Oid sequence) {
  HeapTuple tuple = SearchSysCache1(SEQRELID, ObjectIdGetDatum(sequence));
  if (!HeapTupleIsValid(tuple)) elog(ERROR, "retrysafe: sequence %u is gone", sequence);
  const auto *form = reinterpret_cast<Form_pg_sequence>(GETSTRUCT(tuple));
  const bool in_order = form->seqcache == 1 && form->seqincrement > 0 && !form->seqcycle;
  ReleaseSysCache(tuple);
  if (!in_order)
    pg::raise(kPositionsOutOfOrder, "Use ALTER SEQUENCE … CACHE 1 INCREMENT 1 NO CYCLE.",
              "sequence outbox_log_id_seq was altered so that positions do not come in order");
  return nextval_internal(sequence, false);
}

// Under the ring lock. False when another transaction has written the event key meanwhile.
bool insert_into_active_piece(const LogEntry &entry, int64 *id) {
  const pg::Extension &e = pg::extension();
  // The reader of the log relies on this order: a transaction that has no id when a snapshot is taken draws
  // only positions above all that were drawn before.
  const bool wrong_order = RETRYSAFE_FAULT("emit.position_before_transaction");
  if (wrong_order) {
    *id = draw_position(e.outbox_log_id_seq);
    pg_usleep(3000);
  }
  const FullTransactionId transaction = GetTopFullTransactionId();
  if (!wrong_order) *id = draw_position(e.outbox_log_id_seq);
  if (first_position == 0 || first_sequence != e.outbox_log_id_seq) first_position = *id;
  first_sequence = e.outbox_log_id_seq;

  Datum values[log_column::kHeaders];
  bool nulls[log_column::kHeaders]{};
  const auto set = [&](AttrNumber column, const void *value) {
    values[column - 1] = datum(value, &nulls[column - 1]);
  };
  values[log_column::kId - 1] = Int64GetDatum(*id);
  values[log_column::kTxid - 1] = FullTransactionIdGetDatum(transaction);
  values[log_column::kCreatedAt - 1] = TimestampTzGetDatum(entry.created_at);
  values[log_column::kDeliverAfter - 1] = TimestampTzGetDatum(entry.deliver_after);
  nulls[log_column::kDeliverAfter - 1] = entry.deliver_after == DT_NOBEGIN;
  values[log_column::kEventNumber - 1] = Int32GetDatum(entry.event_number);
  nulls[log_column::kEventNumber - 1] = entry.event_number == 0;
  set(log_column::kScope, entry.scope);
  set(log_column::kIdempotencyKey, entry.idempotency_key);
  set(log_column::kEventKey, entry.event_key);
  set(log_column::kEventType, entry.event_type);
  set(log_column::kOrderingKey, entry.ordering_key);
  set(log_column::kPayload, entry.payload);
  set(log_column::kHeaders, entry.headers);
  const int piece = storage::active_piece(storage::RingName::kLog);
  RETRYSAFE_FAULT_POINT("emit.before_insert");
  return pg::insert_row(e.outbox_log_pieces[piece], pg::new_row(values, nulls),
                        e.outbox_log_event_key_pieces[piece]);
}

[[noreturn]] void raise_refused() {
  pg::raise(kRowRefused, pg::kRowRefusedHint, "the log does not take the event");
}

void forget() noexcept {
  first_position = 0;
}

constexpr pg::XactSubscriber subscriber{
    .before_commit = nullptr,
    .before_prepare = nullptr,
    .after_commit = forget,
    .after_prepare = forget,
    .after_abort = forget,
    .sub_commit = nullptr,
    .sub_abort = nullptr,
};

}  // namespace

FoundEvent append_to_log(const LogEntry &entry, Repetition repetition,
                         void (*before_writing)(const LogEntry &), int64 *id) {
  Pieces pieces = repetition == Repetition::kPossible ? Pieces::kAll : Pieces::kOlder;
  lock_log();
  for (int refused = 0; refused < kRefusals;) {
    CHECK_FOR_INTERRUPTS();
    storage::lock_rings();
    KeyWriter writer{};
    bool written = false;
    const FoundEvent found =
        look_in_log(PointerGetDatum(entry.event_key), PointerGetDatum(entry.scope), &writer, pieces);
    if (found.place == Place::kNowhere && !writer.is_busy()) {
      if (before_writing) before_writing(entry);
      written = insert_into_active_piece(entry, id);
      refused += !written;
    }
    storage::unlock_rings();
    if (written || found.place != Place::kNowhere) return found;
    if (writer.is_busy()) wait_for(writer);
    pieces = Pieces::kAll;
  }
  raise_refused();
}

int64 append_numbered(const LogEntry &entry) {
  lock_log();
  storage::lock_rings();
  int64 id;
  if (!insert_into_active_piece(entry, &id)) raise_refused();  // the unique index does not hold it
  storage::unlock_rings();
  return id;
}

int64 first_position_of_transaction() {
  return first_sequence == pg::extension().outbox_log_id_seq ? first_position : 0;
}

void watch_appending_transactions() {
  pg::subscribe_to_transactions(&subscriber);
}

}  // namespace retrysafe::outbox
