// The SQL functions about processes.
#include "pg/boundary.hpp"
#include "runtime/control_area.hpp"
#include "runtime/processes.hpp"

#include "pg/server.hpp"

namespace retrysafe::runtime {

namespace {

const char *state_of(const WorkerSlot &slot) {
  if (slot.state == SlotState::kStarting) return "starting";
  if (slot.state == SlotState::kLeft) return "stopped";
  if (slot.stop) return "stopping";
  switch (slot.activity) {
    case Activity::kIdle:
      return "idle";
    case Activity::kPublishing:
      return "publishing";
    case Activity::kBackingOff:
      return "backing off";
    case Activity::kAwaitingStandby:
      return "awaiting standby";
    case Activity::kSuspended:
      return "suspended";
    case Activity::kStopping:
      return "stopping";
  }
  return "unknown";
}

Datum time_or_null(TimestampTz time, bool *null) {
  *null = time == 0;
  return TimestampTzGetDatum(time);
}

Datum text_or_null(const char *string, bool *null) {
  *null = !string || *string == '\0';
  return *null ? Datum{0} : CStringGetTextDatum(string);
}

void put_launcher(ReturnSetInfo *result, const ControlArea &area) {
  Datum values[8]{};
  bool nulls[8]{};
  values[0] = CStringGetTextDatum("launcher");
  values[1] = Int32GetDatum(area.launcher_pid);
  nulls[2] = nulls[5] = nulls[6] = nulls[7] = true;
  const bool lacking = area.no_slot_since != 0;
  values[3] = CStringGetTextDatum(lacking ? "no worker slot is free" : "running");
  values[4] = time_or_null(lacking ? area.no_slot_since : area.launcher_since, &nulls[4]);
  tuplestore_putvalues(result->setResult, result->setDesc, values, nulls);
}

// An error tells of a destination, and may quote its far side: that is for those who see this database.
bool may_see_error(const WorkerSlot &slot) {
  return slot.database == MyDatabaseId || has_privs_of_role(GetUserId(), ROLE_PG_READ_ALL_STATS);
}

void put_worker(ReturnSetInfo *result, const WorkerSlot &slot) {
  Datum values[8]{};
  bool nulls[8]{};
  values[0] = CStringGetTextDatum("worker");
  values[1] = Int32GetDatum(slot.pid);
  nulls[1] = slot.pid == 0;
  const char *database = get_database_name(slot.database);
  nulls[2] = !database;
  if (database) values[2] = DirectFunctionCall1(namein, CStringGetDatum(database));
  values[3] = CStringGetTextDatum(state_of(slot));
  values[4] = time_or_null(slot.since, &nulls[4]);
  values[5] = Int32GetDatum(slot.shards);
  const bool shown = may_see_error(slot);
  values[6] = text_or_null(shown ? slot.last_error : nullptr, &nulls[6]);
  values[7] = time_or_null(shown ? slot.error_at : 0, &nulls[7]);
  tuplestore_putvalues(result->setResult, result->setDesc, values, nulls);
}

}  // namespace

}  // namespace retrysafe::runtime

using namespace retrysafe;
using namespace retrysafe::runtime;

// outbox_list_workers() → table
RETRYSAFE_SQL_FUNCTION(retrysafe_outbox_list_workers) {
  InitMaterializedSRF(fcinfo, 0);
  auto *result = reinterpret_cast<ReturnSetInfo *>(fcinfo->resultinfo);
  ControlArea *area = control_area();
  if (!area) PG_RETURN_NULL();
  const Size size = offsetof(ControlArea, slots) + sizeof(WorkerSlot) * area->slot_count;
  auto *copy = static_cast<ControlArea *>(palloc(size));
  locked(LW_SHARED, [&] { memcpy(copy, area, size); });
  if (copy->launcher_pid != 0) put_launcher(result, *copy);
  for (int i = 0; i < copy->slot_count; ++i)
    if (copy->slots[i].state != SlotState::kFree) put_worker(result, copy->slots[i]);
  PG_RETURN_NULL();
}

// outbox_run_worker() → integer
RETRYSAFE_SQL_FUNCTION(retrysafe_outbox_run_worker) {
  PreventCommandDuringRecovery("outbox_run_worker()");
  PreventCommandIfParallelMode("outbox_run_worker()");
  WorkerArguments arguments{MyDatabaseId, -1, 0};
  if (ControlArea *area = control_area())
    locked(LW_EXCLUSIVE, [&] {
      if (const WorkerSlot *slot = take_slot(area, MyDatabaseId, true)) {
        arguments.slot = static_cast<int32>(slot - area->slots);
        arguments.generation = slot->generation;
      }
    });
  const auto give_up = [&] {
    if (arguments.slot < 0) return;
    locked(LW_EXCLUSIVE, [&] {
      WorkerSlot &slot = control_area()->slots[arguments.slot];
      if (slot.generation != arguments.generation || slot.pid != 0) return;
      slot.state = SlotState::kFree;
      slot.database = InvalidOid;
    });
  };
  constexpr const char *hint = "Consider increasing the configuration parameter \"max_worker_processes\".";
  BackgroundWorkerHandle *handle;
  if (!pg::start_dynamic_worker(kWorker, arguments, &handle)) {
    give_up();
    pg::raise(kNoWorkerSlot, hint, "no background worker slot is free");
  }
  pid_t pid;
  if (WaitForBackgroundWorkerStartup(handle, &pid) != BGWH_STARTED) {
    give_up();
    pg::raise(kNoWorkerSlot, "The server log may tell more.", "could not start a worker");
  }
  PG_RETURN_INT32(pid);
}
