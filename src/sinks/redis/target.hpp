// One destination of kind redis, as its options describe it.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

#include "core/address_filter.hpp"
#include "core/route_template.hpp"
#include "sink/kit.hpp"
#include "sinks/tls_context.hpp"

namespace retrysafe::redis {

struct Target {
  // Throws std::invalid_argument: what is wrong with the options.
  explicit Target(const sink::Options &options);

  std::string host;
  uint16_t port;
  std::string user, password;
  long database;
  RouteTemplate stream;
  long max_length;  // 0: streams are not trimmed
  long replicas;
  size_t max_in_flight;
  std::chrono::milliseconds timeout, connect_timeout;
  std::string source;  // empty: the event's own
  AddressFilter addresses;
  std::optional<sink::TlsContext> tls;
};

}  // namespace retrysafe::redis
