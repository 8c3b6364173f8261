// The published identity of an event: a UUID of version 8 that is computed, not drawn.
//
// It is the SHA-256 of the log's own UUID (16 bytes), the scope in UTF-8, one zero byte and the event key in
// UTF-8, cut to 128 bits, with the version and variant bits of RFC 9562 set. Text of the server cannot hold a
// zero byte, so no two pairs of scope and event key are joined to the same bytes. An event that was lost with
// the last bytes of WAL and is emitted again gets the same id; a forked log gets ids of its own.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <string_view>

namespace retrysafe {

using Uuid = std::array<std::uint8_t, 16>;
using Sha256Digest = std::array<std::uint8_t, 32>;

Uuid event_id_from_digest(const Sha256Digest &digest);

// Sets the version and variant bits of a random UUID (version 4).
Uuid random_uuid_from_bits(Uuid bits);

// The usual 36 characters, lower case, without a closing NUL.
using UuidText = std::array<char, 36>;
UuidText format_uuid(const Uuid &uuid);
inline std::string_view view(const UuidText &text) {
  return {text.data(), text.size()};
}

// As the server reads a uuid: digits in either case, hyphens after groups of four or none, braces around it
// or not.
std::optional<Uuid> parse_uuid(std::string_view text);

}  // namespace retrysafe
