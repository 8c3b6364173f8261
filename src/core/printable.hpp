// Text of a far side, made fit to be shown: valid UTF-8 without control characters.
#pragma once

#include <cstddef>
#include <string>
#include <string_view>

namespace retrysafe {

// At most `max_bytes` of it, cut between characters. Control characters and line ends become single blanks,
// bytes that are not UTF-8 become "?".
std::string printable(std::string_view text, size_t max_bytes);
// The same into `out`, which has room for `max_bytes`; returns how many it took.
size_t printable(std::string_view text, char *out, size_t max_bytes) noexcept;

}  // namespace retrysafe
