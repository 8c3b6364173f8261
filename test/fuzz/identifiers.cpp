// Names that clients hand back: of batches, of events, and digests in hexadecimal.
#include "core/batch_handle.hpp"

#include "core/event_id.hpp"
#include "core/hex.hpp"
#include "input.hpp"

using namespace retrysafe;

extern "C" int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
  const std::string text(reinterpret_cast<const char *>(data), size);

  // One batch has one name.
  BatchHandle handle;
  if (parse_handle(text, &handle)) {
    std::vector<char> name(BatchHandle::kMaxLength);
    const int length = format_handle(handle, name.data());
    fuzz::require(length < BatchHandle::kMaxLength && name[static_cast<size_t>(length)] == '\0');
    fuzz::require(text == name.data());
  }

  if (const auto uuid = parse_uuid(text)) {
    const UuidText written = format_uuid(*uuid);
    fuzz::require(parse_uuid(view(written)) == uuid);
    // Digits, hyphens and braces, and nothing else.
    size_t digits = 0;
    for (const char c : text)
      digits += std::string_view("0123456789abcdefABCDEF").find(c) != std::string_view::npos;
    fuzz::require(digits == 32 && text.size() <= 32 + 7 + 2);
  }

  std::vector<char> bytes(size / 2);
  if (decode_hex(text, bytes.data())) fuzz::require(size % 2 == 0);
  return 0;
}
