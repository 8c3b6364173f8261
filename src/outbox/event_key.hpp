// Looking an event key up where it counts: among the rows that are there now, other transactions' uncommitted
// ones included. No MVCC snapshot can do that, and under SERIALIZABLE it would take predicate locks that make
// transactions with different event keys abort each other.
//
// All of it raises 40001 when the event is there but the snapshot of this transaction (REPEATABLE READ and
// up) cannot see it.
//
// Events of the log that have a number instead of an event key are not looked up: only the owner of the
// idempotency key gives numbers, each once, and one transaction commits the work of the key.
#pragma once

#include <string_view>

#include "pg/server.hpp"

namespace retrysafe::outbox {

// The event key of a numbered event, in the server's encoding: what is published, and what its id is made of.
void append_numbered_key(StringInfo to, std::string_view idempotency_key, int32 number);

enum class Place { kNowhere, kScheduled, kLog };

struct FoundEvent {
  Place place;
  ItemPointerData tid;
  int64 id;  // position, when in the log
  // What the caller compares, palloc'd; null where the column is null.
  text *idempotency_key;
  text *event_type;
  text *ordering_key;
  Jsonb *payload;
};

// A transaction that is just inserting or removing the event.
struct KeyWriter {
  TransactionId xid;
  bool inserting;
  uint32 speculation;
  Oid table;
  ItemPointerData tid;

  bool is_busy() const { return TransactionIdIsValid(xid); }
};

// The event of this key: first among the scheduled ones, then in the log, since that is the way events move.
// Waits for a transaction that is just inserting or removing it.
FoundEvent find_event(Datum event_key, Datum scope);

// The same for scheduled events only.
FoundEvent find_scheduled_event(Datum event_key, Datum scope);

// The same for the log only, without waiting: instead it tells of a writer that is to be waited for.
enum class Pieces { kAll, kOlder };  // kOlder: without the active one
FoundEvent look_in_log(Datum event_key, Datum scope, KeyWriter *writer, Pieces pieces);
void wait_for(const KeyWriter &writer);

// True when a row of this key is in that place, be it committed or on its way in or out, but not taken back.
// Waits for nobody.
bool is_taken(Place place, Datum event_key, Datum scope);

}  // namespace retrysafe::outbox
