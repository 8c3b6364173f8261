// Text of a far side, made fit to be shown: valid UTF-8 without control characters.
#pragma once

#include <cstddef>
#include <string>
#include <string_view>

namespace retrysafe {

// At most `max_bytes` of it, cut between characters. Control characters and line ends become single blanks,
// bytes that are not UTF-8 become "?".
std::string printable(std::string_view text, size_t max_bytes);

}  // namespace retrysafe
