// One destination of kind kafka, as its options describe it.
#pragma once

#include <chrono>
#include <cstddef>
#include <string>
#include <utility>
#include <vector>

#include "core/address_filter.hpp"
#include "core/route_template.hpp"
#include "sink/kit.hpp"

namespace retrysafe::kafka {

struct Settings {
  // Throws std::invalid_argument: what is wrong with the options.
  explicit Settings(const sink::Options &options);

  RouteTemplate topic;
  std::string source;  // empty: the event's own
  bool structured;
  bool tls;
  size_t max_in_flight;
  size_t max_message_bytes;
  std::chrono::milliseconds connect_timeout;
  std::chrono::milliseconds timeout;
  AddressFilter addresses;
  std::vector<std::pair<std::string, std::string>> properties;  // of the library, by its own names
};

}  // namespace retrysafe::kafka
