#include "sinks/redis/command.hpp"

#include <charconv>

#include "core/cloud_event.hpp"

namespace retrysafe::redis {

namespace {

void append_number(char mark, size_t number, std::string *out) {
  char text[24];
  const auto end = std::to_chars(text, text + sizeof text, number).ptr;
  *out += mark;
  out->append(text, end);
  *out += "\r\n";
}

void append_word(std::string_view word, std::string *out) {
  append_number('$', word.size(), out);
  *out += word;
  *out += "\r\n";
}

}  // namespace

void append_command(std::initializer_list<std::string_view> words, std::string *out) {
  append_number('*', words.size(), out);
  for (std::string_view word : words) append_word(word, out);
}

void append_xadd(const retrysafe_event &event, std::string_view stream, std::string_view source,
                 long max_length, std::string *out) {
  const CloudEvent cloud_event(event, source);
  const size_t fields = cloud_event.attributes().size() + (cloud_event.has_data() ? 2 : 0);
  append_number('*', 3 + (max_length > 0 ? 3 : 0) + 2 * fields, out);
  append_word("XADD", out);
  append_word(stream, out);
  if (max_length > 0) {
    append_word("MAXLEN", out);
    append_word("~", out);
    append_word(std::to_string(max_length), out);
  }
  append_word("*", out);
  for (const CloudEvent::Attribute &attribute : cloud_event.attributes()) {
    append_word(attribute.name, out);
    append_word(attribute.value, out);
  }
  if (!cloud_event.has_data()) return;
  append_word("datacontenttype", out);
  append_word("application/json", out);
  append_word("data", out);
  append_word({event.payload.data, event.payload.size}, out);
}

}  // namespace retrysafe::redis
