#include "outbox/function_destination.hpp"

#include <algorithm>
#include <bit>
#include <cstdlib>
#include <cstring>

#include "core/event_id.hpp"
#include "core/event_json.hpp"
#include "core/event_time.hpp"
#include "core/handler_error.hpp"
#include "idempotency/claims.hpp"
#include "outbox/options.hpp"
#include "pg/fault_point.hpp"
#include "pg/guard.hpp"
#include "pg/text.hpp"

#include "pg/server.hpp"

namespace retrysafe::outbox {

namespace {

// Other destinations of the worker wait meanwhile.
constexpr int64 kMaxRunUs = 500 * 1000;
constexpr int64 kSecondUs = 1000 * 1000;
constexpr size_t kMaxMessageBytes = 240;

// --- what is to be called
// ------------------------------------------------------------------------------------------

struct Handler {
  Oid function;
  Oid role;
  int64 timeout_us;
};

const char *option(const Destination &d, const char *name) {
  int count;
  const ResolvedOption *options = resolved_options(d, SecretReader::kServer, &count);
  for (int i = 0; i < count; ++i)
    if (strcmp(options[i].name, name) == 0)
      return pg_any_to_server(options[i].value, static_cast<int>(strlen(options[i].value)), PG_UTF8);
  return "";
}

int64 timeout_us(const Destination &d) {
  return strtoll(option(d, "statement_timeout"), nullptr, 10) * 1000;
}

// By its full name, as outbox_create_destination stored it.
Oid function_named(const char *signature) {
  LOCAL_FCINFO(call, 1);
  InitFunctionCallInfoData(*call, nullptr, 1, InvalidOid, nullptr, nullptr);
  call->args[0].value = CStringGetTextDatum(signature);
  call->args[0].isnull = false;
  const Datum found = to_regprocedure(call);
  return call->isnull ? InvalidOid : DatumGetObjectId(found);
}

// It was checked when the destination was made; since then everything can have changed. Returns what is
// wrong.
const char *find_handler(const Destination &d, Handler *handler) {
  handler->role = d.run_as ? get_role_oid(d.run_as, true) : InvalidOid;
  if (!OidIsValid(handler->role))
    return psprintf("role \"%s\", as which the function ran, does not exist", d.run_as ? d.run_as : "");
  const char *signature = option(d, "function");
  handler->function = function_named(signature);
  if (!OidIsValid(handler->function)) return psprintf("function %s does not exist", signature);
  if (!fits_a_destination(handler->function))
    return psprintf("%s does not fit: it has to be a FUNCTION name(event jsonb) RETURNS void", signature);
  if (!pg::may_execute(handler->function, handler->role))
    return psprintf("permission denied for function %s to role \"%s\"", signature, d.run_as);
  handler->timeout_us = timeout_us(d);
  return nullptr;
}

// --- the event as JSON
// ---------------------------------------------------------------------------------------------

std::string_view view(const char *text) {
  return text ? std::string_view(text) : std::string_view{};
}

Datum event_jsonb(const Event &event) {
  StringInfoData text;
  initStringInfo(&text);
  pg::ServerText json{&text};
  const UuidText id = format_uuid(std::bit_cast<Uuid>(event.event_id));
  char time[kEventTimeSize];
  write_event_json(json, {.id = retrysafe::view(id),
                          .type = view(event.event_type),
                          .event_key = view(event.event_key),
                          .scope = view(event.scope),
                          .ordering_key = view(event.ordering_key),
                          .payload = view(event.payload),
                          .headers = view(event.headers),
                          .created_at = {time, event_time(event.created_at, time)},
                          .attempt = event.attempts + 1});
  return DirectFunctionCall1(jsonb_in, CStringGetDatum(text.data));
}

// --- one call
// ------------------------------------------------------------------------------------------------------

// A deferred trigger would fire at commit, as a superuser. In a security-restricted operation the server
// refuses to put one off; so constraints that are deferred by default are checked at once, and that suffices
// for most.
void check_constraints_at_once() {
  AfterTriggerSetState(makeNode(ConstraintsSetStmt));
}

// While a function runs, nothing else of the worker does. So a timer looks whether it is to break off.
constexpr int kStopCheckMs = 100;
constinit StopCheck stop_wanted = nullptr;

// A function can catch its cancellation and go on. It gets so much time more, and then takes the worker
// along: nothing else ends it.
constexpr int64 kStubbornUs = 5 * kSecondUs;
constinit TimestampTz cancelled_since = 0;
constinit TimestampTz call_ends = 0;

void check_stop() {
  const TimestampTz now = GetCurrentTimestamp();
  const bool stop = stop_wanted();
  if (!stop && now < call_ends) return;
  if (cancelled_since == 0) cancelled_since = now;
  if (now - cancelled_since >= kStubbornUs) ProcDiePending = true;
  if (stop || ProcDiePending) {
    QueryCancelPending = true;
    InterruptPending = true;
  }
}

TimeoutId stop_timer() {
  static const TimeoutId id = RegisterTimeout(USER_TIMEOUT, check_stop);
  return id;
}

void arm(int64 timeout_us) {
  enable_timeout_after(STATEMENT_TIMEOUT,
                       static_cast<int>(std::clamp<int64>(timeout_us / 1000, 1, PG_INT32_MAX)));
  cancelled_since = 0;
  call_ends = GetCurrentTimestamp() + timeout_us;
  enable_timeout_every(stop_timer(), GetCurrentTimestamp() + kStopCheckMs * 1000, kStopCheckMs);
}

// A timer may go off at the very end; what it asked for is then over.
void disarm() {
  disable_timeout(STATEMENT_TIMEOUT, false);
  disable_timeout(stop_timer(), false);
  QueryCancelPending = false;
  ProcDiePending = false;
}

constinit CalledEvent called{};  // id 0: none

// Inside the subtransaction.
void run_handler(const Handler &handler, const Event &event) {
  Oid caller;
  int context;
  GetUserIdAndSecContext(&caller, &context);
  SetUserIdAndSecContext(handler.role,
                         context | SECURITY_LOCAL_USERID_CHANGE | SECURITY_RESTRICTED_OPERATION);
  const int nest = NewGUCNestLevel();
  // What bounds the worker's own statements does not bind the function, which has its own bound.
  (void)set_config_option("lock_timeout", "0", PGC_USERSET, PGC_S_SESSION, GUC_ACTION_SAVE, true, 0, false);
  check_constraints_at_once();

  PushActiveSnapshot(GetTransactionSnapshot());
  arm(handler.timeout_us);
  FmgrInfo function;
  fmgr_info(handler.function, &function);
  LOCAL_FCINFO(call, 1);
  InitFunctionCallInfoData(*call, &function, 1, InvalidOid, nullptr, nullptr);
  call->args[0].value = event_jsonb(event);
  call->args[0].isnull = false;
  (void)FunctionCallInvoke(call);
  PortalHashTableDeleteAll();  // cursors that it left open end with it, as at the end of a transaction
  PopActiveSnapshot();
  check_constraints_at_once();  // there is nothing to check unless the server changes its mind
  CHECK_FOR_INTERRUPTS();
  disarm();

  AtEOXact_GUC(false, nest);  // as after an error: not even a plain SET outlives the call
  SetUserIdAndSecContext(caller, context);
  ReleaseCurrentSubTransaction();
}

// Runs the jumpable `body`. Its frame owns nothing, so that errors may jump over it as well.
struct Caught {
  bool failed;
  ErrorData *error;  // null: out of memory
};

template <class Body>
Caught caught(Body &&body) {
  try {
    pg::call(body);
    return {false, nullptr};
  } catch (const pg::PgError &error) {
    return {true, error.data()};
  }
}

Caught call_handler(const Handler &handler, int32 destination, const Event &event) {
  MemoryContext memory = CurrentMemoryContext;
  ResourceOwner owner = CurrentResourceOwner;
  BeginInternalSubTransaction(nullptr);
  const SubTransactionId subtransaction = GetCurrentSubTransactionId();
  MemoryContextSwitchTo(memory);
  called = called_event(destination, event);
  const Caught result = caught([&] {
    MemoryContextSwitchTo(CurTransactionContext);
    run_handler(handler, event);
  });
  if (result.failed) {
    disarm();
    RollbackAndReleaseCurrentSubTransaction();
    idempotency::forget_claims_lost_in(subtransaction);
  }
  called = {};
  MemoryContextSwitchTo(memory);
  CurrentResourceOwner = owner;
  // Advisory locks of the session outlive transactions. The worker itself takes none.
  LockReleaseSession(USER_LOCKMETHOD);
  return result;
}

// --- a batch
// -------------------------------------------------------------------------------------------------------

const char *shown(const char *message) {
  char text[kMaxMessageBytes + 1];
  pg::copy_message(text, message);
  return pstrdup(text);
}

const char *reason_of(const Caught &caught) {
  if (!caught.error) return "53200: out of memory";
  return psprintf("%s: %s", unpack_sql_state(caught.error->sqlerrcode),
                  shown(caught.error->message ? caught.error->message : ""));
}

HandlerError kind_of(const Caught &caught) {
  if (!caught.error) return HandlerError::kRetry;
  // Without space nothing works, and the event is not to blame. Every other error can be the function's.
  if (caught.error->sqlerrcode == ERRCODE_DISK_FULL) return HandlerError::kUnreachable;
  const HandlerError kind = handler_error(unpack_sql_state(caught.error->sqlerrcode));
  return kind == HandlerError::kFinal || kind == HandlerError::kConflict ? kind : HandlerError::kRetry;
}

Outcome *nothing_tried(const Batch &batch) {
  auto *outcomes = static_cast<Outcome *>(palloc(sizeof(Outcome) * (batch.event_count + 1)));
  for (int32 i = 0; i < batch.event_count; ++i) outcomes[i] = {Status::kNotTried, -1, nullptr};
  return outcomes;
}

// Ordering keys of events that failed. A batch is small.
struct FailedKeys {
  const char *keys[kMaxFunctionEvents];
  int count;

  void add(const char *key) {
    if (key) keys[count++] = key;
  }
  bool has(const char *key) const {
    for (int i = 0; key && i < count; ++i)
      if (strcmp(keys[i], key) == 0) return true;
    return false;
  }
};

}  // namespace

bool fits_a_destination(Oid function) {
  HeapTuple row = SearchSysCache1(PROCOID, ObjectIdGetDatum(function));
  if (!HeapTupleIsValid(row)) return false;
  const auto *form = reinterpret_cast<Form_pg_proc>(GETSTRUCT(row));
  const bool fits = form->prokind == PROKIND_FUNCTION && form->pronargs == 1 &&
                    form->proargtypes.values[0] == JSONBOID && form->prorettype == VOIDOID &&
                    !form->proretset;
  ReleaseSysCache(row);
  return fits;
}

int64 function_lease_us(const Destination &destination) {
  // A lease is renewed when half of it is over.
  return std::max(destination.lease_us, 2 * (timeout_us(destination) + 5 * kSecondUs));
}

void call_function(const Destination &destination, Batch *batch, StopCheck stop, FunctionRun *run) {
  stop_wanted = stop;
  called = {};  // an error may have come between the end of a call and this
  Outcome *outcomes = nothing_tried(*batch);
  Handler handler{};
  run->reason = find_handler(destination, &handler);
  const TimestampTz begin = GetCurrentTimestamp();
  FailedKeys failed{};
  bool any = false;
  for (int32 i = 0; i < batch->event_count && !run->reason; ++i) {
    const Event &event = batch->events[i];
    if (event.held || failed.has(event.ordering_key)) continue;
    const TimestampTz now = GetCurrentTimestamp();
    if ((any && now - begin > kMaxRunUs) || now + handler.timeout_us > batch->claim.lease_until || stop())
      break;

    const Caught result = call_handler(handler, destination.destination, event);
    if (result.failed && stop()) break;
    const HandlerError kind = result.failed ? kind_of(result) : HandlerError::kRetry;
    if (!result.failed) {
      outcomes[i].status = Status::kDelivered;
      run->delivered = true;
    } else if (kind == HandlerError::kUnreachable) {
      run->reason = reason_of(result);
    } else if (kind == HandlerError::kConflict && any) {
      // What the events before hold may be what is in the way. It is let go of, and this one comes first
      // then.
      break;
    } else {
      outcomes[i] = {kind == HandlerError::kFinal ? Status::kFailedFinal : Status::kFailedRetry, -1,
                     reason_of(result)};
      failed.add(event.ordering_key);
    }
    any = true;
    run->called = run->called || !run->reason;
  }
  if (any || !run->reason) record(destination, batch, outcomes, run->reason != nullptr);
  if (run->reason) run->retry_at = record_unreachable(destination, batch->claim, run->reason, -1);
  RETRYSAFE_FAULT_POINT("function.before_commit");
}

const CalledEvent *call_under_way() {
  return called.id != 0 ? &called : nullptr;
}

bool may_be_a_calls_fault(int sqlstate) {
  return sqlstate != ERRCODE_QUERY_CANCELED && sqlstate != ERRCODE_DISK_FULL &&
         handler_error(unpack_sql_state(sqlstate)) != HandlerError::kConflict;
}

void record_failure(const Destination &destination, Batch *batch, const char *reason) {
  Outcome *outcomes = nothing_tried(*batch);
  outcomes[0] = {Status::kFailedRetry, -1, shown(reason)};
  record(destination, batch, outcomes, false);
}

}  // namespace retrysafe::outbox
