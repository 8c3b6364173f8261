#include "pg/latch.hpp"

#include "pg/server.hpp"

// Of libpq/libpq.h, which not every installation can include: it wants headers of GSSAPI.
extern "C" bool pq_check_connection(void);

namespace retrysafe::pg {

namespace {

uint32 event_number(Wait what) {
  static constinit uint32 numbers[7]{};
  static constexpr const char *names[] = {
      "RetrysafeLauncherMain", "RetrysafeWorkerMain", "RetrysafeDatabaseLetGo", "RetrysafeFaultPoint",
      "RetrysafeRingLock",     "RetrysafeOutboxWait", "RetrysafeStandby"};
  uint32 &number = numbers[static_cast<int>(what)];
  if (number == 0) number = custom_wait_event(names[static_cast<int>(what)]);
  return number;
}

bool after_wait() {
  ResetLatch(MyLatch);
  CHECK_FOR_INTERRUPTS();
  if (!ConfigReloadPending) return false;
  ConfigReloadPending = false;
  ProcessConfigFile(PGC_SIGHUP);
  return true;
}

}  // namespace

WaitEventSet *make_wait_set(int readable_fd) {
  WaitEventSet *set = create_wait_event_set(readable_fd >= 0 ? 3 : 2);
  AddWaitEventToSet(set, WL_LATCH_SET, PGINVALID_SOCKET, MyLatch, nullptr);
  AddWaitEventToSet(set, WL_EXIT_ON_PM_DEATH, PGINVALID_SOCKET, nullptr, nullptr);
  if (readable_fd >= 0) AddWaitEventToSet(set, WL_SOCKET_READABLE, readable_fd, nullptr, nullptr);
  return set;
}

bool wait(WaitEventSet *set, long timeout_ms, Wait what) {
  WaitEvent events[3];
  (void)WaitEventSetWait(set, timeout_ms, events, 3, event_number(what));
  return after_wait();
}

void wait_for_latch(long timeout_ms, Wait what) {
  (void)WaitLatch(MyLatch, WL_LATCH_SET | WL_EXIT_ON_PM_DEATH | (timeout_ms >= 0 ? WL_TIMEOUT : 0),
                  timeout_ms, event_number(what));
  (void)after_wait();
}

bool client_is_there() {
  return !MyProcPort || pq_check_connection();
}

void pause(long timeout_ms, Wait what) {
  (void)WaitLatch(nullptr, WL_TIMEOUT | WL_EXIT_ON_PM_DEATH, timeout_ms, event_number(what));
  CHECK_FOR_INTERRUPTS();
}

}  // namespace retrysafe::pg
