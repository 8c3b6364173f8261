// Waiting: for the latch, the death of the postmaster, and one descriptor.
#pragma once

#include "pg/server.hpp"

namespace retrysafe::pg {

// Names of our waits in pg_stat_activity, where the server can show such (17 and later).
enum class Wait { kLauncherMain, kWorkerMain, kDatabaseLetGo, kFaultPoint, kRingLock, kOutboxWait, kStandby };

// Jumpable. Waits until the latch is set, the descriptor becomes readable (-1: none), or the time has passed
// (-1: no end), absorbs interrupts and reads the configuration again when told to: then it returns true. Ends
// the process when the postmaster has died.
bool wait(WaitEventSet *set, long timeout_ms, Wait what);

// For one process-lifetime loop.
WaitEventSet *make_wait_set(int readable_fd);

// The same without a set, for waits that happen rarely.
void wait_for_latch(long timeout_ms, Wait what);

// Whether the client of this session is still there, as far as its socket tells.
bool client_is_there();

// Lets a little time pass, whatever the latch says; whoever set it is heard afterwards.
void pause(long timeout_ms, Wait what);

}  // namespace retrysafe::pg
