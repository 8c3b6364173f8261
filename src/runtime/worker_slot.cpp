#include "runtime/worker_slot.hpp"

#include "outbox/function_destination.hpp"
#include "pg/text.hpp"
#include "runtime/fatal_calls.hpp"

#include "pg/server.hpp"

namespace retrysafe::runtime {

namespace {

constinit WorkerSlot *own = nullptr;

void leave_slot(int, Datum) {
  const outbox::CalledEvent *call = should_break_off() ? nullptr : outbox::call_under_way();
  locked(LW_EXCLUSIVE, [&] {
    ControlArea *area = control_area();
    const Oid database = own->database;
    if (call) {
      note_fatal_call(area, {database, *call, GetCurrentTimestamp()});
      own->verdict = Verdict::kFatalCall;
    }
    own->pid = 0;
    if (own->by_hand) {
      own->state = SlotState::kFree;
      own->database = InvalidOid;
    } else {
      own->state = SlotState::kLeft;
    }
    ring_database(area, database, kBellWorkers);
    wake_launcher(area);
    for (const Hold &hold : area->holds)
      if (hold.pid != 0 && hold.database == database) SetLatch(pg::latch_of(hold.proc_number));
  });
  own = nullptr;
}

}  // namespace

bool attach_slot(const WorkerArguments &arguments) {
  ControlArea *area = control_area();
  if (!area || arguments.slot < 0) return true;
  WorkerSlot *slot = &area->slots[arguments.slot];
  const bool ours = locked(LW_EXCLUSIVE, [&] {
    if (slot->state != SlotState::kStarting || slot->generation != arguments.generation) return false;
    slot->pid = MyProcPid;
    slot->proc_number = pg::own_proc_number();
    return true;
  });
  if (!ours) return false;
  own = slot;
  before_shmem_exit(leave_slot, Datum{0});
  return true;
}

void slot_is_running() {
  if (!own) return;
  locked(LW_EXCLUSIVE, [] {
    if (own->state == SlotState::kRunning) return;
    own->state = SlotState::kRunning;
    own->since = GetCurrentTimestamp();
    ring_database(control_area(), own->database, kBellWorkers);
    wake_launcher(control_area());
  });
}

void set_verdict(Verdict verdict) {
  if (own) locked(LW_EXCLUSIVE, [&] { own->verdict = verdict; });
}

void show_activity(Activity activity, int shards) {
  if (!own || (own->activity == activity && own->shards == shards)) return;
  locked(LW_EXCLUSIVE, [&] {
    if (own->activity != activity) own->since = GetCurrentTimestamp();
    own->activity = activity;
    own->shards = shards;
  });
}

void show_error(const char *message) {
  if (!own) return;
  const TimestampTz now = GetCurrentTimestamp();
  char shown[sizeof own->last_error];
  pg::copy_message(shown, message);
  locked(LW_EXCLUSIVE, [&] {
    own->error_at = now;
    memcpy(own->last_error, shown, sizeof shown);
  });
}

bool asked_to_leave() {
  return own && locked(LW_SHARED, [] { return own->stop || is_held(control_area(), own->database); });
}

bool should_break_off() {
  return ShutdownRequestPending || (own && *static_cast<volatile bool *>(&own->stop));
}

uint32 take_bell() {
  return own ? pg_atomic_exchange_u32(&own->bell, 0) : 0;
}

bool bell_rings() {
  return own && pg_atomic_read_u32(&own->bell) != 0;
}

Crew crew() {
  if (!own) return {0, 1};
  return locked(LW_SHARED, [] {
    Crew crew{0, 0};
    const ControlArea *area = control_area();
    for (int i = 0; i < area->slot_count; ++i) {
      const WorkerSlot &slot = area->slots[i];
      if (slot.database != own->database || slot.state != SlotState::kRunning || slot.stop) continue;
      if (&slot < own) ++crew.rank;
      ++crew.size;
    }
    if (crew.size == 0) crew.size = 1;
    return crew;
  });
}

}  // namespace retrysafe::runtime
