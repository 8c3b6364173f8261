#include "idempotency/begin.hpp"

#include <algorithm>

#include "idempotency/claims.hpp"
#include "idempotency/records.hpp"
#include "pg/error.hpp"
#include "pg/json_text.hpp"
#include "settings.hpp"

namespace retrysafe::idempotency {

namespace {

bool is_same_request(const Request &request, const Record &record) {
  if (same_bytes(request.hash, record.request_hash)) return true;
  for (int i = 0; i < request.also_accept.count; ++i)
    if (same_bytes(request.also_accept.hashes[i], record.request_hash)) return true;
  return false;
}

Answer answer_from(const Record &record, const Request &request) {
  if (!is_same_request(request, record)) return {Outcome::kConflict, nullptr, nullptr};
  return {Outcome::kReplay, record.response, record.status};
}

const Record *find_live_record(const Key &key) {
  const Record *record = find_record(key);
  return record && record->is_alive(GetCurrentTimestamp()) ? record : nullptr;
}

// The caller got an answer: if it had lost a claim on the key before, it knows now who did the work.
Answer answered(const Record &record, const Request &request) {
  claim_dropped(request.key);
  return answer_from(record, request);
}

TimestampTz expiry(TimestampTz completed_at, const Interval *ttl) {
  if (!ttl) return completed_at + settings::idem_retention * USECS_PER_SEC;
  return DatumGetTimestampTz(DirectFunctionCall2(timestamptz_pl_interval, TimestampTzGetDatum(completed_at),
                                                 IntervalPGetDatum(const_cast<Interval *>(ttl))));
}

void check_response(Jsonb *response) {
  if (response && pg::json_exceeds(response, settings::max_response_bytes))
    pg::raise(
        kResponseTooLarge,
        "Save a reference to a large answer instead of the answer, or raise retrysafe.max_response_bytes.",
        "response is too large: more than %d bytes of JSON text", settings::max_response_bytes);
}

void check_status(const text *status) {
  const std::string_view value = bytes_of(status);
  if (value != "completed" && value != "failed")
    pg::raise(kInvalidStatus,
              "\"completed\" saves an answer, \"failed\" a failure that every retry must see again. "
              "What may succeed next time is not saved but rolled back.",
              "status of an idempotency key must be \"completed\" or \"failed\"");
}

}  // namespace

const char *name_of(Outcome outcome) {
  switch (outcome) {
    case Outcome::kNew:
      return "new";
    case Outcome::kReplay:
      return "replay";
    case Outcome::kConflict:
      return "conflict";
    case Outcome::kInProgress:
      return "in_progress";
    case Outcome::kUnknown:
      return "unknown";
  }
  pg_unreachable();
}

void check_ttl(const Interval &ttl) {
  constexpr int32 kMaxYears = 1000;  // infinity is far above
  const char *const hint =
      "A ttl is positive in every part and at most 1000 years, for example interval '1 day'.";
  if (ttl.month < 0 || ttl.day < 0 || ttl.time < 0 || (ttl.month == 0 && ttl.day == 0 && ttl.time == 0))
    pg::raise(kInvalidTtl, hint, "ttl must be positive");
  if (ttl.month > kMaxYears * 12 || ttl.day > kMaxYears * 366 || ttl.time > kMaxYears * 366 * USECS_PER_DAY)
    pg::raise(kInvalidTtl, hint, "ttl is too long");
}

Answer begin(const Request &request, const Interval *ttl, Wait wait) {
  const Claim *claim = find_claim(request.key);
  if (claim && claim->state == ClaimState::kOwned)
    pg::raise(kKeyAlreadyBegun, "Call idem_complete before the key is begun again.",
              "this transaction has begun idempotency key \"%s\" already and not completed it",
              text_to_cstring(request.key.key));
  if (claim && claim->state == ClaimState::kCompleted) {
    // However short its life: within the transaction the key stays answered.
    if (const Record *own = find_record(request.key)) return answer_from(*own, request);
  }

  const uint64 completed = pg::transactions_completed();
  pg_read_barrier();
  // The common case of a retry: no lock, no transaction id, nothing written.
  if (const Record *record = find_live_record(request.key)) return answered(*record, request);
  if (XactReadOnly)
    pg::raise(kReadOnly,
              "Begin the key in a read-write transaction on the primary, or look it up with idem_peek.",
              "idempotency key \"%s\" has no answer yet and this transaction is read-only",
              text_to_cstring(request.key.key));

  PreventCommandIfParallelMode("idem_begin()");  // the processes of a query do not lock each other out

  const bool locked = lock(request.key, wait);
  // Whoever held the lock has committed or rolled back: its answer is visible before the lock is free. Where
  // no transaction at all has ended since the record was looked for, there is still none.
  pg_read_barrier();
  const bool nothing_ended = locked && pg::transactions_completed() == completed;
  if (const Record *record = nothing_ended ? nullptr : find_live_record(request.key)) {
    if (locked) unlock(request.key);
    return answered(*record, request);
  }
  if (!locked) return {Outcome::kInProgress, nullptr, nullptr};
  claim_begun(request.key, {GetCurrentTimestamp(), ttl, request.hash});
  return {Outcome::kNew, nullptr, nullptr};
}

void complete(const Key &key, Jsonb *response, text *status) {
  check_status(status);
  check_response(response);
  require_claim(key);
  const Claim &claim = *find_claim(key);
  if (claim.state == ClaimState::kCompleted) {
    const Record *saved = find_record(key);
    if (saved && bytes_of(saved->status) == bytes_of(status) && pg::same_json(saved->response, response))
      return;
    pg::raise(kAlreadyCompleted, "The first answer stands. Complete a key once.",
              "this transaction has completed idempotency key \"%s\" already, with another answer",
              text_to_cstring(key.key));
  }
  // Not before it was begun, whatever happened to the clock meanwhile: of the answers that a key had one
  // after the other, the last one expires last.
  const TimestampTz completed_at = std::max(GetCurrentTimestamp(), claim.terms->begun_at);
  save_record(claim, completed_at, expiry(completed_at, claim.terms->ttl), status, response);
  claim_completed(key);
}

}  // namespace retrysafe::idempotency
