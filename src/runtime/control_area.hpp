// What launcher, workers and sessions tell each other: one area of shared memory under one lock.
//
// Without preloading there is no area: control_area() is null, and everything here does nothing. All
// functions can be called from any frame: none raises, allocates or throws. Sections under the lock are reads
// and writes of fields, and latches are only set while the lock keeps their owner's entry in place.
#pragma once

#include <cstdint>
#include <type_traits>

#include "outbox/engine.hpp"

#include "pg/server.hpp"

namespace retrysafe::runtime {

enum class SlotState : int32 {
  kFree,
  kStarting,  // asked for; the process has not looked into its database yet
  kRunning,   // the extension is there
  kLeft,      // the process is gone and has said why; the launcher frees the slot
};

enum class Activity : int32 { kIdle, kPublishing, kBackingOff, kAwaitingStandby, kSuspended, kStopping };

// Why a worker left.
enum class Verdict : int32 {
  kFailed,        // unexpectedly: what a slot holds until its process knows better
  kTerminated,    // by signal, in order
  kLetGo,         // asked to by somebody who needs the database, or not needed any more
  kFatalCall,     // ended by a function that it called: the next one does not begin with that
  kNotInstalled,  // the extension is not in the database
  kOtherVersion,  // its SQL objects are of another version than the library
};

// Bits of WorkerSlot::bell.
inline constexpr uint32 kBellWork = 1;     // something was committed for the workers
inline constexpr uint32 kBellWorkers = 2;  // workers of the database came or left

struct WorkerSlot {
  SlotState state;
  uint32 generation;  // of this use of the slot
  Oid database;
  int32 pid;          // 0 until the process is there
  int32 proc_number;  // valid with pid
  bool by_hand;       // started by outbox_run_worker
  bool stop;          // asked to leave
  Verdict verdict;
  Activity activity;
  int32 shards;
  TimestampTz since;  // of state or activity
  TimestampTz error_at;
  char last_error[256];
  pg_atomic_uint32 bell;
};

// A session that has called outbox_wait, and so may publish besides the workers of its database.
struct WaitingSession {
  Oid database;
  int32 pid;  // 0: free
  int32 proc_number;
  int32 destination_count;
  int32 destinations[16];  // that it publishes to; workers leave it a share of their shards
  bool waiting;            // it is in outbox_wait now
  TimestampTz left_at;     // when it last came out
  pg_atomic_uint32 bell;
};

// Somebody is running a command for which nobody else may be connected to the database.
struct Hold {
  Oid database;
  int32 pid;  // 0: free
  int32 proc_number;
};

// See fatal_calls.hpp.
struct FatalCall {
  Oid database;  // InvalidOid: free
  outbox::CalledEvent event;
  TimestampTz at;
};

struct ControlArea {
  int32 launcher_pid;
  int32 launcher_proc_number;
  TimestampTz launcher_since;
  TimestampTz no_slot_since;  // 0: workers can be started
  bool rescan;                // databases were made or altered
  bool announced_overflow;
  int32 announced_count;
  Oid announced[32];  // databases whose extension was made or updated
  Hold holds[32];
  FatalCall fatal_calls[64];
  int32 session_count;  // entries of `sessions` that were ever used: who commits looks at no others
  WaitingSession sessions[64];
  int32 slot_count;
  WorkerSlot slots[FLEXIBLE_ARRAY_MEMBER];
};
static_assert(std::is_trivially_copyable_v<ControlArea> && std::is_standard_layout_v<ControlArea>);

ControlArea *control_area();
LWLock *control_lock();

// Runs `body`, a few reads or writes of fields.
template <class Body>
auto locked(LWLockMode mode, Body &&body) noexcept {
  LWLockAcquire(control_lock(), mode);
  if constexpr (std::is_void_v<decltype(body())>) {
    body();
    LWLockRelease(control_lock());
  } else {
    auto result = body();
    LWLockRelease(control_lock());
    return result;
  }
}

// Called from _PG_init while preloading.
void request_control_area();

// --- under the lock ----------------------------------------------------------------------------------------

// A free slot, taken for a worker that is about to be started; null when there is none.
WorkerSlot *take_slot(ControlArea *area, Oid database, bool by_hand);
bool is_held(const ControlArea *area, Oid database);
void ring(WorkerSlot *slot, uint32 bits);
void ring(WaitingSession *session, uint32 bits);
void ring_database(ControlArea *area, Oid database, uint32 bits);
void wake_launcher(const ControlArea *area);

}  // namespace retrysafe::runtime
