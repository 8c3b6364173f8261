// The option "servers".
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace retrysafe::nats {

struct Server {
  std::string host;  // IPv6 addresses without their brackets
  uint16_t port;
  bool tls;  // demanded: "tls://"
};

// "HOST", "HOST:PORT", "nats://HOST:PORT" or "tls://HOST:PORT", several separated by commas. Throws
// std::invalid_argument.
std::vector<Server> parse_servers(std::string_view list);

}  // namespace retrysafe::nats
