#include "outbox/emit.hpp"

#include <cstring>

#include "core/event_fields.hpp"
#include "idempotency/claims.hpp"
#include "outbox/append.hpp"
#include "outbox/event_key.hpp"
#include "outbox/scheduled.hpp"
#include "pg/boundary.hpp"
#include "pg/json_text.hpp"
#include "pg/statement.hpp"
#include "pg/text.hpp"
#include "pg/xact_events.hpp"
#include "runtime/wakeup.hpp"
#include "settings.hpp"

namespace retrysafe::outbox {

namespace {

struct NewEvent {
  text *scope;
  text *idempotency_key;  // null: an outbox without a request
  text *event_key;        // null: the event gets the next number of its request
  int32 number;           // 0: it has an event key
  text *event_type;
  text *ordering_key;
  Jsonb *payload;
  Jsonb *headers;
  TimestampTz deliver_after;
  bool delayed;
};

constinit pg::Statement insert_into_scheduled{
    "INSERT INTO @.outbox_scheduled (scope, idempotency_key, event_key, event_type, ordering_key, payload, "
    "headers, created_at, deliver_after, event_number, request) "
    "VALUES ($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11) "
    "ON CONFLICT (event_key, scope, request) DO NOTHING",
    {TEXTOID, TEXTOID, TEXTOID, TEXTOID, TEXTOID, JSONBOID, JSONBOID, TIMESTAMPTZOID, TIMESTAMPTZOID, INT4OID,
     XID8OID}};

LogEntry log_entry(const NewEvent &event) {
  return {GetCurrentTimestamp(), DT_NOBEGIN,       event.number,       event.scope,   event.idempotency_key,
          event.event_key,       event.event_type, event.ordering_key, event.payload, event.headers};
}

constinit bool emitted = false;
constinit bool announce = false;

// --- what an event may look like ---------------------------------------------------------------------------

text *text_argument(FunctionCallInfo fcinfo, int number) {
  return PG_ARGISNULL(number) ? nullptr : PG_GETARG_TEXT_PP(number);
}

Jsonb *jsonb_argument(FunctionCallInfo fcinfo, int number) {
  return PG_ARGISNULL(number) ? nullptr : PG_GETARG_JSONB_P(number);
}

void check_name(const text *name, const ErrorCode &code, const char *what) {
  const size_t size = name ? pg::bytes_of(name).size() : 0;
  if (size > 0 && size <= kMaxNameBytes) return;
  const char *hint = psprintf("The %s is text of 1 to %zu bytes.", what, kMaxNameBytes);
  if (!name) pg::raise(code, hint, "%s must not be null", what);
  if (size == 0) pg::raise(code, hint, "%s must not be empty", what);
  pg::raise(code, hint, "%s is too long: %zu bytes", what, size);
}

void check_scope(const text *scope) {
  if (!scope)
    pg::raise(kInvalidScope, "Leave the scope out, or give text of at most 255 bytes.",
              "scope must not be null");
  if (pg::bytes_of(scope).size() > kMaxNameBytes)
    pg::raise(kInvalidScope, "The scope is text of at most 255 bytes.", "scope is too long: %zu bytes",
              pg::bytes_of(scope).size());
}

void check_event_key(const NewEvent &event) {
  if (!event.event_key) {
    if (event.idempotency_key) return;
    pg::raise(kInvalidEventKey,
              "Give the event a key of its own, of 1 to 255 bytes. Under an idempotency key that the "
              "transaction owns it may be left out: the events of the request are numbered then.",
              "event key must not be null");
  }
  check_name(event.event_key, kInvalidEventKey, "event key");
  if (ends_in_number(pg::bytes_of(event.event_key)))
    pg::raise(kInvalidEventKey,
              "Such event keys belong to the events that are numbered within their request. Put something "
              "behind the digits, or another character before them.",
              "event key must not end in \"~\" and digits");
}

void check_event_type(const text *type) {
  check_name(type, kInvalidEventType, "event type");
  if (has_control_character(pg::bytes_of(type)))
    pg::raise(kInvalidEventType, "The event type travels in message headers; use printable characters.",
              "event type must not contain control characters");
}

// A handler function gets the whole event as one jsonb value (core/event_json.hpp), and the length of all
// that is in it has to fit into an entry of jsonb. As stored, not as text: numbers take more room there than
// their digits do. Of the other fields the headers have kMaxHeaderBytes; their entries, a traceparent and the
// names take less than the same again.
constexpr size_t kMaxStoredPayload = JENTRY_OFFLENMASK - 2 * kMaxHeaderBytes;

void check_payload(Jsonb *payload) {
  if (!payload) return;
  if (pg::json_exceeds(payload, settings::max_payload_bytes))
    pg::raise(
        kPayloadTooLarge,
        "Emit a reference to the data instead, or have an administrator raise retrysafe.max_payload_bytes.",
        "payload is too large: more than %d bytes of JSON text", settings::max_payload_bytes);
  if (VARSIZE(payload) > kMaxStoredPayload)
    pg::raise(kPayloadTooLarge, "Emit a reference to the data instead.",
              "payload is too large: more than %zu bytes of jsonb", kMaxStoredPayload);
  if (pg::json_is_deeper(payload, kMaxPayloadLevels))
    pg::raise(kPayloadTooDeep,
              "Many programs cannot parse such JSON. Emit it in another form, for example as a list.",
              "payload is nested too deeply: more than %d levels", kMaxPayloadLevels);
}

std::string_view view(const JsonbValue &string) {
  return {string.val.string.val, static_cast<size_t>(string.val.string.len)};
}

// Headers become headers of HTTP requests and broker messages: a bad name or a line break in a value would
// let a caller write headers, or whole messages, of its own. Tells whether one of them is a traceparent.
bool check_headers(Jsonb *headers) {
  const char *hint =
      "Headers are a JSON object of string values; names consist of letters, digits, \"-\" and \"_\".";
  if (!JB_ROOT_IS_OBJECT(headers)) pg::raise(kInvalidHeaders, hint, "headers must be a JSON object");

  std::string_view names[kMaxHeaders];
  size_t count = 0;
  size_t bytes = 0;
  bool has_traceparent = false;
  JsonbIterator *iterator = JsonbIteratorInit(&headers->root);
  JsonbValue item;
  // Nested containers are skipped, so that they come as one value and are refused.
  for (JsonbIteratorToken token; (token = JsonbIteratorNext(&iterator, &item, true)) != WJB_DONE;) {
    if (token == WJB_KEY) {
      if (count == kMaxHeaders)
        pg::raise(kInvalidHeaders, hint, "too many headers: at most %zu are allowed", kMaxHeaders);
      const std::string_view name = view(item);
      if (!is_header_name(name))
        pg::raise(kInvalidHeaders, hint,
                  "invalid header name: it must be 1 to %zu letters, digits, \"-\" or \"_\"",
                  kMaxHeaderNameBytes);
      for (size_t i = 0; i < count; ++i)
        if (same_header_name(names[i], name))
          pg::raise(kInvalidHeaders, "Header names are compared without regard to case.",
                    "header \"%.*s\" is given more than once", static_cast<int>(name.size()), name.data());
      has_traceparent = has_traceparent || same_header_name(name, "traceparent");
      names[count++] = name;
      bytes += name.size();
    } else if (token == WJB_VALUE) {
      const std::string_view name = names[count - 1];
      if (item.type != jbvString)
        pg::raise(kInvalidHeaders, hint, "the value of header \"%.*s\" must be a string",
                  static_cast<int>(name.size()), name.data());
      if (has_control_character(view(item)))
        pg::raise(kInvalidHeaders, "Encode such values, for example as base64.",
                  "the value of header \"%.*s\" must not contain control characters",
                  static_cast<int>(name.size()), name.data());
      bytes += view(item).size();
    }
  }
  if (bytes > kMaxHeaderBytes)
    pg::raise(kInvalidHeaders, "Move the data into the payload.",
              "headers are too large: %zu bytes, %zu are allowed", bytes, kMaxHeaderBytes);
  return has_traceparent;
}

// The caller's headers, with the session's trace context unless the caller gave one.
Jsonb *complete_headers(Jsonb *given) {
  const bool has_traceparent = given && check_headers(given);
  const char *traceparent = settings::traceparent;
  if (has_traceparent || !traceparent || !*traceparent) return given;
  // The setting has been checked: hexadecimal digits and dashes, nothing to escape.
  const Datum added =
      DirectFunctionCall1(jsonb_in, CStringGetDatum(psprintf("{\"traceparent\": \"%s\"}", traceparent)));
  if (!given) return DatumGetJsonbP(added);
  return DatumGetJsonbP(DirectFunctionCall2(jsonb_concat, PointerGetDatum(given), added));
}

// Events leave in UTF-8. What has no form in it is refused here: behind it nothing would ever be delivered.
void check_encoding(const NewEvent &event) {
  if (GetDatabaseEncoding() == PG_UTF8) return;
  for (const text *part :
       {event.scope, event.idempotency_key, event.event_key, event.event_type, event.ordering_key})
    if (part) (void)pg::to_utf8(pg::bytes_of(part));
  for (Jsonb *part : {event.payload, event.headers})
    if (part) (void)pg::to_utf8(pg::json_text(part));
}

// --- the same event again ----------------------------------------------------------------------------------

bool same_text(const text *a, const text *b) {
  return a && b ? pg::bytes_of(a) == pg::bytes_of(b) : a == b;
}

void require_same_content(const NewEvent &event, const FoundEvent &found) {
  const char *difference = nullptr;
  if (!same_text(event.event_type, found.event_type))
    difference = "event type";
  else if (!same_text(event.ordering_key, found.ordering_key))
    difference = "ordering key";
  else if (!same_text(event.idempotency_key, found.idempotency_key))
    difference = "idempotency key";
  else if (!pg::same_json(event.payload, found.payload))
    difference = "payload";
  if (!difference) return;
  pg::raise_detailed(kEventDiffers, psprintf("The %s is different.", difference),
                     "An event key names one event for ever; use a new event key for a new event.",
                     "event key \"%s\" was used for an event with other content",
                     text_to_cstring(event.event_key));
}

// --- writing -----------------------------------------------------------------------------------------------

// False when another transaction has written the event key meanwhile.
bool insert_delayed(const NewEvent &event) {
  const bool numbered = event.number != 0;
  const FullTransactionId request = numbered ? GetTopFullTransactionId() : InvalidFullTransactionId;
  return pg::spi([&] {
           return insert_into_scheduled.run(
               {pg::value(event.scope), pg::value(event.idempotency_key), pg::value(event.event_key),
                pg::value(event.event_type), pg::value(event.ordering_key), pg::value(event.payload),
                pg::value(event.headers), pg::value(TimestampTzGetDatum(GetCurrentTimestamp())),
                pg::value(TimestampTzGetDatum(event.deliver_after)),
                numbered ? pg::value(event.number) : pg::null_value(),
                pg::value(FullTransactionIdGetDatum(request))});
         }) == 1;
}

// No unique index spans the two tables. Each side of a race writes its row first and looks at the other table
// then, so at least one of two that overlap sees the other's row. It cannot take its own row back: it fails.
void require_free(Place elsewhere, const NewEvent &event) {
  if (is_taken(elsewhere, PointerGetDatum(event.event_key), PointerGetDatum(event.scope)))
    pg::raise_serialization_failure(
        "could not emit the event: another transaction emitted the same event key at the same time with "
        "another "
        "delivery time",
        "Retry the transaction.");
}

// Only when the event is not there: a retry gets its position whether or not it owns the key.
void before_writing(const LogEntry &entry) {
  if (entry.idempotency_key)
    idempotency::require_claim({const_cast<text *>(entry.idempotency_key), const_cast<text *>(entry.scope)});
  emitted = true;
}

// Whoever has just become the owner of the key is the first to do its work.
Repetition repetition(const NewEvent &event) {
  if (!event.idempotency_key) return Repetition::kPossible;
  const idempotency::Claim *claim = idempotency::find_claim({event.idempotency_key, event.scope});
  return claim && claim->state == idempotency::ClaimState::kOwned ? Repetition::kUnexpected
                                                                  : Repetition::kPossible;
}

FoundEvent emit_now(const NewEvent &event, int64 *id) {
  const Datum key = PointerGetDatum(event.event_key);
  const FoundEvent scheduled = find_scheduled_event(key, PointerGetDatum(event.scope));
  if (scheduled.place != Place::kNowhere) return scheduled;
  const FoundEvent found = append_to_log(log_entry(event), repetition(event), before_writing, id);
  if (found.place == Place::kNowhere) require_free(Place::kScheduled, event);
  return found;
}

[[noreturn]] void raise_not_taken() {
  pg::raise(kRowRefused, pg::kRowRefusedHint, "the delayed event is not taken");
}

FoundEvent schedule(const NewEvent &event) {
  for (int refused = 0; refused < kRefusals; ++refused) {
    const FoundEvent found = find_event(PointerGetDatum(event.event_key), PointerGetDatum(event.scope));
    if (found.place != Place::kNowhere) return found;
    before_writing(log_entry(event));
    if (!insert_delayed(event)) continue;
    require_free(Place::kLog, event);
    return FoundEvent{};
  }
  raise_not_taken();
}

// The position, or false for a delayed event.
bool emit_with_key(const NewEvent &event, int64 *id) {
  const FoundEvent found = event.delayed ? schedule(event) : emit_now(event, id);
  if (found.place == Place::kNowhere) return !event.delayed;
  require_same_content(event, found);
  *id = found.id;
  return found.place == Place::kLog;
}

// Delayed events are few, and have to be found: they get the text at once.
text *numbered_key(const NewEvent &event) {
  StringInfoData key;
  initStringInfo(&key);
  append_numbered_key(&key, pg::bytes_of(event.idempotency_key), event.number);
  return cstring_to_text_with_len(key.data, key.len);
}

// Nothing to look up for a number that was given just now.
bool emit(NewEvent *event, int64 *id) {
  if (event->event_key) return emit_with_key(*event, id);
  event->number = idempotency::number_event({event->idempotency_key, event->scope});
  emitted = true;
  if (event->delayed) {
    event->event_key = numbered_key(*event);
    if (!insert_delayed(*event)) raise_not_taken();
    return false;
  }
  *id = append_numbered(log_entry(*event));
  return true;
}

void forget() noexcept {
  emitted = announce = false;
}

void after_commit() noexcept {
  if (emitted || announce)
    runtime::announce_commit(announce ? runtime::News::kAnything : runtime::News::kEvents);
  forget();
}

constexpr pg::XactSubscriber subscriber{
    .before_commit = nullptr,
    .before_prepare = nullptr,
    .after_commit = after_commit,
    .after_prepare = forget,  // COMMIT PREPARED runs in any session: polling finds its events
    .after_abort = forget,
    .sub_commit = nullptr,
    .sub_abort = nullptr,
};

}  // namespace

bool transaction_has_emitted() {
  return emitted;
}

void announce_at_commit() {
  announce = true;
}

void watch_emitting_transactions() {
  pg::subscribe_to_transactions(&subscriber);
}

}  // namespace retrysafe::outbox

using namespace retrysafe;
using namespace retrysafe::outbox;

// outbox_emit(key, event_key, event_type, payload, ordering_key, headers, deliver_after, scope) → bigint
RETRYSAFE_SQL_FUNCTION(retrysafe_outbox_emit) {
  PreventCommandIfReadOnly("outbox_emit()");
  PreventCommandIfParallelMode("outbox_emit()");

  NewEvent event{};
  event.event_key = text_argument(fcinfo, 1);
  event.event_type = text_argument(fcinfo, 2);
  event.payload = jsonb_argument(fcinfo, 3);
  event.ordering_key = text_argument(fcinfo, 4);
  event.headers = jsonb_argument(fcinfo, 5);
  event.scope = text_argument(fcinfo, 7);

  check_scope(event.scope);
  if (!PG_ARGISNULL(0)) event.idempotency_key = idempotency::key_argument(fcinfo, 0, 7).key;
  check_event_key(event);
  check_event_type(event.event_type);
  if (event.ordering_key) check_name(event.ordering_key, kInvalidOrderingKey, "ordering key");
  check_payload(event.payload);
  event.headers = complete_headers(event.headers);
  check_encoding(event);
  if (!PG_ARGISNULL(6)) {
    event.deliver_after = PG_GETARG_TIMESTAMPTZ(6);
    if (TIMESTAMP_NOT_FINITE(event.deliver_after))
      pg::raise(kInvalidDeliverAfter, "Give a point in time, or null to deliver at once.",
                "deliver_after must be finite");
    // Its place among the delayed ones of its key is behind those that were due before, moved or not.
    event.delayed = event.deliver_after > GetCurrentTimestamp() ||
                    (event.ordering_key &&
                     first_turn(PointerGetDatum(event.ordering_key)).deliver_after <= event.deliver_after);
  }

  int64 id = 0;
  if (!emit(&event, &id)) PG_RETURN_NULL();
  PG_RETURN_INT64(id);
}
