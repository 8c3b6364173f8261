// idem_run: the whole round in one call.
#include "idempotency/begin.hpp"
#include "pg/boundary.hpp"
#include "pg/error.hpp"

namespace retrysafe::idempotency {

namespace {

// The handler runs as the caller, who must be allowed to run it.
void check_handler(Oid handler) {
  const char *const hint = "A handler is a function that takes one jsonb and returns jsonb.";
  HeapTuple row = SearchSysCache1(PROCOID, ObjectIdGetDatum(handler));
  if (!HeapTupleIsValid(row)) pg::raise(kInvalidHandler, hint, "handler with OID %u does not exist", handler);
  const auto *function = reinterpret_cast<Form_pg_proc>(GETSTRUCT(row));
  const bool fits = function->prokind == PROKIND_FUNCTION && !function->proretset &&
                    function->pronargs == 1 && function->proargtypes.values[0] == JSONBOID &&
                    function->prorettype == JSONBOID;
  ReleaseSysCache(row);
  if (!fits) pg::raise(kInvalidHandler, hint, "%s cannot be a handler", format_procedure(handler));
  if (!pg::may_execute(handler, GetUserId()))
    pg::raise_insufficient_privilege("idem_run calls the handler as its caller, who needs EXECUTE on it.",
                                     "permission denied for function %s", format_procedure(handler));
}

Jsonb *call_handler(Oid handler, Jsonb *request) {
  FmgrInfo function;
  fmgr_info(handler, &function);
  LOCAL_FCINFO(call, 1);
  InitFunctionCallInfoData(*call, &function, 1, InvalidOid, nullptr, nullptr);
  call->args[0] = {JsonbPGetDatum(request), false};
  const Datum result = FunctionCallInvoke(call);
  return call->isnull ? nullptr : DatumGetJsonbP(result);
}

}  // namespace

}  // namespace retrysafe::idempotency

using namespace retrysafe;
using namespace retrysafe::idempotency;

// idem_run(key, request, handler, scope) → jsonb
RETRYSAFE_SQL_FUNCTION(retrysafe_idem_run) {
  const Key key = key_argument(fcinfo, 0, 3);
  if (PG_ARGISNULL(1))
    pg::raise(kInvalidRequestHash, "Pass the request as jsonb; a request without parameters is '{}'.",
              "request must not be null");
  if (PG_ARGISNULL(2))
    pg::raise(kInvalidHandler, "Name a function(jsonb) that returns jsonb.", "handler must not be null");
  Jsonb *const request = PG_GETARG_JSONB_P(1);
  const Oid handler = PG_GETARG_OID(2);
  check_handler(handler);

  const Answer answer = begin({key, hash_request(request), {}}, nullptr, Wait::kYes);
  Jsonb *response = answer.response;
  if (answer.outcome == Outcome::kConflict)
    pg::raise(kConflict, "A key stands for one request. Send another request with a key of its own.",
              "idempotency key \"%s\" was used for another request", text_to_cstring(key.key));
  if (answer.outcome == Outcome::kNew) {
    response = call_handler(handler, request);
    complete(key, response, cstring_to_text("completed"));
  }
  if (!response) PG_RETURN_NULL();
  PG_RETURN_JSONB_P(response);
}
