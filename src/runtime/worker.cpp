// The worker: one process that works the shards of one database. README.md has its states.
#include <algorithm>
#include <chrono>

#include "pg/boundary.hpp"
#include "pg/extension.hpp"
#include "pg/latch.hpp"
#include "pg/worker_transaction.hpp"
#include "runtime/processes.hpp"
#include "runtime/worker_slot.hpp"
#include "settings.hpp"

#include "pg/server.hpp"

extern "C" PGDLLEXPORT void retrysafe_worker_main(Datum);

namespace retrysafe::runtime {

namespace {

class Worker {
 public:
  explicit Worker(MemoryContext scratch) : scratch_(scratch) {}

  Verdict run() {
    pg::call([&] { set_ = pg::make_wait_set(-1); });
    for (;;) {
      MemoryContextSwitchTo(scratch_);
      MemoryContextReset(scratch_);
      if (ShutdownRequestPending) return Verdict::kTerminated;
      if (asked_to_leave()) return Verdict::kLetGo;
      if (const auto verdict = look()) return *verdict;
      pg::call([&] { pg::wait(set_, -1, pg::Wait::kWorkerMain); });
    }
  }

 private:
  std::optional<Verdict> look() {
    bool installed = false;
    (void)pg::in_transaction("looking for the extension", nullptr,
                             [&] { installed = pg::extension_if_installed() != nullptr; });
    if (!installed) return Verdict::kNotInstalled;
    slot_is_running();
    return std::nullopt;
  }

  MemoryContext scratch_;
  WaitEventSet *set_ = nullptr;
};

}  // namespace

}  // namespace retrysafe::runtime

using namespace retrysafe;
using namespace retrysafe::runtime;

void retrysafe_worker_main(Datum) {
  pg::handle_termination();
  pqsignal(SIGHUP, SignalHandlerForConfigReload);
  BackgroundWorkerUnblockSignals();
  const auto arguments = pg::worker_extra<WorkerArguments>();
  if (!attach_slot(arguments)) proc_exit(0);
  if (asked_to_leave()) {
    set_verdict(Verdict::kLetGo);
    proc_exit(0);
  }
  BackgroundWorkerInitializeConnectionByOid(arguments.database, InvalidOid, 0);
  pg::pin_settings();
  pgstat_report_appname("retrysafe worker");
  MemoryContext scratch = AllocSetContextCreate(TopMemoryContext, "retrysafe worker", ALLOCSET_DEFAULT_SIZES);
  pg::boundary([&] {
    set_verdict(Worker(scratch).run());
    return Datum{0};
  });
  proc_exit(0);
}
