// Random numbers that need not be secret.
#pragma once

#include "pg/server.hpp"

namespace retrysafe::pg {

inline uint32 random_uint32() {
  uint32 number = 0;
  (void)pg_strong_random(&number, sizeof number);
  return number;
}

}  // namespace retrysafe::pg
