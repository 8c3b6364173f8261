#include "settings.hpp"

#include <climits>

#include "pg/server.hpp"

namespace retrysafe::settings {

char *allowed_addresses;
char *allowed_secret_directory;
int idem_retention;
int idem_rotation_age;
int idem_rotation_size;
int inbox_retention;
int max_payload_bytes;
int max_response_bytes;
int max_retained_bytes;
int on_lost_claim;
int on_timeline_change;
int outbox_retention;
int outbox_rotation_age;
int outbox_rotation_size;
int poll_interval;
bool publish;
int publish_after;
char *traceparent;
int worker_shutdown_timeout;
int workers_per_database;
#ifdef RETRYSAFE_FAULT_POINTS
char *fault_points;
#endif

namespace {

const config_enum_entry lost_claim_options[] = {{"warning", static_cast<int>(OnLostClaim::kWarning), false},
                                                {"error", static_cast<int>(OnLostClaim::kError), false},
                                                {nullptr, 0, false}};

const config_enum_entry timeline_options[] = {
    {"publish", static_cast<int>(OnTimelineChange::kPublish), false},
    {"suspend", static_cast<int>(OnTimelineChange::kSuspend), false},
    {nullptr, 0, false}};

const config_enum_entry publish_after_options[] = {
    {"local_flush", static_cast<int>(PublishAfter::kLocalFlush), false},
    {"synchronous_standby", static_cast<int>(PublishAfter::kSynchronousStandby), false},
    {nullptr, 0, false}};

// W3C trace context: version-traceid-parentid-flags, all lower-case hexadecimal.
bool check_traceparent(char **value, void **, GucSource) {
  const char *s = *value;
  if (*s == '\0') return true;
  if (strlen(s) == 55) {
    bool good = true;
    for (int i = 0; i < 55 && good; ++i)
      good = (i == 2 || i == 35 || i == 52) ? s[i] == '-' : strchr("0123456789abcdef", s[i]) != nullptr;
    if (good) return true;
  }
  GUC_check_errdetail("A traceparent looks like 00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01.");
  return false;
}

}  // namespace

void define() {
  DefineCustomStringVariable(
      "retrysafe.allowed_addresses", "Addresses that destinations may connect to besides public ones.",
      "Comma-separated CIDR ranges and host names. Loopback, link-local and private ranges are "
      "refused unless listed.",
      &allowed_addresses, "", PGC_SUSET, GUC_SUPERUSER_ONLY, nullptr, nullptr, nullptr);
  DefineCustomStringVariable(
      "retrysafe.allowed_secret_directory",
      "Directory under which an option of a destination may name a file that holds a secret.",
      "Empty: no option may name a file.", &allowed_secret_directory, "", PGC_SUSET, GUC_SUPERUSER_ONLY,
      nullptr, nullptr, nullptr);
#ifdef RETRYSAFE_FAULT_POINTS
  DefineCustomStringVariable("retrysafe.fault_points", "Test builds: places that fail on command.",
                             "Comma-separated NAME=ACTION; actions: error, exit, kill, wait.", &fault_points,
                             "", PGC_SUSET, GUC_SUPERUSER_ONLY, nullptr, nullptr, nullptr);
#endif
  DefineCustomIntVariable("retrysafe.idem_retention",
                          "How long the record of a key lives when no ttl is given.",
                          "Counts from completion.", &idem_retention, 7 * 24 * 3600, 1, INT_MAX, PGC_SUSET,
                          GUC_UNIT_S, nullptr, nullptr, nullptr);
  DefineCustomIntVariable(
      "retrysafe.idem_rotation_age", "How long one piece of the ring of records takes new ones.",
      "0 means as long as retrysafe.idem_retention. A piece is emptied when all in it has expired.",
      &idem_rotation_age, 0, 0, INT_MAX, PGC_SIGHUP, GUC_UNIT_S, nullptr, nullptr, nullptr);
  DefineCustomIntVariable(
      "retrysafe.idem_rotation_size",
      "At which size a piece of the ring of records takes no more, if another one is free.", nullptr,
      &idem_rotation_size, 4096, 1, INT_MAX, PGC_SIGHUP, GUC_UNIT_MB, nullptr, nullptr, nullptr);
  DefineCustomIntVariable("retrysafe.inbox_retention", "How long inbox_accept remembers an event.", nullptr,
                          &inbox_retention, 30 * 24 * 3600, 1, INT_MAX, PGC_SUSET, GUC_UNIT_S, nullptr,
                          nullptr, nullptr);
  DefineCustomIntVariable("retrysafe.max_payload_bytes", "Largest payload that outbox_emit accepts.",
                          "Measured as the JSON text that consumers get.", &max_payload_bytes, 1024 * 1024, 1,
                          256 * 1024 * 1024, PGC_SUSET, GUC_UNIT_BYTE, nullptr, nullptr, nullptr);
  DefineCustomIntVariable("retrysafe.max_response_bytes", "Largest answer that idem_complete saves.",
                          "Measured as JSON text.", &max_response_bytes, 1024 * 1024, 1, 256 * 1024 * 1024,
                          PGC_SUSET, GUC_UNIT_BYTE, nullptr, nullptr, nullptr);
  DefineCustomIntVariable(
      "retrysafe.max_retained_bytes",
      "How large the log may grow because of a destination that does not take its events.",
      "Beyond it the one that is furthest behind is given up. 0 means no limit.", &max_retained_bytes, 0, 0,
      INT_MAX, PGC_SIGHUP, GUC_UNIT_MB, nullptr, nullptr, nullptr);
  DefineCustomEnumVariable(
      "retrysafe.on_lost_claim",
      "What a commit does that lost a key by ROLLBACK TO SAVEPOINT and did not begin it again.", nullptr,
      &on_lost_claim, static_cast<int>(OnLostClaim::kWarning), lost_claim_options, PGC_USERSET, 0, nullptr,
      nullptr, nullptr);
  DefineCustomEnumVariable("retrysafe.on_timeline_change",
                           "Whether a promoted standby publishes without consent.", nullptr,
                           &on_timeline_change, static_cast<int>(OnTimelineChange::kPublish),
                           timeline_options, PGC_SIGHUP, 0, nullptr, nullptr, nullptr);
  DefineCustomIntVariable("retrysafe.outbox_retention",
                          "How long an event stays after every destination has it.",
                          "Without a destination it counts from the emit.", &outbox_retention, 7 * 24 * 3600,
                          0, INT_MAX, PGC_SIGHUP, GUC_UNIT_S, nullptr, nullptr, nullptr);
  DefineCustomIntVariable(
      "retrysafe.outbox_rotation_age",
      "How long one piece of the rings of events and of progress takes new rows.",
      "0 means as long as retrysafe.outbox_retention. A piece is emptied when nothing in it is "
      "needed any more.",
      &outbox_rotation_age, 0, 0, INT_MAX, PGC_SIGHUP, GUC_UNIT_S, nullptr, nullptr, nullptr);
  DefineCustomIntVariable("retrysafe.outbox_rotation_size",
                          "At which size a piece of these rings takes no more rows, if another one is free.",
                          nullptr, &outbox_rotation_size, 4096, 1, INT_MAX, PGC_SIGHUP, GUC_UNIT_MB, nullptr,
                          nullptr, nullptr);
  DefineCustomIntVariable("retrysafe.poll_interval",
                          "How often an idle worker looks for work that nobody announced.",
                          "A comparison of counters in memory, not a query.", &poll_interval, 1000, 10,
                          3600 * 1000, PGC_SIGHUP, GUC_UNIT_MS, nullptr, nullptr, nullptr);
  DefineCustomBoolVariable("retrysafe.publish", "Whether workers publish at all.",
                           "Turn it off on a copy of a production server before it starts.", &publish, true,
                           PGC_SIGHUP, 0, nullptr, nullptr, nullptr);
  DefineCustomEnumVariable("retrysafe.publish_after", "Where an event has to be safe before it is published.",
                           "On the disk of this server, or also with the standbys that "
                           "synchronous_standby_names asks for.",
                           &publish_after, static_cast<int>(PublishAfter::kLocalFlush), publish_after_options,
                           PGC_SIGHUP, 0, nullptr, nullptr, nullptr);
  DefineCustomStringVariable("retrysafe.traceparent",
                             "W3C trace context that outbox_emit stores with each event.", nullptr,
                             &traceparent, "", PGC_USERSET, 0, check_traceparent, nullptr, nullptr);
  DefineCustomIntVariable("retrysafe.worker_shutdown_timeout",
                          "How long a stopping worker waits for requests that are under way.", nullptr,
                          &worker_shutdown_timeout, 2000, 0, 60 * 1000, PGC_SIGHUP, GUC_UNIT_MS, nullptr,
                          nullptr, nullptr);
  DefineCustomIntVariable("retrysafe.workers_per_database",
                          "Workers that the launcher keeps in each database.", "0 starts none.",
                          &workers_per_database, 1, 0, 64, PGC_SIGHUP, 0, nullptr, nullptr, nullptr);
  pg::reserve_setting_prefix("retrysafe");
}

}  // namespace retrysafe::settings
