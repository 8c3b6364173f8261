// A worker's own entry in the control area. Does nothing where there is no shared memory.
#pragma once

#include "runtime/control_area.hpp"
#include "runtime/processes.hpp"

#include "pg/server.hpp"

namespace retrysafe::runtime {

// Takes over the slot that was set aside for this process, until its end. False: nobody waits for it any
// more.
bool attach_slot(const WorkerArguments &arguments);

// The extension was found: from now on this worker counts among those of its database.
void slot_is_running();
void set_verdict(Verdict verdict);
void show_activity(Activity activity, int shards);
void show_error(const char *message);

bool asked_to_leave();
// The same, or told to by SIGTERM; for signal handlers: takes no lock.
bool should_break_off();
// What rang since the last call; the bell is silent then.
uint32 take_bell();
bool bell_rings();

// This worker's place among the running ones of its database, and how many they are.
struct Crew {
  int rank;
  int size;
};
Crew crew();

}  // namespace retrysafe::runtime
