// The launcher: one process per server. It finds out which databases want workers and keeps them running.
// What to do is decided in core/supervisor; here is the world it decides about.
#include <algorithm>
#include <chrono>
#include <vector>

#include "core/supervisor.hpp"
#include "pg/boundary.hpp"
#include "pg/guard.hpp"
#include "pg/latch.hpp"
#include "runtime/control_area.hpp"
#include "runtime/processes.hpp"
#include "settings.hpp"

#include "pg/server.hpp"

extern "C" PGDLLEXPORT void retrysafe_launcher_main(Datum);

namespace retrysafe::runtime {

namespace {

using Milliseconds = Supervisor::Milliseconds;

// The catalog of databases is read again this often, if any transaction ended meanwhile: for what was not
// announced.
constexpr Milliseconds kRescanInterval = 15'000;
// A worker of an earlier launcher that has not shown up after this time will not come any more.
constexpr Milliseconds kLostAfter = 30'000;

Milliseconds now_ms() {
  return std::chrono::duration_cast<std::chrono::milliseconds>(
             std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

// --- jumpable ----------------------------------------------------------------------------------------------

struct CatalogRows {
  Supervisor::Row *rows;
  int count;
};

// Into the current memory context.
CatalogRows read_catalog() {
  MemoryContext memory = CurrentMemoryContext;
  CatalogRows result{};
  int room = 64;
  result.rows = static_cast<Supervisor::Row *>(palloc(sizeof(Supervisor::Row) * room));

  SetCurrentStatementStartTimestamp();
  StartTransactionCommand();
  (void)GetTransactionSnapshot();
  Relation catalog = table_open(DatabaseRelationId, AccessShareLock);
  SysScanDesc scan = systable_beginscan(catalog, InvalidOid, false, nullptr, 0, nullptr);
  while (HeapTuple tuple = systable_getnext(scan)) {
    const auto *form = reinterpret_cast<Form_pg_database>(GETSTRUCT(tuple));
    if (result.count == room) {
      room *= 2;
      result.rows = static_cast<Supervisor::Row *>(repalloc(result.rows, sizeof(Supervisor::Row) * room));
    }
    // -2 marks a database whose DROP was interrupted.
    const bool open = form->datallowconn && !form->datistemplate && form->datconnlimit != -2;
    result.rows[result.count++] = {form->oid, HeapTupleHeaderGetRawXmin(tuple->t_data), open};
  }
  systable_endscan(scan);
  table_close(catalog, AccessShareLock);
  CommitTransactionCommand();
  MemoryContextSwitchTo(memory);
  return result;
}

void leave_area(int, Datum) {
  locked(LW_EXCLUSIVE, [] {
    ControlArea *area = control_area();
    if (area->launcher_pid == MyProcPid) area->launcher_pid = 0;
  });
}

void enter_area() {
  before_shmem_exit(leave_area, Datum{0});
  locked(LW_EXCLUSIVE, [] {
    ControlArea *area = control_area();
    area->launcher_pid = MyProcPid;
    area->launcher_proc_number = pg::own_proc_number();
    area->launcher_since = GetCurrentTimestamp();
    area->no_slot_since = 0;
    area->rescan = true;
  });
}

const char *database_label(Oid database) {
  return psprintf("%u", database);
}

// --- owning ------------------------------------------------------------------------------------------------

class Launcher {
 public:
  explicit Launcher(MemoryContext scratch) : scratch_(scratch), started_(control_area()->slot_count) {}

  void run() {
    pg::call([&] { set_ = pg::make_wait_set(-1); });
    while (!ShutdownRequestPending) {
      MemoryContextSwitchTo(scratch_);
      MemoryContextReset(scratch_);
      const Milliseconds wait = turn();
      if (ShutdownRequestPending) break;
      pg::call([&] { pg::wait(set_, static_cast<long>(wait), pg::Wait::kLauncherMain); });
    }
  }

 private:
  struct Started {
    BackgroundWorkerHandle *handle = nullptr;
    uint32 generation = 0;
    Milliseconds at = 0;
  };

  Milliseconds turn() {
    const Milliseconds now = now_ms();
    hear();
    look_at_slots(now);
    if (rescan_ || now >= next_rescan_) {
      const uint64 completed = pg::transactions_completed();
      if (rescan_ || completed != completed_at_rescan_) {
        completed_at_rescan_ = completed;
        const CatalogRows rows = pg::call([] { return read_catalog(); });
        supervisor_.catalog({rows.rows, static_cast<size_t>(rows.count)});
      }
      rescan_ = false;
      next_rescan_ = now + kRescanInterval;
    }
    for (const Oid database : announced_) supervisor_.announced(database);
    if (all_announced_) supervisor_.everything_announced();
    announced_.clear();
    all_announced_ = false;

    const auto decision = supervisor_.decide(now, workers_, held_, settings::workers_per_database);
    for (const int slot : decision.stop) stop(slot);
    Milliseconds wait = decision.wait;
    for (const Oid database : decision.start)
      if (!start(database, now)) {
        wait = 0;  // decide again, with that failure known
        break;
      }
    const Milliseconds until_rescan = next_rescan_ - now;
    return wait < 0 ? until_rescan : std::min(wait, until_rescan);
  }

  // What sessions announced.
  void hear() {
    Oid copy[lengthof(ControlArea::announced)];
    int count = 0;
    locked(LW_EXCLUSIVE, [&] {
      ControlArea *area = control_area();
      rescan_ = rescan_ || area->rescan;
      all_announced_ = all_announced_ || area->announced_overflow;
      for (; count < area->announced_count; ++count) copy[count] = area->announced[count];
      area->rescan = area->announced_overflow = false;
      area->announced_count = 0;
    });
    announced_.assign(copy, copy + count);
  }

  // Learns from the slots, and frees those of workers that are gone.
  void look_at_slots(Milliseconds now) {
    struct Ended {
      Oid database;
      Verdict verdict;
    };
    workers_.clear();
    held_.clear();
    ControlArea *area = control_area();
    workers_.reserve(static_cast<size_t>(area->slot_count));
    held_.reserve(lengthof(ControlArea::holds));
    std::vector<Ended> ended;
    ended.reserve(static_cast<size_t>(area->slot_count));
    std::vector<Oid> found;
    found.reserve(static_cast<size_t>(area->slot_count));

    std::vector<bool> gone(static_cast<size_t>(area->slot_count));
    for (int i = 0; i < area->slot_count; ++i) gone[i] = is_gone(i, now);
    locked(LW_EXCLUSIVE, [&] {
      for (const Hold &hold : area->holds)
        if (hold.pid != 0) held_.push_back(hold.database);
      for (int i = 0; i < area->slot_count; ++i) {
        WorkerSlot &slot = area->slots[i];
        if (slot.state == SlotState::kFree) continue;
        if (slot.state == SlotState::kLeft || (gone[i] && slot.generation == started_[i].generation)) {
          if (!slot.by_hand) ended.push_back({slot.database, slot.verdict});
          slot.state = SlotState::kFree;
          slot.database = InvalidOid;
          slot.pid = 0;
          continue;
        }
        if (slot.state == SlotState::kRunning) found.push_back(slot.database);
        if (!slot.by_hand)
          workers_.push_back({i, slot.database, slot.state == SlotState::kStarting, slot.stop});
      }
    });
    for (const Oid database : found) supervisor_.found(database, now);
    for (const Ended &e : ended) {
      supervisor_.ended(e.database, ending_of(e.verdict), now);
      // Perhaps there is no such database any more.
      if (e.verdict == Verdict::kFailed) rescan_ = true;
    }
  }

  static Supervisor::Ending ending_of(Verdict verdict) {
    switch (verdict) {
      case Verdict::kNotInstalled:
      case Verdict::kOtherVersion:
        return Supervisor::Ending::kNothingToDo;
      case Verdict::kTerminated:
      case Verdict::kLetGo:
      case Verdict::kFatalCall:
        return Supervisor::Ending::kAsked;
      case Verdict::kFailed:
        break;
    }
    return Supervisor::Ending::kFailed;
  }

  // A worker that died before it could take its slot over, or was never started.
  bool is_gone(int i, Milliseconds now) {
    struct Seen {
      SlotState state;
      uint32 generation;
      int32 pid;
      bool by_hand;
    };
    const Seen seen = locked(LW_SHARED, [&] {
      const WorkerSlot &slot = control_area()->slots[i];
      return Seen{slot.state, slot.generation, slot.pid, slot.by_hand};
    });
    Started &started = started_[i];
    if (seen.state == SlotState::kFree || seen.state == SlotState::kLeft) return false;
    if (seen.generation != started.generation) {
      // Not started by us: by hand, or by the launcher before us.
      if (started.handle) pg::call([&] { pfree(started.handle); });
      started = {nullptr, seen.generation, now};
    }
    if (started.handle) {
      const BackgroundWorkerHandle *handle = started.handle;
      return pg::call([handle] {
        pid_t pid;
        return GetBackgroundWorkerPid(const_cast<BackgroundWorkerHandle *>(handle), &pid) == BGWH_STOPPED;
      });
    }
    return seen.pid == 0 && now - started.at > kLostAfter;
  }

  void stop(int i) {
    locked(LW_EXCLUSIVE, [&] {
      WorkerSlot &slot = control_area()->slots[i];
      if (slot.generation != started_[i].generation || slot.state == SlotState::kFree) return;
      slot.stop = true;
      ring(&slot, 0);
    });
  }

  bool start(Oid database, Milliseconds now) {
    WorkerArguments arguments{database, -1, 0};
    locked(LW_EXCLUSIVE, [&] {
      ControlArea *area = control_area();
      if (is_held(area, database)) return;
      if (const WorkerSlot *slot = take_slot(area, database, false)) {
        arguments.slot = static_cast<int32>(slot - area->slots);
        arguments.generation = slot->generation;
      }
    });
    if (arguments.slot < 0) return true;  // held meanwhile: the end of the hold wakes us
    MemoryContext lasting = TopMemoryContext;
    BackgroundWorkerHandle *handle = pg::call([&]() -> BackgroundWorkerHandle * {
      MemoryContext before = MemoryContextSwitchTo(lasting);
      BackgroundWorkerHandle *h = nullptr;
      const bool started = pg::start_dynamic_worker(kWorker, arguments, &h);
      MemoryContextSwitchTo(before);
      return started ? h : nullptr;
    });
    if (handle) {
      Started &started = started_[arguments.slot];
      if (started.handle) pg::call([&] { pfree(started.handle); });
      started = {handle, arguments.generation, now};
      if (supervisor_.start_succeeded()) {
        note_no_slot(false);
        pg::call([] { pg::log("retrysafe: workers can be started again"); });
      }
      return true;
    }
    locked(LW_EXCLUSIVE, [&] {
      WorkerSlot &slot = control_area()->slots[arguments.slot];
      slot.state = SlotState::kFree;
      slot.database = InvalidOid;
    });
    if (supervisor_.start_failed(now)) {
      note_no_slot(true);
      pg::call([&] {
        pg::log_with_hint("Consider increasing the configuration parameter \"max_worker_processes\".",
                          "retrysafe: no background worker slot is free for database with OID %s",
                          database_label(database));
      });
    }
    return false;
  }

  static void note_no_slot(bool lacking) {
    locked(LW_EXCLUSIVE, [&] { control_area()->no_slot_since = lacking ? GetCurrentTimestamp() : 0; });
  }

  MemoryContext scratch_;
  WaitEventSet *set_ = nullptr;
  Supervisor supervisor_;
  std::vector<Started> started_;
  std::vector<Supervisor::Worker> workers_;
  std::vector<Supervisor::Database> held_;
  std::vector<Oid> announced_;
  bool all_announced_ = false;
  bool rescan_ = true;
  Milliseconds next_rescan_ = 0;
  uint64 completed_at_rescan_ = 0;
};

}  // namespace

void register_launcher() {
  pg::register_static_worker(kLauncher);
}

}  // namespace retrysafe::runtime

using namespace retrysafe;
using namespace retrysafe::runtime;

void retrysafe_launcher_main(Datum) {
  pqsignal(SIGTERM, SignalHandlerForShutdownRequest);
  pqsignal(SIGHUP, SignalHandlerForConfigReload);
  BackgroundWorkerUnblockSignals();
  // No database: the catalogs that all share are enough.
  BackgroundWorkerInitializeConnection(nullptr, nullptr, 0);
  pgstat_report_appname("retrysafe launcher");
  pgstat_report_activity(STATE_IDLE, nullptr);
  enter_area();
  MemoryContext scratch =
      AllocSetContextCreate(TopMemoryContext, "retrysafe launcher", ALLOCSET_DEFAULT_SIZES);
  pg::boundary([&] {
    Launcher(scratch).run();
    return Datum{0};
  });
  // Status 0 would make the postmaster forget us: terminated by hand, we come back.
  proc_exit(1);
}
