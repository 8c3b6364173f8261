#include "core/backoff.hpp"

#include <algorithm>

namespace retrysafe {

std::int64_t backoff(std::int64_t base_us, std::int64_t cap_us, int failures, std::uint32_t random) {
  std::int64_t delay = std::min(base_us, cap_us);
  for (int i = 1; i < failures && delay < cap_us; ++i) delay = delay > cap_us / 2 ? cap_us : delay * 2;
  const std::int64_t quarter = delay / 4;
  return quarter == 0 ? delay
                      : delay - static_cast<std::int64_t>(random % static_cast<std::uint64_t>(quarter + 1));
}

}  // namespace retrysafe
