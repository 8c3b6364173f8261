// Every setting of retrysafe, in alphabetical order. docs/reference.md explains them to users.
#pragma once

#include <cstdint>

namespace retrysafe::settings {

enum class OnLostClaim : int { kWarning, kError };
enum class OnTimelineChange : int { kPublish, kSuspend };
enum class PublishAfter : int { kLocalFlush, kSynchronousStandby };

extern char *allowed_addresses;         // superuser: CIDR ranges and host names beyond public addresses
extern char *allowed_secret_directory;  // superuser: directory under which file: secrets may live
extern int idem_retention;              // seconds a record lives when no ttl is given
extern int idem_rotation_age;           // seconds; 0: as long as idem_retention
extern int idem_rotation_size;          // megabytes
extern int inbox_retention;             // seconds an inbox message is remembered
extern int max_payload_bytes;
extern int max_response_bytes;
extern int max_retained_bytes;    // megabytes of the log, 0: no limit
extern int on_lost_claim;         // OnLostClaim
extern int on_timeline_change;    // OnTimelineChange
extern int outbox_retention;      // seconds a published event stays
extern int outbox_rotation_age;   // seconds; 0: as long as outbox_retention
extern int outbox_rotation_size;  // megabytes
extern int poll_interval;         // milliseconds
extern bool publish;
extern int publish_after;  // PublishAfter
extern char *traceparent;
extern int worker_shutdown_timeout;  // milliseconds
extern int workers_per_database;
#ifdef RETRYSAFE_FAULT_POINTS
extern char *fault_points;
#endif

// What the settings of a ring mean.
constexpr std::int64_t rotation_age_us(int age, int retention) {
  return std::int64_t{age > 0 ? age : retention} * 1'000'000;
}
constexpr std::int64_t rotation_bytes(int megabytes) {
  return std::int64_t{megabytes} << 20;
}

void define();

}  // namespace retrysafe::settings
