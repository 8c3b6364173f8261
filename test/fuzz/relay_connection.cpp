// The relay's connection string.
#include "relay/session.hpp"

#include "input.hpp"
#include "relay/configuration.hpp"

using namespace retrysafe;

extern "C" int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
  const std::string text(reinterpret_cast<const char *>(data), size);
  try {
    const relay::Hosts hosts(text);
    fuzz::require(hosts.count() > 0 && hosts.timeout() > 0);
  } catch (const relay::ConfigurationError &) {
  }
  return 0;
}
