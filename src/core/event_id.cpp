#include "core/event_id.hpp"

#include <algorithm>

#include "core/hex.hpp"

namespace retrysafe {

namespace {

void set_version(Uuid &uuid, unsigned version) {
  uuid[6] = static_cast<std::uint8_t>((uuid[6] & 0x0fU) | (version << 4));
  uuid[8] = static_cast<std::uint8_t>((uuid[8] & 0x3fU) | 0x80U);
}

}  // namespace

Uuid event_id_from_digest(const Sha256Digest &digest) {
  Uuid uuid;
  std::copy_n(digest.begin(), uuid.size(), uuid.begin());
  set_version(uuid, 8);
  return uuid;
}

Uuid random_uuid_from_bits(Uuid bits) {
  set_version(bits, 4);
  return bits;
}

UuidText format_uuid(const Uuid &uuid) {
  constexpr char kDigits[] = "0123456789abcdef";
  UuidText text;
  std::size_t at = 0;
  for (std::size_t i = 0; i < uuid.size(); ++i) {
    if (i == 4 || i == 6 || i == 8 || i == 10) text[at++] = '-';
    text[at++] = kDigits[uuid[i] >> 4];
    text[at++] = kDigits[uuid[i] & 0x0f];
  }
  return text;
}

std::optional<Uuid> parse_uuid(std::string_view text) {
  const bool braced = text.starts_with('{');
  if (braced != text.ends_with('}')) return std::nullopt;
  if (braced) text = text.substr(1, text.size() - 2);
  Uuid uuid;
  for (std::size_t i = 0; i < uuid.size(); ++i) {
    char byte;
    if (text.size() < 2 || !decode_hex(text.substr(0, 2), &byte)) return std::nullopt;
    uuid[i] = static_cast<std::uint8_t>(byte);
    text.remove_prefix(2);
    if (i % 2 == 1 && i + 1 < uuid.size() && text.starts_with('-')) text.remove_prefix(1);
  }
  return text.empty() ? std::optional(uuid) : std::nullopt;
}

}  // namespace retrysafe
