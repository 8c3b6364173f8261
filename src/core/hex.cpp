#include "core/hex.hpp"

#include <charconv>

namespace retrysafe {

bool decode_hex(std::string_view hex, char *bytes) {
  if (hex.size() % 2 != 0) return false;
  for (std::size_t i = 0; i < hex.size(); i += 2) {
    // Unsigned: from_chars takes no sign and no white space, but stops early at what is not a digit.
    unsigned value = 0;
    const char *const pair = hex.data() + i;
    if (std::from_chars(pair, pair + 2, value, 16).ptr != pair + 2) return false;
    bytes[i / 2] = static_cast<char>(value);
  }
  return true;
}

}  // namespace retrysafe
