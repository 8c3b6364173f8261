// Options of kind http that have a form of their own: a line each for the URL, the signing keys and the
// addresses, then a line for each header.
#include "sinks/http/endpoint.hpp"

#include <stdexcept>

#include "core/option_list.hpp"
#include "core/kinds/kinds.hpp"
#include "input.hpp"
#include "options.hpp"

using namespace retrysafe;

extern "C" int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
  fuzz::Input input(data, size);
  fuzz::InputOptions options;
  options.add("url", input.line());
  options.add_unless_empty("secret", input.line());
  const std::string addresses = input.line();
  while (!input.empty()) {
    const std::string header = input.line();
    const size_t colon = header.find(':');
    options.add("headers." + header.substr(0, colon),
                colon == std::string::npos ? "" : header.substr(colon + 1));
  }
  try {
    http::Endpoint endpoint(options.with_addresses(addresses));
    fuzz::require(!endpoint.host.empty());
    if (!endpoint.signer) return 0;
    std::string signature;
    endpoint.signer->append_signature("1", "2", "{}", &signature);
    // None where the option holds nothing but blanks.
    if (!signature.empty()) fuzz::require(signature.starts_with("v1,"));
  } catch (const std::invalid_argument &) {
  }
  return 0;
}
