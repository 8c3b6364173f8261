#include "pg/background_worker.hpp"

#include "pg/text.hpp"

#include "pg/server.hpp"

namespace retrysafe::pg {

namespace {

BackgroundWorker worker_of(const WorkerDescription &description) {
  BackgroundWorker worker;
  std::memset(&worker, 0, sizeof worker);
  copy_text(worker.bgw_name, description.name);
  copy_text(worker.bgw_type, description.type);
  copy_text(worker.bgw_library_name, "retrysafe");
  copy_text(worker.bgw_function_name, description.function);
  worker.bgw_flags = BGWORKER_SHMEM_ACCESS | BGWORKER_BACKEND_DATABASE_CONNECTION;
  worker.bgw_start_time = BgWorkerStart_RecoveryFinished;
  worker.bgw_restart_time = description.restart_seconds;
  return worker;
}

}  // namespace

void register_static_worker(const WorkerDescription &description) {
  BackgroundWorker worker = worker_of(description);
  RegisterBackgroundWorker(&worker);
}

bool start_dynamic_worker(const WorkerDescription &description, const void *extra, size_t extra_size,
                          BackgroundWorkerHandle **handle) {
  BackgroundWorker worker = worker_of(description);
  worker.bgw_notify_pid = MyProcPid;
  std::memcpy(worker.bgw_extra, extra, extra_size);
  return RegisterDynamicBackgroundWorker(&worker, handle);
}

}  // namespace retrysafe::pg
