#include "sinks/redis/target.hpp"

#include <stdexcept>

namespace retrysafe::redis {

Target::Target(const sink::Options &options)
    : host(options.required("host")),
      port(static_cast<uint16_t>(options.number("port", 6379))),
      user(options.text("user")),
      password(options.text("password")),
      database(options.number("database", 0)),
      stream(options.required("stream")),
      max_length(options.number("max_length", 0)),
      replicas(options.number("replicas", 0)),
      max_in_flight(static_cast<size_t>(options.number("max_in_flight", 256))),
      timeout(options.number("timeout", 30'000)),
      connect_timeout(options.number("connect_timeout", 5'000)),
      source(options.text("source")),
      addresses(options.allowed_addresses()),
      tls(sink::TlsContext::of(options)) {
  if (host.starts_with('/')) throw std::invalid_argument("option \"host\" must be a name or an address");
  if (!user.empty() && password.empty())
    throw std::invalid_argument("option \"user\" needs option \"password\"");
}

}  // namespace retrysafe::redis
