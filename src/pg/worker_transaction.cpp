#include "pg/worker_transaction.hpp"

#include "pg/server.hpp"

namespace retrysafe::pg {

namespace {

struct Setting {
  const char *name;
  const char *value;
};

constexpr Setting pinned[] = {
    {"application_name", "retrysafe worker"},
    {"bytea_output", "hex"},
    {"DateStyle", "ISO, MDY"},
    // Whoever looks first is the one that fails: not the user's DROP EXTENSION, but the worker, which tries
    // again.
    {"deadlock_timeout", "50ms"},
    {"default_transaction_deferrable", "off"},
    {"default_transaction_isolation", "read committed"},
    {"default_transaction_read_only", "off"},
    {"exit_on_error", "off"},
    {"extra_float_digits", "1"},
    {"idle_in_transaction_session_timeout", "0"},
    {"idle_session_timeout", "0"},
    {"IntervalStyle", "postgres"},
    // A lock on our tables that lasts shall not keep the other destinations waiting for ever.
    {"lock_timeout", "1s"},
    // A parallel worker has the timeouts of the role before it is told ours.
    {"max_parallel_workers_per_gather", "0"},
    {"role", "none"},
    {"row_security", "on"},
    {"search_path", "pg_catalog, pg_temp"},
    {"session_replication_role", "origin"},
    {"statement_timeout", "0"},
    // Progress that a failover loses is made again, and the copies carry the same ids. Waiting for a
    // synchronous standby that is gone would hang the worker and the shutdown of the server.
    {"synchronous_commit", "local"},
    {"TimeZone", "UTC"},
    {"transaction_timeout", "0"},
    {"xmloption", "content"},
};

void pin(const char *name, const char *value) {
  if (GetConfigOption(name, true, false)) SetConfigOption(name, value, PGC_SUSET, PGC_S_OVERRIDE);
}

constinit volatile sig_atomic_t in_step = 0;
constinit volatile sig_atomic_t cancelled_by_sigterm = 0;  // only steps that began before it

struct Description {
  const char *what;
  const char *subject;
};
constinit Description description{};
constinit ErrorContextCallback context{};

void describe(void *) {
  if (description.subject)
    errcontext("while %s \"%s\"", description.what, description.subject);
  else
    errcontext("while %s", description.what);
}

void cancel_step() {
  InterruptPending = 1;
  QueryCancelPending = 1;
}

void on_sigterm() {
  ShutdownRequestPending = 1;
  if (in_step && cancelled_by_sigterm) cancel_step();
}

// pg_cancel_backend, and the timeouts of the server.
void on_sigint() {
  if (in_step) cancel_step();
}

}  // namespace

void pin_settings() {
  StartTransactionCommand();  // some values are looked up in the catalogs
  // As whom the server starts its workers. It has no value unless somebody has given it one.
  pin("session_authorization", GetUserNameFromId(BOOTSTRAP_SUPERUSERID, false));
  for (const Setting &setting : pinned) pin(setting.name, setting.value);
  CommitTransactionCommand();
}

void handle_signals() {
  pqsignal(SIGTERM, signal_handler<on_sigterm>);
  pqsignal(SIGINT, signal_handler<on_sigint>);
  pqsignal(SIGHUP, SignalHandlerForConfigReload);
}

namespace detail {

void begin_step(const char *what, const char *subject, int timeout_ms) {
  description = {what, subject};
  context = {error_context_stack, describe, nullptr};
  error_context_stack = &context;
  cancelled_by_sigterm = !ShutdownRequestPending;
  in_step = 1;
  SetCurrentStatementStartTimestamp();
  pgstat_report_activity(STATE_RUNNING, subject ? psprintf("%s \"%s\"", what, subject) : what);
  StartTransactionCommand();
  PushActiveSnapshot(GetTransactionSnapshot());
  if (timeout_ms > 0) enable_timeout_after(STATEMENT_TIMEOUT, timeout_ms);
}

void end_step() {
  disable_timeout(STATEMENT_TIMEOUT, false);
  PopActiveSnapshot();
  CommitTransactionCommand();
  in_step = 0;
  QueryCancelPending = false;  // it came when the commit could not be cancelled any more
  error_context_stack = context.previous;
  pgstat_report_stat(false);
}

StepError abort_step(const PgError &error) {
  StepError left{ERRCODE_OUT_OF_MEMORY, error.what()};
  if (error.data()) left.sqlstate = error.data()->sqlerrcode;
  in_step = 0;
  call([&] {
    disable_timeout(STATEMENT_TIMEOUT, false);
    AbortCurrentTransaction();
    QueryCancelPending = false;
    pgstat_report_stat(false);
  });
  return left;
}

}  // namespace detail

}  // namespace retrysafe::pg
