// Named places that fail on command, in test builds (make FAULT_POINTS=1): so that a test can show that it
// would notice the fault. In other builds they are nothing. retrysafe.fault_points is a comma-separated list:
//   NAME          if (RETRYSAFE_FAULT("reader.no_late_range")) … is true
//   NAME=ACTION   RETRYSAFE_FAULT_POINT("worker.after_ack"); acts: error, exit, kill (SIGKILL of this
//   process), or
//                 wait (until the setting changes). Jumpable.
#pragma once

#ifdef RETRYSAFE_FAULT_POINTS

#include <string_view>

#include "settings.hpp"

namespace retrysafe::pg {

// The action given for `name`; empty without one. False: the list does not have the name.
inline bool find_fault_point(std::string_view name, std::string_view *action) {
  std::string_view rest = settings::fault_points ? settings::fault_points : "";
  while (!rest.empty()) {
    const auto comma = rest.find(',');
    const std::string_view entry = rest.substr(0, comma);
    const auto equals = entry.find('=');
    if (entry.substr(0, equals) == name) {
      *action = equals == std::string_view::npos ? std::string_view{} : entry.substr(equals + 1);
      return true;
    }
    if (comma == std::string_view::npos) break;
    rest.remove_prefix(comma + 1);
    if (rest.starts_with(' ')) rest.remove_prefix(1);
  }
  return false;
}

inline bool fault_point_is_set(std::string_view name) {
  std::string_view action;
  return find_fault_point(name, &action);
}

void act_at_fault_point(const char *name);

}  // namespace retrysafe::pg

#define RETRYSAFE_FAULT(name) retrysafe::pg::fault_point_is_set(name)
#define RETRYSAFE_FAULT_POINT(name) retrysafe::pg::act_at_fault_point(name)
#else
#define RETRYSAFE_FAULT(name) false
#define RETRYSAFE_FAULT_POINT(name) static_cast<void>(0)
#endif
