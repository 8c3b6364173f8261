// Transactions of a background worker: short, one step each.
#pragma once

#include <optional>
#include <string>

#include "pg/guard.hpp"

#include "pg/server.hpp"

namespace retrysafe::pg {

// What is left of an error of the server when its transaction has been aborted.
struct StepError {
  int sqlstate;
  std::string message;

  bool is(const ErrorCode &code) const { return sqlstate == pg::sqlstate(code); }
};

// ALTER DATABASE … SET and ALTER ROLE … SET reach workers too. Fixes what our statements and their results
// depend on, for the life of the process. Jumpable.
void pin_settings();

// SIGTERM sets ShutdownRequestPending. During a step it also cancels the step, which may be waiting for a
// lock; steps that begin later, to put things in order, are not cancelled any more. pg_cancel_backend cancels
// the step that runs, if one does. SIGHUP has the configuration read again.
void handle_signals();

namespace detail {

// The end of a transaction leaves another memory context behind than its begin found.
struct MemoryKept {
  MemoryContext memory = CurrentMemoryContext;
  MemoryKept() = default;
  MemoryKept(const MemoryKept &) = delete;
  MemoryKept &operator=(const MemoryKept &) = delete;
  ~MemoryKept() { MemoryContextSwitchTo(memory); }
};

void begin_step(const char *what, const char *subject, int timeout_ms);
void end_step();
// Owning. Aborts the transaction.
StepError abort_step(const PgError &error);

}  // namespace detail

// Runs the jumpable `body` in a READ COMMITTED transaction. `what` (a literal) and `subject` (null: none)
// describe the step in error contexts: while WHAT "SUBJECT". Owning; an error aborts the transaction and
// comes back as a value. Memory that is to outlive the transaction has to be allocated elsewhere.
// `timeout_ms` 0: none.
template <class Body>
std::optional<StepError> in_transaction(const char *what, const char *subject, Body &&body,
                                        int timeout_ms = 0) {
  const detail::MemoryKept kept;
  try {
    call([&] {
      detail::begin_step(what, subject, timeout_ms);
      body();
      detail::end_step();
    });
    return std::nullopt;
  } catch (const PgError &error) {
    return detail::abort_step(error);
  }
}

}  // namespace retrysafe::pg
