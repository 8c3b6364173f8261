// What the functions of the pull API ask of their callers alike.
#pragma once

#include "core/batch_handle.hpp"

#include "pg/server.hpp"

namespace retrysafe::outbox {

inline constexpr int64 kLongestRetryAfterUs = 366 * USECS_PER_DAY;

// That it may write, and is READ COMMITTED.
void check_transaction(const char *function);

// Microseconds.
int64 lease_argument(FunctionCallInfo fcinfo, int number);

// Microseconds; -1: none was given.
int64 retry_after_argument(FunctionCallInfo fcinfo, int number);

BatchHandle handle_argument(FunctionCallInfo fcinfo, int number);

// The reason of a failure, cut in place to what is kept of it.
char *clipped(char *reason);

}  // namespace retrysafe::outbox
