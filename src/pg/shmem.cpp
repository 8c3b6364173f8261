#include "pg/shmem.hpp"

#include <cstring>

#include "pg/server.hpp"

namespace retrysafe::pg {

namespace {

constinit const SharedArea *requested = nullptr;
constinit shmem_request_hook_type next_request = nullptr;
constinit shmem_startup_hook_type next_startup = nullptr;

void request() {
  if (next_request) next_request();
  RequestAddinShmemSpace(requested->size());
  RequestNamedLWLockTranche(requested->name, 1);
}

void start_up() {
  if (next_startup) next_startup();
  // After a crash restart this runs in the same postmaster again, over fresh memory.
  *requested->area = nullptr;
  *requested->lock = nullptr;
  LWLockAcquire(AddinShmemInitLock, LW_EXCLUSIVE);
  bool found;
  void *area = ShmemInitStruct(requested->name, requested->size(), &found);
  if (!found) {
    std::memset(area, 0, requested->size());
    requested->initialise(area);
  }
  *requested->lock = &GetNamedLWLockTranche(requested->name)->lock;
  *requested->area = area;
  LWLockRelease(AddinShmemInitLock);
}

}  // namespace

void request_shared_area(const SharedArea *area) {
  Assert(!requested);
  requested = area;
  next_request = shmem_request_hook;
  shmem_request_hook = request;
  next_startup = shmem_startup_hook;
  shmem_startup_hook = start_up;
}

}  // namespace retrysafe::pg
