// Strings of JSON.
//
// Written through `out.append(std::string_view)`, so that server code can write into memory of the server.
#pragma once

#include <cstdint>
#include <cstring>
#include <string_view>

namespace retrysafe {

// So many bytes at its beginning stand in a JSON string as they are. Nearly always that is all of the text:
// eight bytes are looked at in one go.
inline size_t plain_in_json(std::string_view text) {
  const auto escaped = [](char c) { return static_cast<unsigned char>(c) < 0x20 || c == '"' || c == '\\'; };
  constexpr uint64_t each = 0x0101010101010101;
  const auto any_below = [](uint64_t word, uint64_t c) { return (word - each * c) & ~word & (each * 0x80); };
  size_t at = 0;
  for (uint64_t word; at + sizeof word <= text.size(); at += sizeof word) {
    std::memcpy(&word, text.data() + at, sizeof word);
    if (any_below(word, 0x20) | any_below(word ^ each * '"', 1) | any_below(word ^ each * '\\', 1)) break;
  }
  while (at < text.size() && !escaped(text[at])) ++at;
  return at;
}

template <class Out>
void write_json_string(Out &out, std::string_view text) {
  out.append(std::string_view("\""));
  for (;;) {
    const size_t plain = plain_in_json(text);
    out.append(text.substr(0, plain));
    if (plain == text.size()) break;
    const auto c = static_cast<unsigned char>(text[plain]);
    constexpr std::string_view controls = "\b\f\n\r\t", letters = "bfnrt", digits = "0123456789abcdef";
    const size_t control = controls.find(text[plain]);
    const char code[] = {'\\', 'u', '0', '0', digits[c >> 4], digits[c & 15]};
    const char pair[] = {'\\', control < letters.size() ? letters[control] : text[plain]};
    const bool short_form = control < letters.size() || c >= 0x20;
    out.append(short_form ? std::string_view(pair, sizeof pair) : std::string_view(code, sizeof code));
    text.remove_prefix(plain + 1);
  }
  out.append(std::string_view("\""));
}

}  // namespace retrysafe
