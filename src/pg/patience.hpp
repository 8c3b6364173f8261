// How long a statement works at what it may as well leave to the next one.
#pragma once

#include <algorithm>

#include "pg/server.hpp"

namespace retrysafe::pg {

// So long at most; and less under a statement_timeout, which would take back what was done, each time anew.
inline TimestampTz may_work_until(int64 most_us) {
  const TimestampTz until = GetCurrentTimestamp() + most_us;
  if (StatementTimeout <= 0) return until;
  const int64 half_us = int64{StatementTimeout} * 1000 / 2;
  return std::min(until, GetCurrentStatementStartTimestamp() + half_us);
}

}  // namespace retrysafe::pg
