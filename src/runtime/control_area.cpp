#include "runtime/control_area.hpp"

#include "pg/shmem.hpp"

#include "pg/server.hpp"

namespace retrysafe::runtime {

namespace {

constinit void *area_memory = nullptr;
constinit LWLock *area_lock = nullptr;

// One more than can run: a slot is still to be read when the next worker starts.
int slots() {
  return max_worker_processes + 1;
}

Size area_size() {
  return add_size(offsetof(ControlArea, slots), mul_size(sizeof(WorkerSlot), slots()));
}

void initialise(void *memory) {
  auto *area = static_cast<ControlArea *>(memory);
  area->slot_count = slots();
  for (int i = 0; i < area->slot_count; ++i) pg_atomic_init_u32(&area->slots[i].bell, 0);
  for (WaitingSession &session : area->sessions) pg_atomic_init_u32(&session.bell, 0);
}

constexpr pg::SharedArea shared_area{.name = "retrysafe",
                                     .size = area_size,
                                     .initialise = initialise,
                                     .area = &area_memory,
                                     .lock = &area_lock};

}  // namespace

ControlArea *control_area() {
  return static_cast<ControlArea *>(area_memory);
}

LWLock *control_lock() {
  return area_lock;
}

void request_control_area() {
  pg::request_shared_area(&shared_area);
}

WorkerSlot *take_slot(ControlArea *area, Oid database, bool by_hand) {
  for (int i = 0; i < area->slot_count; ++i) {
    WorkerSlot *slot = &area->slots[i];
    if (slot->state != SlotState::kFree) continue;
    ++slot->generation;
    slot->database = database;
    slot->pid = 0;
    slot->by_hand = by_hand;
    slot->stop = false;
    slot->verdict = Verdict::kFailed;
    slot->activity = Activity::kIdle;
    slot->shards = 0;
    slot->since = GetCurrentTimestamp();
    slot->error_at = 0;
    slot->last_error[0] = '\0';
    pg_atomic_write_u32(&slot->bell, 0);
    slot->state = SlotState::kStarting;
    return slot;
  }
  return nullptr;
}

bool is_held(const ControlArea *area, Oid database) {
  for (const Hold &hold : area->holds)
    if (hold.pid != 0 && hold.database == database) return true;
  return false;
}

void ring(WorkerSlot *slot, uint32 bits) {
  pg_atomic_fetch_or_u32(&slot->bell, bits);
  if (slot->pid != 0) SetLatch(pg::latch_of(slot->proc_number));
}

void ring(WaitingSession *session, uint32 bits) {
  pg_atomic_fetch_or_u32(&session->bell, bits);
  if (session->pid != 0) SetLatch(pg::latch_of(session->proc_number));
}

void ring_database(ControlArea *area, Oid database, uint32 bits) {
  for (int i = 0; i < area->slot_count; ++i)
    if (area->slots[i].state != SlotState::kFree && area->slots[i].database == database)
      ring(&area->slots[i], bits);
}

void wake_launcher(const ControlArea *area) {
  if (area->launcher_pid != 0) SetLatch(pg::latch_of(area->launcher_proc_number));
}

}  // namespace retrysafe::runtime
