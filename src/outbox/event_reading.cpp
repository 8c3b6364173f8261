#include "outbox/event_reading.hpp"

#include <bit>
#include <cstring>

#include "outbox/event_id.hpp"
#include "outbox/event_key.hpp"
#include "pg/json_text.hpp"
#include "pg/text.hpp"

#include "pg/server.hpp"

namespace retrysafe::outbox {

namespace {

// The columns, as both tables have them one after the other.
enum Column { kScope, kIdempotencyKey, kEventKey, kEventType, kOrderingKey, kPayload, kHeaders, kColumns };

// What the texts of a row are likely to take: JSON is a little longer as text.
StringInfoData make_room(const Datum *values, const bool *nulls, int count) {
  int size =
      64 + (nulls[kEventKey] ? static_cast<int>(VARSIZE_ANY(DatumGetPointer(values[kIdempotencyKey]))) : 0);
  for (int i = 0; i < count; ++i)
    if (!nulls[i]) size += static_cast<int>(VARSIZE_ANY(DatumGetPointer(values[i])));
  return {static_cast<char *>(palloc(size)), 0, size, 0};
}

}  // namespace

Event read_event(TupleTableSlot *slot, const EventColumns &columns, const Uuid &log, bool body) {
  const int count = body ? kColumns : kPayload;
  slot_getsomeattrs(slot, columns.scope + count - 1);
  const Datum *values = slot->tts_values + columns.scope - 1;
  const bool *nulls = slot->tts_isnull + columns.scope - 1;
  const bool numbered = nulls[kEventKey];

  // All texts of the row in one piece of memory, which may move while it is being filled.
  StringInfoData all = make_room(values, nulls, count);
  int begin[kColumns];
  for (int i = 0; i < count; ++i) {
    if (nulls[i] && i != kEventKey) continue;
    begin[i] = all.len;
    if (i == kEventKey && numbered)
      append_numbered_key(&all, pg::bytes_of(DatumGetTextPP(values[kIdempotencyKey])),
                          DatumGetInt32(slot->tts_values[columns.event_number - 1]));
    else if (i < kPayload)
      pg::ServerText{&all}.append(pg::bytes_of(DatumGetTextPP(values[i])));
    else
      pg::append_json(&all, DatumGetJsonbP(values[i]));
    ++all.len;  // the NUL behind it
  }
  const auto text_at = [&](Column i) { return all.data + begin[i]; };
  const auto text = [&](Column i) { return i < count && !nulls[i] ? text_at(i) : nullptr; };

  Event event{};
  event.scope = text(kScope);
  event.idempotency_key = text(kIdempotencyKey);
  event.event_key = text_at(kEventKey);
  event.event_type = text(kEventType);
  event.ordering_key = text(kOrderingKey);
  event.payload = text(kPayload);
  event.headers = text(kHeaders);
  event.created_at = DatumGetTimestampTz(slot->tts_values[columns.created_at - 1]);
  event.event_id = std::bit_cast<pg_uuid_t>(event_id(log, event.scope, event.event_key));
  return event;
}

int64 body_size(const Event &event) {
  return static_cast<int64>((event.payload ? strlen(event.payload) : 0) +
                            (event.headers ? strlen(event.headers) : 0));
}

}  // namespace retrysafe::outbox
