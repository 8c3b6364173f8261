// A destination's options.
#pragma once

#include <chrono>
#include <optional>
#include <string>
#include <vector>

#include "core/address_filter.hpp"
#include "core/route_template.hpp"
#include "sink/kit.hpp"
#include "sinks/nats/credentials.hpp"
#include "sinks/nats/servers.hpp"

namespace retrysafe::nats {

struct Target {
  // Throws std::invalid_argument for what can never work.
  explicit Target(const sink::Options &options);

  std::string destination;
  std::vector<Server> servers;
  RouteTemplate subject;
  std::string stream, id_prefix, source;
  bool structured;
  std::string user, password, token, nkey, nkey_seed;
  std::optional<Credentials> credentials;
  bool tls;
  std::string ca_file, cert_file, key_file;
  std::string inbox_prefix;
  std::chrono::milliseconds connect_timeout, timeout;
  size_t max_in_flight;
  AddressFilter filter;
};

}  // namespace retrysafe::nats
