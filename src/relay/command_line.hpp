// The command line of retrysafe-relay.
#pragma once

#include <optional>

#include "relay/configuration.hpp"

namespace retrysafe::relay {

// Reads the configuration file too. Nothing: it was all about --help or --version. Throws ConfigurationError.
std::optional<Configuration> read_command_line(int count, char **arguments);

}  // namespace retrysafe::relay
