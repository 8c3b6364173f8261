// Texts of a far side, as they are shown: a byte for the room, a line with a secret, then the text.
#include "core/printable.hpp"

#include "core/handler_error.hpp"
#include "core/secret_mask.hpp"
#include "input.hpp"
#include "sink/kit.hpp"

using namespace retrysafe;

extern "C" int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
  fuzz::Input input(data, size);
  const size_t room = input.number<uint8_t>();
  const std::string secret = input.line(), text(input.rest());

  const std::string shown = printable(text, room);
  fuzz::require(shown.size() <= room && fuzz::is_one_line(shown));
  fuzz::require(printable(shown, room) == shown);

  SecretMask mask;
  mask.add(secret);
  std::string masked = text;
  mask.apply(&masked);
  fuzz::require(masked.size() <= text.size());
  // Stars can be a secret themselves, or become part of one.
  if (secret.size() >= 4 && secret.find('*') == std::string::npos)
    fuzz::require(masked.find(secret) == std::string::npos);

  retrysafe_outcome outcome;
  sink::report(&outcome, 1, RETRYSAFE_FAILED_RETRY, shown);
  fuzz::require(fuzz::is_utf8(outcome.reason));
  (void)handler_error(text);
  return 0;
}
