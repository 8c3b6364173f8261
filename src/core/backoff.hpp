// How long to wait after a failure.
#pragma once

#include <cstdint>

namespace retrysafe {

// base * 2^(failures - 1), at most `cap`, then shortened by up to a quarter: `random` spreads those that
// failed together. Microseconds; failures counts from 1.
std::int64_t backoff(std::int64_t base_us, std::int64_t cap_us, int failures, std::uint32_t random);

}  // namespace retrysafe
