#include "runtime/envelope.hpp"

#include <bit>
#include <cstring>
#include <string_view>

#include "core/event_id.hpp"
#include "core/event_source.hpp"
#include "core/event_time.hpp"
#include "core/printable.hpp"
#include "pg/database_name.hpp"
#include "pg/text.hpp"

#include "pg/server.hpp"

namespace retrysafe::runtime {

namespace {

retrysafe_text utf8(const char *text, size_t size) {
  if (!text) return {nullptr, 0};
  const std::string_view converted = pg::to_utf8({text, size});
  return {converted.data(), converted.size()};
}

retrysafe_text utf8(const char *text) {
  return text ? utf8(text, strlen(text)) : retrysafe_text{nullptr, 0};
}

// What is not part of the event as it was read.
struct Written {
  UuidText id;
  char time[kEventTimeSize];
};

// The names and values of a JSON object of strings.
const retrysafe_pair *header_pairs(const char *json, size_t *count) {
  *count = 0;
  if (!json) return nullptr;
  Jsonb *object = DatumGetJsonbP(DirectFunctionCall1(jsonb_in, CStringGetDatum(json)));
  if (!JB_ROOT_IS_OBJECT(object)) return nullptr;
  auto *pairs = static_cast<retrysafe_pair *>(palloc(sizeof(retrysafe_pair) * (JB_ROOT_COUNT(object) + 1)));
  JsonbIterator *iterator = JsonbIteratorInit(&object->root);
  JsonbValue value;
  JsonbIteratorToken token;
  while ((token = JsonbIteratorNext(&iterator, &value, true)) != WJB_DONE) {
    if (token == WJB_KEY) {
      pairs[*count].name = utf8(pnstrdup(value.val.string.val, value.val.string.len));
    } else if (token == WJB_VALUE && value.type == jbvString) {
      pairs[*count].value = utf8(pnstrdup(value.val.string.val, value.val.string.len));
      ++*count;
    }
  }
  return pairs;
}

retrysafe_text source_text(const retrysafe_text &database, const retrysafe_text &scope) {
  const std::string_view d(database.data, database.size), s(scope.data, scope.size);
  auto *text = static_cast<char *>(palloc(event_source_capacity(d, s)));
  return {text, event_source(d, s, text)};
}

}  // namespace

retrysafe_event *make_envelopes(const outbox::Event *events, int32 count) {
  const retrysafe_text database = utf8(pg::own_database_name());
  auto *envelopes = static_cast<retrysafe_event *>(palloc0(sizeof(retrysafe_event) * (count + 1)));
  auto *written = static_cast<Written *>(palloc(sizeof(Written) * (count + 1)));
  for (int32 i = 0; i < count; ++i) {
    const outbox::Event &event = events[i];
    retrysafe_event &envelope = envelopes[i];
    written[i].id = format_uuid(std::bit_cast<Uuid>(event.event_id));
    envelope.id = {written[i].id.data(), written[i].id.size()};
    envelope.type = utf8(event.event_type);
    envelope.time = {written[i].time, event_time(event.created_at, written[i].time)};
    envelope.ordering_key = utf8(event.ordering_key);
    envelope.event_key = utf8(event.event_key);
    envelope.scope = utf8(event.scope);
    envelope.source = i > 0 && strcmp(events[i - 1].scope, event.scope) == 0
                          ? envelopes[i - 1].source
                          : source_text(database, envelope.scope);
    envelope.payload = utf8(event.payload);
    envelope.headers = header_pairs(event.headers, &envelope.header_count);
    envelope.attempt = event.attempts + 1;
  }
  return envelopes;
}

const char *text_of_sink(const char *utf8_text) {
  if (!utf8_text || *utf8_text == '\0') return nullptr;
  const size_t size = strlen(utf8_text);
  auto *text = static_cast<char *>(palloc(size + 1));
  text[printable({utf8_text, size}, text, size)] = '\0';
  if (GetDatabaseEncoding() != PG_UTF8)
    for (char *c = text; *c; ++c)
      if (IS_HIGHBIT_SET(*c)) *c = '?';
  return text;
}

}  // namespace retrysafe::runtime
