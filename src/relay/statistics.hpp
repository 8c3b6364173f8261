// What a relay has done since it started.
#pragma once

#include <cstdint>

namespace retrysafe::relay {

struct Statistics {
  std::int64_t delivered = 0;
  std::int64_t failed = 0;       // to be tried again
  std::int64_t dead = 0;         // failed for good
  std::int64_t unreachable = 0;  // times that a destination as a whole could not be reached
  std::int64_t batches = 0;
  std::int64_t lost = 0;         // batches whose lease ended before they were recorded
  std::int64_t connections = 0;  // that broke
};

}  // namespace retrysafe::relay
