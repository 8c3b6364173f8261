// Connects with libpq in a thread of its own.
//
// libpq connects step by step, but not each of its steps is a short one: it looks names up with a blocking
// call, and a server that asks for SCRAM says how often the password is to be hashed, which may be for hours.
// Neither can be interrupted. So a thread takes the steps, and one that is given up is left alone: it frees
// what it made when it comes back.
#pragma once

#include <functional>
#include <memory>
#include <vector>

#include <libpq-fe.h>

namespace retrysafe::sink {

class Connector {
 public:
  Connector();
  ~Connector();
  Connector(const Connector &) = delete;
  Connector &operator=(const Connector &) = delete;

  // Readable when there is a connection to take.
  int fd() const { return fd_; }

  // `begin` is called in the thread and begins a connection, or hands over one that has been begun. It owns
  // what it needs, and may be called when nobody waits any more. Signals that the thread is not to take are
  // blocked when this is called. Null, or why there is no attempt: four that were given up have not come back
  // yet, for one.
  const char *start(std::function<PGconn *()> begin);
  // Made, or failed as PQstatus says; null as long as it is neither. The caller's from then on.
  PGconn *take();
  // The thread frees what it makes.
  void give_up();

 private:
  struct Attempt;
  static void run(Attempt &attempt) noexcept;
  static bool abandon(Attempt &attempt);
  PGconn *collect();
  static void end_all(int exit_code, void *) noexcept;

  const int fd_;
  std::shared_ptr<Attempt> attempt_;                 // under way
  std::vector<std::shared_ptr<Attempt>> abandoned_;  // their threads may still run
};

}  // namespace retrysafe::sink
