#include "runtime/waiting_session.hpp"

#include <algorithm>

#include "runtime/control_area.hpp"

#include "pg/server.hpp"

namespace retrysafe::runtime {

namespace {

constinit WaitingSession *own = nullptr;

// Workers of the database divide the shards anew.
void leave(int, Datum) {
  locked(LW_EXCLUSIVE, [] {
    ring_database(control_area(), own->database, kBellWorkers);
    own->pid = 0;
    own->database = InvalidOid;
    own->destination_count = 0;
  });
  own = nullptr;
}

void enter() {
  ControlArea *area = control_area();
  locked(LW_EXCLUSIVE, [&] {
    for (WaitingSession &session : area->sessions) {
      if (session.pid != 0) continue;
      session.pid = MyProcPid;
      session.proc_number = pg::own_proc_number();
      session.destination_count = 0;
      session.database = MyDatabaseId;
      pg_atomic_write_u32(&session.bell, 0);
      area->session_count = std::max(area->session_count, static_cast<int32>(&session - area->sessions) + 1);
      own = &session;
      return;
    }
  });
  if (own) before_shmem_exit(leave, Datum{0});
}

}  // namespace

Joined join_waiting(const int32 *destinations, int32 count) {
  if (!control_area()) return Joined::kNot;
  const bool before = own != nullptr;
  if (!before) enter();
  if (!own) return Joined::kNot;
  count = std::min(count, static_cast<int32>(lengthof(own->destinations)));
  if (own->destination_count != count || !std::equal(destinations, destinations + count, own->destinations))
    locked(LW_EXCLUSIVE, [&] {
      std::copy_n(destinations, count, own->destinations);
      own->destination_count = count;
      ring_database(control_area(), own->database, kBellWorkers);
    });
  return before ? Joined::kBefore : Joined::kNow;
}

bool take_waiting_bell() {
  return own && pg_atomic_exchange_u32(&own->bell, 0) != 0;
}

int32 count_waiting(int32 destination) {
  ControlArea *area = control_area();
  if (!area) return 0;
  return locked(LW_SHARED, [&] {
    int32 found = 0;
    for (int32 i = 0; i < area->session_count; ++i) {
      const WaitingSession &session = area->sessions[i];
      const int32 *end = session.destinations + session.destination_count;
      if (session.database == MyDatabaseId && std::find(session.destinations, end, destination) != end)
        ++found;
    }
    return found;
  });
}

}  // namespace retrysafe::runtime
