// Appending an event to the log, where it gets its position.
#pragma once

#include "outbox/event_key.hpp"
#include "pg/server.hpp"

namespace retrysafe::outbox {

// So often a row is tried again that the unique index refuses although the event is not there: far more than
// others who write the same event at the same time can cause.
inline constexpr int kRefusals = 100;

// What the log stores besides position and transaction id; null where the column is null.
struct LogEntry {
  TimestampTz created_at;
  TimestampTz deliver_after;  // DT_NOBEGIN: it was not delayed
  int32 event_number;         // 0: it has an event key instead
  const text *scope;
  const text *idempotency_key;
  const text *event_key;
  const text *event_type;
  const text *ordering_key;
  const Jsonb *payload;
  const Jsonb *headers;
};

// How likely the event is there already. When it is not expected, its row is tried first, and taken back if
// it is.
enum class Repetition { kPossible, kUnexpected };

// Appends the event unless its key is in the log: then says what is there, having waited for a transaction
// that was just writing it. `before_writing` (null: nothing) may raise. Raises 40001 when the event is there
// but the snapshot of this transaction cannot see it.
FoundEvent append_to_log(const LogEntry &entry, Repetition repetition,
                         void (*before_writing)(const LogEntry &), int64 *id);

// Appends a numbered event. Its number is the caller's to give, once: nothing is looked up.
int64 append_numbered(const LogEntry &entry);

// The first position that this transaction drew; 0: none.
int64 first_position_of_transaction();

// Called once from _PG_init.
void watch_appending_transactions();

}  // namespace retrysafe::outbox
