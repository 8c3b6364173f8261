// What a relay is told: by its command line and by a configuration file.
#pragma once

#include <cstdint>
#include <stdexcept>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "relay/log.hpp"

namespace retrysafe::relay {

struct ConfigurationError : std::runtime_error {
  using std::runtime_error::runtime_error;
};

struct DestinationSection {
  std::string name;
  std::string kind;                                          // empty: as the database says
  std::string library;                                       // empty: as the kind says
  int connections = 0;                                       // 0: as for all
  std::vector<std::pair<std::string, std::string>> options;  // as written
};

enum class Mode { kService, kOnce, kDrain, kCheck };

struct Configuration {
  std::string connection;  // as libpq takes it
  std::vector<DestinationSection> destinations;
  Mode mode = Mode::kService;
  int connections = 1;  // for each destination
  std::string allowed_addresses;
  std::string secret_directory;
  std::string configuration_directory;  // paths in the file are relative to it
  std::string library_path;
  LogFormat log_format = LogFormat::kText;
  Level log_level = Level::kInfo;
  std::int64_t statistics_interval_ms = 60'000;
  std::int64_t stop_timeout_ms = 5000;
};

// Takes over what the text of a file says. Throws ConfigurationError with the number of the line.
void read_configuration(std::string_view text, Configuration *configuration);

// One setting, whose name is written with underscores. False: there is no such setting.
bool set(std::string_view name, std::string_view value, Configuration *configuration);

// The section of that name, made when it is not there.
DestinationSection &section(std::string_view name, Configuration *configuration);

}  // namespace retrysafe::relay
