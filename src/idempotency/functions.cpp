// The SQL functions over keys. inbox.cpp, run.cpp and expiry.cpp have the others.
#include "idempotency/begin.hpp"
#include "idempotency/claims.hpp"
#include "idempotency/records.hpp"
#include "pg/boundary.hpp"
#include "pg/error.hpp"
#include "pg/extension.hpp"
#include "pg/fault_point.hpp"

namespace retrysafe::idempotency {

namespace {

Jsonb *jsonb_argument(FunctionCallInfo fcinfo, int argument) {
  return PG_ARGISNULL(argument) ? nullptr : PG_GETARG_JSONB_P(argument);
}

// The row (outcome text, response jsonb, status text). Kept for the life of the process: looking it up in the
// catalogs takes longer than a replay.
TupleDesc answer_descriptor() {
  static constinit TupleDesc descriptor = nullptr;
  if (descriptor) return descriptor;
  MemoryContext caller = MemoryContextSwitchTo(TopMemoryContext);
  TupleDesc fresh = CreateTemplateTupleDesc(3);
  TupleDescInitEntry(fresh, 1, "outcome", TEXTOID, -1, 0);
  TupleDescInitEntry(fresh, 2, "response", JSONBOID, -1, 0);
  TupleDescInitEntry(fresh, 3, "status", TEXTOID, -1, 0);
  descriptor = BlessTupleDesc(fresh);
  MemoryContextSwitchTo(caller);
  return descriptor;
}

Datum row_of(const Answer &answer) {
  Datum values[3] = {CStringGetTextDatum(name_of(answer.outcome)), PointerGetDatum(answer.response),
                     PointerGetDatum(answer.status)};
  bool nulls[3] = {false, !answer.response, !answer.status};
  return HeapTupleGetDatum(heap_form_tuple(answer_descriptor(), values, nulls));
}

// (key, request_hash, scope, ttl, also_accept)
Datum begin_function(FunctionCallInfo fcinfo, HashForm form, Wait wait) {
  Request request;
  request.key = key_argument(fcinfo, 0, 2);
  request.hash = request_hash_argument(fcinfo, 1, form);
  const Interval *ttl = PG_ARGISNULL(3) ? nullptr : PG_GETARG_INTERVAL_P(3);
  if (ttl) check_ttl(*ttl);
  request.also_accept = request_hash_list_argument(fcinfo, 4, form);
  return row_of(begin(request, ttl, wait));
}

bool may_read_records() {
  return pg_class_aclcheck(pg::extension().idempotency_records, GetUserId(), ACL_SELECT) == ACLCHECK_OK;
}

// (key, request_hash, scope). Owns nothing, waits for nobody, writes nothing.
Datum peek_function(FunctionCallInfo fcinfo, HashForm form) {
  const Key key = key_argument(fcinfo, 0, 2);
  const bool any_request = PG_ARGISNULL(1);
  if (any_request && !may_read_records())
    pg::raise_insufficient_privilege(
        "Pass the digest of the request, or ask for the right to read idempotency_records.",
        "permission denied to look up an idempotency key without the digest of its request");
  bytea *hash = any_request ? nullptr : request_hash_argument(fcinfo, 1, form);

  const Claim *claim = find_claim(key);
  if (claim && claim->state == ClaimState::kOwned) return row_of({Outcome::kInProgress, nullptr, nullptr});
  const bool own = claim && claim->state == ClaimState::kCompleted;
  const auto find = [&] {
    const Record *record = find_record(key);
    return record && (own || record->is_alive(GetCurrentTimestamp())) ? record : nullptr;
  };
  const Record *record = find();
  if (!record) {
    RETRYSAFE_FAULT_POINT("idem.peek_at_lock");
    if (locked_by_another(key)) return row_of({Outcome::kInProgress, nullptr, nullptr});
    record = find();  // an owner may have committed between the two
  }
  if (!record) return row_of({Outcome::kUnknown, nullptr, nullptr});
  if (hash && !same_bytes(hash, record->request_hash)) return row_of({Outcome::kConflict, nullptr, nullptr});
  return row_of({Outcome::kReplay, record->response, record->status});
}

}  // namespace

}  // namespace retrysafe::idempotency

using namespace retrysafe;
using namespace retrysafe::idempotency;

RETRYSAFE_SQL_FUNCTION(retrysafe_idem_begin) {
  return begin_function(fcinfo, HashForm::kBytes, Wait::kYes);
}

RETRYSAFE_SQL_FUNCTION(retrysafe_idem_begin_text) {
  return begin_function(fcinfo, HashForm::kText, Wait::kYes);
}

RETRYSAFE_SQL_FUNCTION(retrysafe_idem_try_begin) {
  return begin_function(fcinfo, HashForm::kBytes, Wait::kNo);
}

RETRYSAFE_SQL_FUNCTION(retrysafe_idem_try_begin_text) {
  return begin_function(fcinfo, HashForm::kText, Wait::kNo);
}

RETRYSAFE_SQL_FUNCTION(retrysafe_idem_peek) {
  return peek_function(fcinfo, HashForm::kBytes);
}

RETRYSAFE_SQL_FUNCTION(retrysafe_idem_peek_text) {
  return peek_function(fcinfo, HashForm::kText);
}

// idem_complete(key, response, scope, status)
RETRYSAFE_SQL_FUNCTION(retrysafe_idem_complete) {
  const Key key = key_argument(fcinfo, 0, 2);
  if (PG_ARGISNULL(3))
    pg::raise(kInvalidStatus, "Leave it out where the work is done.",
              "status of an idempotency key must not be null");
  complete(key, jsonb_argument(fcinfo, 1), PG_GETARG_TEXT_PP(3));
  PG_RETURN_VOID();
}

// idem_forget(key, scope) → bool
RETRYSAFE_SQL_FUNCTION(retrysafe_idem_forget) {
  const Key key = key_argument(fcinfo, 0, 1);
  PreventCommandIfReadOnly("idem_forget()");  // also where there is nothing to forget
  // A record that the snapshot cannot see is a serialization failure here too, not a silent "false".
  (void)lock(key, Wait::kYes);  // an answer that is just being saved is removed as well
  if (!find_record(key) || !remove_record(key)) PG_RETURN_BOOL(false);
  const Claim *claim = find_claim(key);
  if (claim && claim->state == ClaimState::kCompleted) claim_dropped(key);
  PG_RETURN_BOOL(true);
}

// idem_hash(jsonb) → bytea
RETRYSAFE_SQL_FUNCTION(retrysafe_idem_hash) {
  PG_RETURN_BYTEA_P(hash_request(PG_GETARG_JSONB_P(0)));
}
