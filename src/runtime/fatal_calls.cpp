#include "runtime/fatal_calls.hpp"

#include <algorithm>
#include <iterator>

#include "pg/server.hpp"

namespace retrysafe::runtime {

namespace {

// A worker is there again sooner, unless there is no slot for it.
constexpr int64 kRecentUs = 10 * 1000 * 1000;

// The first one of this database that the condition holds for; null when there is none. Under the lock.
template <class Condition>
FatalCall *find(Condition condition) {
  for (FatalCall &call : control_area()->fatal_calls)
    if (call.database == MyDatabaseId && condition(call)) return &call;
  return nullptr;
}

template <class Condition>
bool any(Condition condition) {
  return control_area() && locked(LW_SHARED, [&] { return find(condition) != nullptr; });
}

}  // namespace

bool has_recent_fatal_call(int32 destination) {
  const TimestampTz since = GetCurrentTimestamp() - kRecentUs;
  return any(
      [&](const FatalCall &call) { return call.event.destination == destination && call.at >= since; });
}

bool has_fatal_call(const outbox::Batch &batch) {
  return any([&](const FatalCall &call) {
    for (int32 i = 0; i < batch.event_count; ++i)
      if (call.event == outbox::called_event(batch.claim.destination, batch.events[i])) return true;
    return false;
  });
}

void forget_fatal_call(const outbox::CalledEvent &event) {
  locked(LW_EXCLUSIVE, [&] {
    if (FatalCall *call = find([&](const FatalCall &noted) { return noted.event == event; })) *call = {};
  });
}

void note_fatal_call(ControlArea *area, const FatalCall &call) {
  *std::min_element(std::begin(area->fatal_calls), std::end(area->fatal_calls),
                    [](const FatalCall &a, const FatalCall &b) { return a.at < b.at; }) = call;
}

}  // namespace retrysafe::runtime
