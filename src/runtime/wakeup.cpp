#include "runtime/wakeup.hpp"

#include <algorithm>

#include "runtime/control_area.hpp"

#include "pg/server.hpp"

namespace retrysafe::runtime {

// Many sessions commit per worker's look. Only the first of them since the worker last began to look takes
// the lock; the others see that the bell rings already. That is safe: the worker stops the bell *before* it
// takes its snapshot, and our commit became visible before we look at the bell.
void announce_commit(News news) noexcept {
  ControlArea *area = control_area();
  if (!area) return;
  pg_memory_barrier();
  for (int i = 0; i < area->slot_count; ++i) {
    WorkerSlot *slot = &area->slots[i];
    if (slot->database != MyDatabaseId) continue;
    // A worker shows that it has shards before it reads for them the first time.
    if (news == News::kEvents && *static_cast<volatile int32 *>(&slot->shards) == 0) continue;
    if (pg_atomic_read_u32(&slot->bell) & kBellWork) continue;
    locked(LW_SHARED, [&] {
      if (slot->state != SlotState::kFree && slot->database == MyDatabaseId) ring(slot, kBellWork);
    });
  }
  const int32 sessions = *static_cast<volatile int32 *>(&area->session_count);
  for (int32 i = 0; i < sessions; ++i) {
    WaitingSession *session = &area->sessions[i];
    if (session->database != MyDatabaseId || (pg_atomic_read_u32(&session->bell) & kBellWork)) continue;
    locked(LW_SHARED, [&] {
      if (session->database == MyDatabaseId) ring(session, kBellWork);
    });
  }
}

bool has_worker() noexcept {
  const ControlArea *area = control_area();
  if (!area) return false;
  return locked(LW_SHARED, [&] {
    return std::any_of(area->slots, area->slots + area->slot_count, [](const WorkerSlot &slot) {
      return slot.database == MyDatabaseId && slot.state == SlotState::kRunning && !slot.stop &&
             slot.shards > 0;
    });
  });
}

}  // namespace retrysafe::runtime
