// Named places that fail on command, in test builds (make FAULT_POINTS=1): so that a test can show that it
// would notice the fault. In other builds every one of them is the constant false.
//   if (RETRYSAFE_FAULT("reader.no_late_range")) …
#pragma once

#ifdef RETRYSAFE_FAULT_POINTS

#include <string_view>

#include "settings.hpp"

namespace retrysafe::pg {

// Is `name` in the comma-separated list retrysafe.fault_points?
inline bool fault_point_is_set(std::string_view name) {
  std::string_view rest = settings::fault_points ? settings::fault_points : "";
  while (!rest.empty()) {
    const auto comma = rest.find(',');
    if (rest.substr(0, comma) == name) return true;
    if (comma == std::string_view::npos) break;
    rest.remove_prefix(comma + 1);
  }
  return false;
}

}  // namespace retrysafe::pg

#define RETRYSAFE_FAULT(name) retrysafe::pg::fault_point_is_set(name)
#else
#define RETRYSAFE_FAULT(name) false
#endif
