#include "runtime/database_holds.hpp"

#include "pg/database_commands.hpp"
#include "pg/latch.hpp"
#include "pg/xact_events.hpp"
#include "runtime/control_area.hpp"
#include "settings.hpp"

#include "pg/server.hpp"

namespace retrysafe::runtime {

namespace {

constinit Hold *own_hold = nullptr;

void end_hold() noexcept {
  if (!own_hold) return;
  locked(LW_EXCLUSIVE, [] {
    own_hold->pid = 0;
    wake_launcher(control_area());
  });
  own_hold = nullptr;
}

void end_hold_at_exit(int, Datum) {
  end_hold();
}

int workers_left(Oid database) {
  return locked(LW_SHARED, [&] {
    int count = 0;
    const ControlArea *area = control_area();
    for (int i = 0; i < area->slot_count; ++i) {
      const WorkerSlot &slot = area->slots[i];
      if (slot.database == database &&
          (slot.state == SlotState::kStarting || slot.state == SlotState::kRunning))
        ++count;
    }
    return count;
  });
}

void hold(Oid database) {
  if (!control_area()) return;
  static constinit bool exit_callback = false;
  if (!exit_callback) {
    before_shmem_exit(end_hold_at_exit, Datum{0});
    exit_callback = true;
  }
  locked(LW_EXCLUSIVE, [&] {
    ControlArea *area = control_area();
    for (Hold &free : area->holds) {
      if (free.pid != 0) continue;
      free = {database, MyProcPid, pg::own_proc_number()};
      own_hold = &free;
      break;
    }
    for (int i = 0; i < area->slot_count; ++i) {
      WorkerSlot &slot = area->slots[i];
      if (slot.database != database || slot.state == SlotState::kFree) continue;
      slot.stop = true;
      ring(&slot, 0);
    }
  });
  // A worker that has requests under way waits for them for a while. After that the command has its own
  // patience.
  const TimestampTz give_up =
      TimestampTzPlusMilliseconds(GetCurrentTimestamp(), settings::worker_shutdown_timeout + 5000);
  while (workers_left(database) > 0) {
    const long left = TimestampDifferenceMilliseconds(GetCurrentTimestamp(), give_up);
    if (left <= 0) break;
    pg::wait_for_latch(Min(left, 1000L), pg::Wait::kDatabaseLetGo);
  }
}

// --- evidence that a database should be looked at, told to the launcher when the transaction commits -------

constinit bool announce_extension = false;
constinit bool announce_databases = false;

void note_change(Oid database) {
  if (OidIsValid(database))
    announce_extension = true;
  else
    announce_databases = true;
}

void forget() noexcept {
  announce_extension = announce_databases = false;
}

void announce() noexcept {
  if (!announce_extension && !announce_databases) return;
  if (control_area())
    locked(LW_EXCLUSIVE, [] {
      ControlArea *area = control_area();
      area->rescan = area->rescan || announce_databases;
      if (announce_extension) {
        if (area->announced_count < static_cast<int>(lengthof(area->announced)))
          area->announced[area->announced_count++] = MyDatabaseId;
        else
          area->announced_overflow = true;
        ring_database(area, MyDatabaseId, kBellWork);
      }
      wake_launcher(area);
    });
  forget();
}

constexpr pg::DatabaseCommands commands{
    .before_exclusive_use = hold, .after_exclusive_use = end_hold, .changed = note_change};

constexpr pg::XactSubscriber subscriber{.before_commit = nullptr,
                                        .before_prepare = nullptr,
                                        .after_commit = announce,
                                        .after_prepare = forget,  // COMMIT PREPARED finds out by itself
                                        .after_abort = forget,
                                        .sub_commit = nullptr,
                                        .sub_abort = nullptr};

}  // namespace

void watch_databases() {
  pg::watch_database_commands(&commands);
  pg::subscribe_to_transactions(&subscriber);
}

}  // namespace retrysafe::runtime
