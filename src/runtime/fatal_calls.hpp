// Calls of the kind "function" that ended the worker: the function made an error fatal, or did not come back.
//
// Such an end undoes everything, the record of the failure too. So the worker says on its way out which event
// it was, and whoever gets the shard next counts that attempt instead of calling it once more. A worker that
// was told to end says nothing, and one that is killed takes this memory along.
#pragma once

#include "outbox/engine.hpp"
#include "runtime/control_area.hpp"

#include "pg/server.hpp"

namespace retrysafe::runtime {

// In this database; false without shared memory. A recent one: what is never counted, since the event was
// discarded or the destination dropped, makes nobody wait for good.
bool has_recent_fatal_call(int32 destination);
bool has_fatal_call(const outbox::Batch &batch);
// The attempt was counted.
void forget_fatal_call(const outbox::CalledEvent &event);

// Under the lock. Where none is free the oldest one makes room.
void note_fatal_call(ControlArea *area, const FatalCall &call);

}  // namespace retrysafe::runtime
