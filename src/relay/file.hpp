// Files that the operator names.
#pragma once

#include <optional>
#include <string>

namespace retrysafe::relay {

// Nothing: errno tells why.
std::optional<std::string> read_whole_file(const char *path);

}  // namespace retrysafe::relay
