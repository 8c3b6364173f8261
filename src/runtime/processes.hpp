// The two kinds of processes, as the server starts them.
#pragma once

#include "pg/background_worker.hpp"

#include "pg/server.hpp"

namespace retrysafe::runtime {

inline constexpr pg::WorkerDescription kLauncher{.name = "retrysafe launcher",
                                                 .type = "retrysafe launcher",
                                                 .function = "retrysafe_launcher_main",
                                                 .restart_seconds = 5};

inline constexpr pg::WorkerDescription kWorker{
    .name = "retrysafe worker", .type = "retrysafe worker", .function = "retrysafe_worker_main"};

// What a worker gets to know of itself.
struct WorkerArguments {
  Oid database;
  int32 slot;         // -1: without shared memory
  uint32 generation;  // of the slot
};

// Called from _PG_init while preloading.
void register_launcher();

}  // namespace retrysafe::runtime
