// Headers of an event from the JSON text that the server hands out: an object of strings.
#pragma once

#include <deque>
#include <string>
#include <string_view>
#include <vector>

#include "sink/abi.h"

namespace retrysafe {

// Appends a pair for each member to `pairs`. They view `json`, or strings appended to `unescaped` where
// something was escaped; both must stay. False: it is not such an object.
bool read_headers(std::string_view json, std::vector<retrysafe_pair> *pairs,
                  std::deque<std::string> *unescaped);

}  // namespace retrysafe
