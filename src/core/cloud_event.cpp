#include "core/cloud_event.hpp"

#include <algorithm>

#include "core/json_string.hpp"

namespace retrysafe {

namespace {

constexpr char kUpperHex[] = "0123456789ABCDEF";

std::string attribute_name(std::string_view header) {
  std::string name;
  for (char c : header) {
    if (c >= 'A' && c <= 'Z') c = static_cast<char>(c - 'A' + 'a');
    if ((c >= 'a' && c <= 'z') || (c >= '0' && c <= '9')) name += c;
  }
  return name;
}

// Taken even where the event has none, and `data`, which is the payload's.
bool is_reserved(std::string_view name) {
  constexpr std::string_view reserved[] = {"data", "datacontenttype", "partitionkey", "eventkey", "scope"};
  return std::find(std::begin(reserved), std::end(reserved), name) != std::end(reserved);
}

}  // namespace

CloudEvent::CloudEvent(const retrysafe_event &event, std::string_view source) : event_(event) {
  attributes_.reserve(10 + event.header_count);
  add("specversion", {"1.0", 3});
  add("id", event.id);
  add("source", source.empty() ? event.source : retrysafe_text{source.data(), source.size()});
  add("type", event.type);
  add("time", event.time);
  add("partitionkey", event.ordering_key);
  add("eventkey", event.event_key);
  if (event.scope.size > 0) add("scope", event.scope);
  for (size_t i = 0; i < event.header_count; ++i) {
    const retrysafe_pair &header = event.headers[i];
    const std::string name = attribute_name({header.name.data, header.name.size});
    if (!name.empty() && !is_reserved(name) && !has(name)) add(name, header.value);
  }
}

void CloudEvent::add(std::string_view name, const retrysafe_text &value) {
  if (value.data) attributes_.push_back({std::string(name), {value.data, value.size}});
}

bool CloudEvent::has(std::string_view name) const {
  return std::any_of(attributes_.begin(), attributes_.end(),
                     [&](const Attribute &attribute) { return attribute.name == name; });
}

void CloudEvent::append_json(std::string *out) const {
  char separator = '{';
  for (const Attribute &attribute : attributes_) {
    *out += separator;
    write_json_string(*out, attribute.name);
    *out += ':';
    write_json_string(*out, attribute.value);
    separator = ',';
  }
  if (has_data()) {
    *out += R"(,"datacontenttype":"application/json","data":)";
    out->append(event_.payload.data, event_.payload.size);
  }
  *out += '}';
}

void CloudEvent::append_header_value(std::string_view value, std::string *out) {
  for (char c : value) {
    const auto byte = static_cast<unsigned char>(c);
    if (byte > 0x20 && byte < 0x7f && c != '"' && c != '%') {
      *out += c;
    } else {
      *out += '%';
      *out += kUpperHex[byte >> 4];
      *out += kUpperHex[byte & 15];
    }
  }
}

}  // namespace retrysafe
