// Options of kind nats that have a form of their own: a line each for servers, subject, user's key, its seed,
// beginning of the inbox and addresses, then a file of credentials.
#include "sinks/nats/target.hpp"

#include "input.hpp"
#include "options.hpp"

using namespace retrysafe;

extern "C" int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
  fuzz::Input input(data, size);
  fuzz::InputOptions options;
  options.add("servers", input.line());
  options.add("subject", input.line());
  options.add_unless_empty("nkey", input.line());
  options.add_unless_empty("nkey_seed", input.line());
  options.add_unless_empty("inbox_prefix", input.line());
  const std::string addresses = input.line();
  options.add_unless_empty("credentials", std::string(input.rest()));
  try {
    const nats::Target target(options.with_addresses(addresses));
    fuzz::require(!target.servers.empty());
    for (const nats::Server &server : target.servers) fuzz::require(!server.host.empty() && server.port > 0);
    if (target.credentials)
      fuzz::require(!target.credentials->token.empty() && !target.credentials->seed.empty());
    fuzz::require(target.nkey.empty() == target.nkey_seed.empty());
  } catch (const std::invalid_argument &) {
  }
  return 0;
}
