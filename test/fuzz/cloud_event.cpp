// What events become on their way out: CloudEvents in both modes, the envelope of handlers, `source` and
// `time`. Eight bytes of a time, then an event.
#include "core/cloud_event.hpp"

#include <algorithm>
#include <deque>

#include "core/event_json.hpp"
#include "core/event_source.hpp"
#include "core/event_time.hpp"
#include "core/header_list.hpp"
#include "input.hpp"

using namespace retrysafe;

namespace {

std::string percent_decoded(std::string_view text) {
  std::string decoded;
  const auto digit = [](char c) { return c <= '9' ? c - '0' : c - 'A' + 10; };
  for (size_t i = 0; i < text.size(); ++i) {
    if (text[i] != '%') {
      decoded += text[i];
    } else {
      fuzz::require(i + 2 < text.size());
      decoded += static_cast<char>(digit(text[i + 1]) * 16 + digit(text[i + 2]));
      i += 2;
    }
  }
  return decoded;
}

void check_binary(const CloudEvent &event) {
  for (const CloudEvent::Attribute &attribute : event.attributes()) {
    fuzz::require(!attribute.name.empty());
    for (const char c : attribute.name) fuzz::require((c >= 'a' && c <= 'z') || (c >= '0' && c <= '9'));
    std::string value;
    CloudEvent::append_header_value(attribute.value, &value);
    for (const char c : value) fuzz::require(c > ' ' && c <= '~');
    fuzz::require(percent_decoded(value) == attribute.value);
    const auto same = [&](const CloudEvent::Attribute &other) { return other.name == attribute.name; };
    fuzz::require(std::count_if(event.attributes().begin(), event.attributes().end(), same) == 1);
  }
}

// Without data it is an object of strings.
void check_structured(const CloudEvent &event) {
  std::string json;
  event.append_json(&json);
  if (event.has_data()) return;
  std::vector<retrysafe_pair> members;
  std::deque<std::string> unescaped;
  fuzz::require(read_headers(json, &members, &unescaped) && members.size() == event.attributes().size());
  for (size_t i = 0; i < members.size(); ++i) {
    fuzz::require(fuzz::view(members[i].name) == event.attributes()[i].name);
    fuzz::require(fuzz::view(members[i].value) == event.attributes()[i].value);
  }
}

void check_source(std::string_view database, std::string_view scope) {
  const size_t capacity = event_source_capacity(database, scope);
  std::vector<char> text(capacity);
  const size_t size = event_source(database, scope, text.data());
  fuzz::require(size <= capacity);
  for (size_t i = 0; i < size; ++i) fuzz::require(text[i] > ' ' && text[i] <= '~');
}

void check_time(int64_t microseconds) {
  std::vector<char> text(kEventTimeSize);
  const size_t size = event_time(microseconds, text.data());
  fuzz::require(size == 0 || size == kEventTimeSize);
  constexpr std::string_view shape = "0000-00-00T00:00:00.000000Z";
  for (size_t i = 0; i < size; ++i)
    fuzz::require(shape[i] == '0' ? text[i] >= '0' && text[i] <= '9' : text[i] == shape[i]);
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
  fuzz::Input input(data, size);
  check_time(input.number<int64_t>());
  const fuzz::InputEvent event(&input);
  check_source(fuzz::view(event->type), fuzz::view(event->scope));
  for (const std::string_view source : {std::string_view(), std::string_view("urn:shop")}) {
    const CloudEvent cloud_event(*event, source);
    check_binary(cloud_event);
    check_structured(cloud_event);
  }
  std::string envelope;
  write_event_json(envelope, {.id = fuzz::view(event->id),
                              .type = fuzz::view(event->type),
                              .event_key = fuzz::view(event->event_key),
                              .scope = fuzz::view(event->scope),
                              .ordering_key = fuzz::view(event->ordering_key),
                              .payload = fuzz::view(event->payload),
                              .headers = {},
                              .created_at = fuzz::view(event->time),
                              .attempt = event->attempt});
  for (const char c : envelope) fuzz::require(static_cast<unsigned char>(c) >= 0x20 || event->payload.data);
  return 0;
}
