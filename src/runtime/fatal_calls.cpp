#include "runtime/fatal_calls.hpp"

#include "pg/server.hpp"

namespace retrysafe::runtime {

namespace {

// The first one of this database that the condition holds for; null when there is none. Under the lock.
template <class Condition>
FatalCall *find(Condition condition) {
  for (FatalCall &call : control_area()->fatal_calls)
    if (call.database == MyDatabaseId && condition(call.event)) return &call;
  return nullptr;
}

template <class Condition>
bool any(Condition condition) {
  return control_area() && locked(LW_SHARED, [&] { return find(condition) != nullptr; });
}

}  // namespace

bool has_fatal_call(int32 destination) {
  return any([&](const outbox::CalledEvent &called) { return called.destination == destination; });
}

bool has_fatal_call(const outbox::Batch &batch) {
  return any([&](const outbox::CalledEvent &called) {
    for (int32 i = 0; i < batch.event_count; ++i)
      if (called == outbox::called_event(batch.claim.destination, batch.events[i])) return true;
    return false;
  });
}

void forget_fatal_call(const outbox::CalledEvent &event) {
  locked(LW_EXCLUSIVE, [&] {
    if (FatalCall *call = find([&](const outbox::CalledEvent &called) { return called == event; }))
      call->database = InvalidOid;
  });
}

void note_fatal_call(ControlArea *area, const FatalCall &call) {
  area->fatal_calls[area->fatal_calls_noted++ % lengthof(area->fatal_calls)] = call;
}

}  // namespace retrysafe::runtime
