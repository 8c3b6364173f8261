// Shared memory of our own: asked for while the postmaster preloads, set up once, and again after a crash
// restart.
#pragma once

#include "pg/server.hpp"

namespace retrysafe::pg {

struct SharedArea {
  const char *name;
  Size (*size)();                  // asked when the settings that it depends on are known
  void (*initialise)(void *area);  // of zeroed memory
  void **area;                     // where this process finds it; null until then
  LWLock **lock;                   // protects the area
};

// Called from _PG_init while preloading; `area` lives as long as the process.
void request_shared_area(const SharedArea *area);

}  // namespace retrysafe::pg
