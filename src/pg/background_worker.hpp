// Describing and starting background workers.
#pragma once

#include <cstring>
#include <type_traits>

#include "pg/server.hpp"

namespace retrysafe::pg {

struct WorkerDescription {
  const char *name;      // of this process, as in ps
  const char *type;      // pg_stat_activity.backend_type
  const char *function;  // exported by this library
  int restart_seconds = BGW_NEVER_RESTART;
};

// Started by the postmaster after recovery. Only while preloading.
void register_static_worker(const WorkerDescription &description);

// False when max_worker_processes are in use. `extra` (up to BGW_EXTRALEN bytes) reaches the process as it
// is. The handle is palloc'd; this process hears by its latch when the worker starts or stops.
bool start_dynamic_worker(const WorkerDescription &description, const void *extra, size_t extra_size,
                          BackgroundWorkerHandle **handle);

template <class Extra>
bool start_dynamic_worker(const WorkerDescription &description, const Extra &extra,
                          BackgroundWorkerHandle **handle) {
  static_assert(std::is_trivially_copyable_v<Extra> && sizeof(Extra) <= BGW_EXTRALEN);
  return start_dynamic_worker(description, &extra, sizeof extra, handle);
}

template <class Extra>
Extra worker_extra() {
  Extra extra;
  std::memcpy(&extra, MyBgworkerEntry->bgw_extra, sizeof extra);
  return extra;
}

}  // namespace retrysafe::pg
