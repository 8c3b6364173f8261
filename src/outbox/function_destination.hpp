// The kind "function": a function of this database is called with each event, in the transaction that records
// what became of the events. Effect and progress commit together, so every event has its effect exactly once.
//
// The worker is a superuser and the function is anybody's. So it runs as the role that made the destination,
// in a security-restricted operation, and nothing that it leaves behind in the session stays.
#pragma once

#include "outbox/engine.hpp"

#include "pg/server.hpp"

namespace retrysafe::outbox {

// Each event takes a subtransaction; beyond 64 of them snapshots of all other sessions become slow.
inline constexpr int32 kMaxFunctionEvents = 60;

struct FunctionRun {
  bool delivered;  // at least one event
  bool called;     // what fails after that may be an event's fault
  const char
      *reason;  // why nothing can be called now, null when it can: the shard then rests until `retry_at`
  TimestampTz retry_at;
};

// Whether it is a FUNCTION name(event jsonb) RETURNS void. False for one that does not exist.
bool fits_a_destination(Oid function);

// How long a shard has to be leased so that one call can take its full time.
int64 function_lease_us(const Destination &destination);

using StopCheck = bool (*)();

// Calls the function for the events of a batch and records the outcomes; after half a second the rest is left
// for the next batch, since the other destinations of the worker wait. `stop` is asked now and then, from a
// signal handler too, whether to break off: the call under way is then undone, and what was done before is
// recorded.
//
// Jumpable, in a transaction of a worker. On an error the caller aborts the transaction, and nothing has
// happened; `run`, which comes in empty, then tells whether anything was called.
void call_function(const Destination &destination, Batch *batch, StopCheck stop, FunctionRun *run);

// What is being called: for the end of a process, which it may be the cause of. Null: nothing.
const CalledEvent *call_under_way();

// Whether an error that came after the calls, while their outcomes were recorded or the transaction
// committed, can be the fault of a call. A lock that others hold, a cancellation from outside and a full disk
// are not.
bool may_be_a_calls_fault(int sqlstate);
// The first event of the batch has failed, and nothing is called. Jumpable, in a transaction of a worker.
void record_failure(const Destination &destination, Batch *batch, const char *reason);

}  // namespace retrysafe::outbox
