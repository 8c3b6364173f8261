#include "core/printable.hpp"

#include <cstdint>

namespace retrysafe {

namespace {

// The length of the well-formed UTF-8 sequence at the start, 0 for none. No surrogates, no overlong forms.
size_t sequence(std::string_view text, uint32_t *character) {
  const auto byte = [&](size_t i) { return static_cast<uint32_t>(static_cast<unsigned char>(text[i])); };
  const uint32_t lead = byte(0);
  const size_t size = lead < 0x80 ? 1 : lead >> 5 == 6 ? 2 : lead >> 4 == 14 ? 3 : lead >> 3 == 30 ? 4 : 0;
  if (size == 0 || text.size() < size) return 0;
  *character = size == 1 ? lead : lead & (0x7fu >> size);
  for (size_t i = 1; i < size; ++i) {
    if (byte(i) >> 6 != 2) return 0;
    *character = *character << 6 | (byte(i) & 0x3f);
  }
  constexpr uint32_t smallest[] = {0, 0, 0x80, 0x800, 0x10000};
  if (*character < smallest[size] || *character > 0x10ffff || *character >> 11 == 0x1b) return 0;
  return size;
}

// C0, DEL, C1, the line and paragraph separators, and the marks that reorder text on a screen.
bool is_control(uint32_t c) {
  return c < 0x20 || (c >= 0x7f && c < 0xa0) || (c >= 0x200e && c <= 0x200f) ||
         (c >= 0x2028 && c <= 0x202e) || (c >= 0x2066 && c <= 0x2069);
}

}  // namespace

size_t printable(std::string_view text, char *out, size_t max_bytes) noexcept {
  size_t used = 0;
  while (!text.empty()) {
    uint32_t character = 0;
    const size_t size = sequence(text, &character);
    const bool blank = size > 0 && (is_control(character) || character == ' ');
    const std::string_view shown = size == 0 ? "?" : blank ? " " : text.substr(0, size);
    text.remove_prefix(size == 0 ? 1 : size);
    if (blank && (used == 0 || out[used - 1] == ' ')) continue;
    if (used + shown.size() > max_bytes) break;
    used += shown.copy(out + used, shown.size());
  }
  while (used > 0 && out[used - 1] == ' ') --used;
  return used;
}

std::string printable(std::string_view text, size_t max_bytes) {
  std::string out(max_bytes, '\0');
  out.resize(printable(text, out.data(), max_bytes));
  return out;
}

}  // namespace retrysafe
