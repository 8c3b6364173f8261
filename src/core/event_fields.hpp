// What the parts of an event may look like. Types and headers travel in HTTP and broker headers, where a
// control character would let a caller write headers of its own.
#pragma once

#include <cstddef>
#include <string_view>

namespace retrysafe {

inline constexpr std::size_t kMaxNameBytes = 255;  // keys, scopes, event types
inline constexpr std::size_t kMaxHeaders = 64;
inline constexpr std::size_t kMaxHeaderNameBytes = 64;
inline constexpr std::size_t kMaxHeaderBytes = 16 * 1024;  // names and values together

// Arrays and objects of a payload within one another. Text that its sender could parse others must be able to
// parse, with more on their stack than the sender has: this is deep enough for data, and no trouble for a
// server with the smallest max_stack_depth (100 kB, some 600 levels).
inline constexpr int kMaxPayloadLevels = 500;

// ASCII control characters, DEL included. Bytes of multi-byte characters are none.
bool has_control_character(std::string_view text);

// Events of a request without event keys of their own are numbered: their event keys are KEY~1, KEY~2, …
inline constexpr char kNumberMark = '~';
// So no other event key may look like that: end in the mark and digits.
bool ends_in_number(std::string_view event_key);

// 1 to 64 of A-Z a-z 0-9 _ -
bool is_header_name(std::string_view name);

// Header names are compared without regard to case.
bool same_header_name(std::string_view a, std::string_view b);

}  // namespace retrysafe
