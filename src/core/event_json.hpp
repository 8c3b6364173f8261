// The JSON object that handler functions get, the same in this database and in another one.
//
// Written through `out.append(std::string_view)`, so that server code can write into memory of the server.
#pragma once

#include <string_view>

#include "core/json_string.hpp"

namespace retrysafe {

// Views without data stand for SQL null.
struct EventJson {
  std::string_view id;
  std::string_view type;
  std::string_view event_key;
  std::string_view scope;
  std::string_view ordering_key;
  std::string_view payload;  // JSON; SQL null is no member, so that it differs from JSON null
  std::string_view headers;  // JSON object
  std::string_view created_at;
  int attempt;
};

template <class Out>
void write_event_json(Out &out, const EventJson &event) {
  const auto member = [&](std::string_view name, std::string_view value) {
    out.append(name);
    if (value.data())
      write_json_string(out, value);
    else
      out.append(std::string_view("null"));
  };
  const auto raw = [&](std::string_view name, std::string_view json) {
    out.append(name);
    out.append(json);
  };
  char digits[12];
  char *first = digits + sizeof digits;
  auto number = static_cast<unsigned>(event.attempt);
  do *--first = static_cast<char>('0' + number % 10);
  while (number /= 10);

  member("{\"id\":", event.id);
  member(",\"type\":", event.type);
  member(",\"key\":", event.event_key);
  member(",\"scope\":", event.scope);
  member(",\"ordering_key\":", event.ordering_key);
  if (event.payload.data()) raw(",\"payload\":", event.payload);
  raw(",\"headers\":", event.headers.data() ? event.headers : "{}");
  member(",\"created_at\":", event.created_at);
  raw(",\"attempt\":", {first, static_cast<size_t>(digits + sizeof digits - first)});
  out.append(std::string_view("}"));
}

}  // namespace retrysafe
