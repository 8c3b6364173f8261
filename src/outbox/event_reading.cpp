#include "outbox/event_reading.hpp"

#include <cstring>

#include "outbox/event_id.hpp"

#include "pg/server.hpp"

namespace retrysafe::outbox {

namespace {

const char *text_at(TupleTableSlot *slot, AttrNumber column) {
  bool null;
  const Datum value = slot_getattr(slot, column, &null);
  return null ? nullptr : TextDatumGetCString(value);
}

const char *json_at(TupleTableSlot *slot, AttrNumber column) {
  bool null;
  const Datum value = slot_getattr(slot, column, &null);
  if (null) return nullptr;
  Jsonb *json = DatumGetJsonbP(value);
  return JsonbToCString(nullptr, &json->root, static_cast<int>(VARSIZE(json)));
}

}  // namespace

Event read_event(TupleTableSlot *slot, AttrNumber first, const Uuid &log, bool body) {
  Event event{};
  event.scope = text_at(slot, first);
  event.idempotency_key = text_at(slot, first + 1);
  event.event_key = text_at(slot, first + 2);
  event.event_type = text_at(slot, first + 3);
  event.ordering_key = text_at(slot, first + 4);
  if (body) {
    event.payload = json_at(slot, first + 5);
    event.headers = json_at(slot, first + 6);
  }
  bool null;
  event.created_at = DatumGetTimestampTz(slot_getattr(slot, first + 7, &null));
  const Uuid id = event_id(log, event.scope, event.event_key);
  memcpy(event.event_id.data, id.data(), id.size());
  return event;
}

int64 body_size(const Event &event) {
  return static_cast<int64>((event.payload ? strlen(event.payload) : 0) +
                            (event.headers ? strlen(event.headers) : 0));
}

}  // namespace retrysafe::outbox
