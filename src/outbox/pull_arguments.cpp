#include "outbox/pull_arguments.hpp"

#include <cstring>

#include "outbox/shard.hpp"
#include "pg/error.hpp"
#include "pg/interval.hpp"
#include "pg/text.hpp"

#include "pg/server.hpp"

namespace retrysafe::outbox {

namespace {

constexpr int kMaxReason = 1000;

}  // namespace

void check_transaction(const char *function) {
  PreventCommandIfReadOnly(function);
  PreventCommandIfParallelMode(function);
  pg::require_read_committed(function);
}

int64 lease_argument(FunctionCallInfo fcinfo, int number) {
  const int64 lease = PG_ARGISNULL(number) ? 0 : pg::interval_us(*PG_GETARG_INTERVAL_P(number));
  if (lease < kShortestLeaseUs || lease > kLongestLeaseUs)
    pg::raise(kInvalidParameter, "It must be between 100 milliseconds and one day.", "invalid lease");
  return lease;
}

char *clipped(char *reason) {
  reason[pg_mbcliplen(reason, static_cast<int>(strlen(reason)), kMaxReason)] = '\0';
  return reason;
}

int64 retry_after_argument(FunctionCallInfo fcinfo, int number) {
  if (PG_ARGISNULL(number)) return -1;
  const int64 retry_after = pg::interval_us(*PG_GETARG_INTERVAL_P(number));
  if (retry_after < 0 || retry_after > kLongestRetryAfterUs)
    pg::raise(kInvalidParameter, "It must be between zero and 366 days.", "invalid retry_after");
  return retry_after;
}

BatchHandle handle_argument(FunctionCallInfo fcinfo, int number) {
  BatchHandle handle{};
  if (PG_ARGISNULL(number) || !parse_handle(pg::bytes_of(PG_GETARG_TEXT_PP(number)), &handle))
    pg::raise(kInvalidBatch, "Pass the value of column \"batch\" as outbox_fetch returned it.",
              "invalid batch");
  return handle;
}

}  // namespace retrysafe::outbox
