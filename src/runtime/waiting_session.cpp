#include "runtime/waiting_session.hpp"

#include <algorithm>

#include "runtime/control_area.hpp"

#include "pg/server.hpp"

namespace retrysafe::runtime {

namespace {

constinit WaitingSession *own = nullptr;

// For so long after outbox_wait returned a session counts as one that publishes. A relay comes back every
// second, however much it has to do.
constexpr int64 kCountsForUs = 5'000'000;

bool counts(const WaitingSession &session, TimestampTz now) {
  return session.waiting || session.left_at + kCountsForUs > now;
}

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
      session.waiting = false;
      session.left_at = 0;
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
  const bool same =
      own->destination_count == count && std::equal(destinations, destinations + count, own->destinations);
  const TimestampTz now = GetCurrentTimestamp();
  locked(LW_EXCLUSIVE, [&] {
    const bool known = same && counts(*own, now);
    std::copy_n(destinations, count, own->destinations);
    own->destination_count = count;
    own->waiting = true;
    if (!known) ring_database(control_area(), own->database, kBellWorkers);
  });
  return before ? Joined::kBefore : Joined::kNow;
}

void leave_waiting() {
  if (!own) return;
  const TimestampTz now = GetCurrentTimestamp();
  locked(LW_EXCLUSIVE, [&] {
    own->waiting = false;
    own->left_at = now;
  });
}

bool take_waiting_bell() {
  return own && pg_atomic_exchange_u32(&own->bell, 0) != 0;
}

Publishers count_publishers(int32 destination) {
  ControlArea *area = control_area();
  if (!area) return {0, DT_NOEND};
  const TimestampTz now = GetCurrentTimestamp();
  return locked(LW_SHARED, [&] {
    Publishers found{0, DT_NOEND};
    for (int32 i = 0; i < area->session_count; ++i) {
      const WaitingSession &session = area->sessions[i];
      const int32 *end = session.destinations + session.destination_count;
      if (session.database != MyDatabaseId || !counts(session, now)) continue;
      if (std::find(session.destinations, end, destination) == end) continue;
      ++found.count;
      if (!session.waiting) found.until = std::min(found.until, session.left_at + kCountsForUs);
    }
    return found;
  });
}

}  // namespace retrysafe::runtime
