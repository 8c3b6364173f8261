#include "core/event_fields.hpp"

#include <algorithm>

namespace retrysafe {

namespace {

bool is_letter(char c) {
  return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z');
}

char lower(char c) {
  return c >= 'A' && c <= 'Z' ? static_cast<char>(c - 'A' + 'a') : c;
}

}  // namespace

bool has_control_character(std::string_view text) {
  return std::any_of(text.begin(), text.end(), [](char c) {
    const auto byte = static_cast<unsigned char>(c);
    return byte < 0x20 || byte == 0x7f;
  });
}

bool ends_in_number(std::string_view event_key) {
  const std::size_t before = event_key.find_last_not_of("0123456789");
  return before != std::string_view::npos && before + 1 < event_key.size() &&
         event_key[before] == kNumberMark;
}

bool is_header_name(std::string_view name) {
  return !name.empty() && name.size() <= kMaxHeaderNameBytes &&
         std::all_of(name.begin(), name.end(),
                     [](char c) { return is_letter(c) || (c >= '0' && c <= '9') || c == '_' || c == '-'; });
}

bool same_header_name(std::string_view a, std::string_view b) {
  return std::equal(a.begin(), a.end(), b.begin(), b.end(),
                    [](char x, char y) { return lower(x) == lower(y); });
}

}  // namespace retrysafe
