#include "sinks/postgres/delivery_statement.hpp"

#include <algorithm>
#include <iterator>

#include "core/event_json.hpp"
#include "sink/kit.hpp"

namespace retrysafe::sink {

namespace {

struct Column {
  std::string_view name;
  Field field;
};

constexpr Column columns[] = {
    {"consumer", Field::kConsumer},        {"event_id", Field::kEventId},
    {"event_type", Field::kEventType},     {"source", Field::kSource},
    {"event_key", Field::kEventKey},       {"scope", Field::kScope},
    {"ordering_key", Field::kOrderingKey}, {"payload", Field::kPayload},
    {"headers", Field::kHeaders},          {"created_at", Field::kCreatedAt},
};

std::string headers_json(const retrysafe_event &event) {
  std::string json = "{";
  for (size_t i = 0; i < event.header_count; ++i) {
    if (i > 0) json += ',';
    write_json_string(json, view(event.headers[i].name));
    json += ':';
    write_json_string(json, view(event.headers[i].value));
  }
  return json += '}';
}

bool copy(const retrysafe_text &text, std::string *copy) {
  copy->assign(view(text));
  return text.data != nullptr;
}

}  // namespace

const char kInboxColumns[] =
    "('consumer', 'text'), ('event_id', 'uuid'), ('event_id', 'text'), ('event_type', 'text'), ('source', "
    "'text'),"
    " ('event_key', 'text'), ('scope', 'text'), ('ordering_key', 'text'), ('payload', 'jsonb'), ('payload', "
    "'json'),"
    " ('payload', 'text'), ('headers', 'jsonb'), ('headers', 'json'), ('headers', 'text'),"
    " ('created_at', 'timestamp with time zone')";

DeliveryStatement delivery_statement(const FarSide &far_side) {
  DeliveryStatement statement;
  const auto parameter = [&](Field field) {
    statement.parameters.push_back(field);
    return "$" + std::to_string(statement.parameters.size());
  };

  std::string fresh;
  if (!far_side.accept.empty()) {
    const std::string consumer = parameter(Field::kConsumer) + "::text";
    const std::string id = parameter(Field::kEventId) + "::text";
    const std::string event = parameter(Field::kEnvelope) + "::jsonb";
    // Materialized: otherwise the planner may call the handler first and ask then.
    fresh = "MATERIALIZED (SELECT " + event + " AS event WHERE " + far_side.accept + "(" + consumer + ", " +
            id + "))";
  } else {
    std::string names, values;
    for (const Column &column : columns) {
      if (std::find(far_side.columns.begin(), far_side.columns.end(), column.name) == far_side.columns.end())
        continue;
      const char *separator = names.empty() ? "" : ", ";
      names.append(separator).append(column.name);
      values.append(separator).append(parameter(column.field));
    }
    fresh =
        "INSERT INTO " + far_side.inbox + " (" + names + ") VALUES (" + values + ") ON CONFLICT DO NOTHING";
    if (far_side.handler.empty()) {
      statement.sql = fresh;
      return statement;
    }
    fresh = "(" + fresh + " RETURNING " + parameter(Field::kEnvelope) + "::jsonb AS event)";
  }
  // Counted, so that whatever the function returns stays over there.
  statement.sql = "WITH fresh AS " + fresh + " SELECT pg_catalog.count(*) FROM fresh CROSS JOIN LATERAL " +
                  far_side.handler + "(fresh.event)";
  return statement;
}

bool parameter_text(Field field, const retrysafe_event &event, std::string_view consumer, std::string *text) {
  switch (field) {
    case Field::kConsumer:
      text->assign(consumer);
      return true;
    case Field::kEventId:
      return copy(event.id, text);
    case Field::kEventType:
      return copy(event.type, text);
    case Field::kSource:
      return copy(event.source, text);
    case Field::kEventKey:
      return copy(event.event_key, text);
    case Field::kScope:
      return copy(event.scope, text);
    case Field::kOrderingKey:
      return copy(event.ordering_key, text);
    case Field::kPayload:
      return copy(event.payload, text);
    case Field::kHeaders:
      *text = headers_json(event);
      return true;
    case Field::kCreatedAt:
      return copy(event.time, text);
    case Field::kEnvelope: {
      const std::string headers = headers_json(event);
      text->clear();
      write_event_json(*text, {.id = view(event.id),
                               .type = view(event.type),
                               .event_key = view(event.event_key),
                               .scope = view(event.scope),
                               .ordering_key = view(event.ordering_key),
                               .payload = view(event.payload),
                               .headers = headers,
                               .created_at = view(event.time),
                               .attempt = event.attempt});
      return true;
    }
  }
  return false;
}

}  // namespace retrysafe::sink
