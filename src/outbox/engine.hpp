// The engine: claim a shard, read a batch, publish it elsewhere, record what became of it. The background
// worker and the pull API (outbox_fetch, outbox_ack, outbox_nack) both work through these functions and no
// others.
//
// All of it is jumpable code that runs inside a READ COMMITTED transaction of the caller; results are
// palloc'd in the caller's memory context. Claim, read and record are three short transactions of a worker;
// no transaction is open while a batch is being published.
#pragma once

#include "core/event_id.hpp"
#include "core/snapshot.hpp"

#include "pg/server.hpp"

namespace retrysafe::outbox {

// A row of the log, or of the parked events, copied out. Strings end with NUL; null where the column is null.
struct Event {
  int64 id;  // position in the log
  uint64 txid;
  bool parked;     // comes from outbox_parked, not from the log
  bool held;       // not to be sent: an earlier event of its ordering key is parked; recording parks it too
  int32 attempts;  // failed ones so far
  uint32 turn;     // of a parked event: grows whenever a batch that holds it has to do without it
  pg_uuid_t event_id;
  const char *scope;
  const char *idempotency_key;
  const char *event_key;
  const char *event_type;
  const char *ordering_key;
  const char *payload;  // JSON text in the server's encoding
  const char *headers;  // JSON text
  TimestampTz created_at;
};

// An event as a call had it. A position comes again where the extension is made anew, with the transaction it
// does not.
struct CalledEvent {
  int32 destination;
  int64 id;
  uint64 txid;
  bool operator==(const CalledEvent &) const = default;
};
inline CalledEvent called_event(int32 destination, const Event &event) {
  return {destination, event.id, event.txid};
}

struct Destination {
  int32 destination;
  const char *name;
  const char *kind;
  const char *options;  // JSON text, secrets unresolved
  const char *run_as;
  int32 type_count;          // -1: all event types
  const char *const *types;  // patterns, see core/routing.hpp
  uint64 types_digest;       // tells one choice of event types from another
  int32 shards;
  int32 max_attempts;
  int64 backoff_us;
  int64 backoff_max_us;
  bool block_when_exhausted;
  int32 batch_events;
  int32 batch_bytes;
  int64 lease_us;
  bool paused;
  bool lost;              // and paused: events that it has not had are gone
  TransactionId version;  // xmin of the row: changes when the destination was altered
};

// The right to work a shard until `lease_until`. The fencing token tells this holder from every later one.
struct Claim {
  int32 destination;
  int32 shard;
  int64 token;
  TimestampTz lease_until;
};

struct Holder {
  const char *name;  // as shown in outbox_status
  int32 pid;         // 0 for pull clients: only time ends their lease
};

struct Batch {
  Claim claim;
  Uuid log;   // whose events they are
  int64 seq;  // of the cursor that it continues; recording writes seq + 1
  int64 window_no;
  bool opens_window;  // the window is not stored yet: recording stores `window`
  StoredSnapshot window;
  int64 resumed_at;   // where the window before it was left; -1: at its end
  int64 from, to;     // positions within the window: recording moves the cursor to `to`
  int32 event_count;  // 0: nothing to send, but progress to record
  uint32 check;       // over the ids of all events of the range, see core/batch_handle.hpp
  Event *events;      // in the order to send: due parked events first, then those from the log
  int32 already_parked_count;
  const Event *already_parked;  // events of the range that are parked already, which are not in `events`
};

enum class Status : int32 { kDelivered, kFailedRetry, kFailedFinal, kNotTried };

struct Outcome {
  Status status;
  int64 retry_after_us;  // wanted by the destination; -1 when not
  const char *reason;
};

// --- claim -------------------------------------------------------------------------------------------------

// Takes one free shard: of `destination`, or of any destination that is neither paused nor in back-off nor of
// a kind that workers leave to pull clients (0). Dead workers' leases are taken over at once, expired ones in
// time.
//
// The claim that was not worked for the longest time comes first. A worker's shards are its own until it
// releases them or dies.
Holder this_worker();
bool claim(int32 destination, const Holder &holder, int64 lease_us, Claim *claim);
// Takes a shard of the destination that has something to do, and that was free for `free_for_us` at least.
bool claim_neglected(int32 destination, const Holder &holder, int64 lease_us, int64 free_for_us,
                     Claim *claim);
// Takes the very shard of a claim again whose lease ran out. False: somebody else works it.
bool reclaim(Claim *claim, const Holder &holder, int64 lease_us);
// Extends the lease when less than half of it is left, and writes nothing otherwise. False: the shard is
// lost.
bool renew(Claim *claim, int64 lease_us);

// Looks, whatever is left of the lease.
bool is_held(const Claim &claim);
// Without `wait` nothing happens while somebody has the row of the shard locked.
void release(const Claim &claim, bool wait);

// Null when there is none. The other form looks the name up.
Destination *load_destination(int32 destination);
Destination *load_destination(const char *name);
// False when it was altered or dropped since it was loaded. What was read may then lack events that it wants
// now.
bool is_current(const Destination &destination);

// --- read --------------------------------------------------------------------------------------------------

// Moves due events from outbox_scheduled into the log, or as many of them as can be moved in a moment.
// Returns how many.
int64 move_due_events();
// The same for a client, who holds what it has moved as long as its transaction lasts, for all destinations:
// what a worker does in time is left to it.
int64 move_due_events_without_worker();
// The next batch of a claimed shard; null when there is nothing to do. Writes nothing. Flushes WAL past
// everything that the batch's window sees, so that nothing is published before its commit is durable. Looks
// at a bounded number of rows: a batch without events has only to be recorded, and the next one read. Windows
// without an event for this shard are passed over in memory; now and then they come as a batch without
// events, so that they get stored.
Batch *read_batch(const Destination &destination, const Claim &claim, int32 max_events, int64 max_bytes);
// After read_batch returned null: whether that is because the synchronous standbys do not have yet what there
// is to send. And whether they have it now, which needs no transaction.
bool is_kept_for_standby(const Claim &claim);
bool standbys_caught_up(const Claim &claim);
// After read_batch returned null: in how many milliseconds it will have passed over events to store; negative
// when there are none.
int64 ms_until_progress_is_due(const Claim &claim);
// When the next scheduled event, or parked event of these shards, comes due; infinity when none waits.
TimestampTz next_due(const Claim *claims, int32 count);

// When time alone gives somebody who fetches from one of these destinations something to do: an event comes
// due, a back-off or somebody's lease ends. Looks at what comes after `after` only. Infinity: no time does.
TimestampTz next_chance(const int32 *destinations, int32 count, TimestampTz after);

// --- record ------------------------------------------------------------------------------------------------

// Writes the outcomes of a batch, one per event, by what the destination is by now, and moves the cursor.
// Raises kStaleBatch when the claim is no longer valid. An event that failed is parked, and so are the later
// ones of its ordering key unless they were delivered. So is, due at once, an event of the log that was not
// tried while a later one was, but where the destination is away: an outage writes nothing for the events.
// The first other kNotTried event of the log ends the prefix that is recorded, and the rest is read again.
// Outcomes of held events are not looked at.
void record(const Destination &destination, Batch *batch, const Outcome *outcomes, bool away);
// The destination as a whole could not be reached: backs the shard off, exponentially with jitter, and writes
// nothing per event. Not before `retry_after_us` from now when the destination asked for it (-1: it did not).
// Returns when to try again.
TimestampTz record_unreachable(const Destination &destination, const Claim &claim, const char *reason,
                               int64 retry_after_us);

// Something else keeps the events of a shard from being sent: shown in outbox_status, with no back-off.
void record_error(const Claim &claim, const char *error);

// True where the database was restored or cloned and an operator has not consented yet; `why` then tells.
bool publishing_suspended(const char **why);

}  // namespace retrysafe::outbox
