#include "pg/fault_point.hpp"

#ifdef RETRYSAFE_FAULT_POINTS

#include "pg/error.hpp"
#include "pg/latch.hpp"

#include "pg/server.hpp"

namespace retrysafe::pg {

void act_at_fault_point(const char *name) {
  std::string_view action;
  if (!find_fault_point(name, &action)) return;
  if (action == "error")
    ereport(ERROR, (errcode(ERRCODE_INTERNAL_ERROR), errmsg("fault point \"%s\"", name)));
  if (action == "exit") proc_exit(1);
  if (action == "kill") {
    log("killed at fault point \"%s\"", name);  // so that it can be told from a crash
    kill(MyProcPid, SIGKILL);
  }
  if (action == "wait") {
    log("waiting at fault point \"%s\"", name);
    while (find_fault_point(name, &action) && action == "wait" && !ShutdownRequestPending)
      wait_for_latch(100, Wait::kFaultPoint);
  }
}

}  // namespace retrysafe::pg

#endif
