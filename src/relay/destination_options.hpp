// The options that a sink is opened with: those of the database and those of the configuration file, which go
// first. Secrets are read here, on the machine of the relay.
#pragma once

#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "core/option_list.hpp"
#include "relay/configuration.hpp"

namespace retrysafe::relay {

using Options = std::vector<std::pair<std::string, std::string>>;  // as a sink gets them

// What the file says, checked against the options of the kind. `complete`: nothing comes from the database,
// so what is required must be there and defaults are filled in. Throws ConfigurationError.
Options options_of_section(const DestinationSection &section, OptionList list, bool complete,
                           const Configuration &configuration);

// One option of the database; `source` as outbox_relay_options tells it. Files must be below the secret
// directory.
std::string option_of_database(const std::string &name, const std::string &value, std::string_view source,
                               bool is_secret, const Configuration &configuration);

// Those of `over` replace and complete those of `under`.
void merge(Options over, Options *under);

}  // namespace retrysafe::relay
