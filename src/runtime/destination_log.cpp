#include "runtime/destination_log.hpp"

#include <cstdio>
#include <map>
#include <string>

#include "core/reachability.hpp"
#include "pg/guard.hpp"
#include "pg/text.hpp"
#include "runtime/lane.hpp"
#include "runtime/worker_slot.hpp"

#include "pg/server.hpp"

namespace retrysafe::runtime {

namespace {

// Lives as long as the process: no destructor runs.
std::map<int32, Reachability> &seen() {
  static auto *const map = new std::map<int32, Reachability>;
  return *map;
}

}  // namespace

void log_line(const char *format, ...) noexcept {
  char text[1024];
  va_list args;
  va_start(args, format);
  (void)vsnprintf(text, sizeof text, format, args);
  va_end(args);
  char line[sizeof text];
  pg::copy_message(line, text);
  try {
    pg::call([&] { pg::log("retrysafe: %s", line); });
  } catch (...) {
    // A line is lost, nothing else.
  }
}

void note_unreachable(int32 destination, const char *name, const char *reason) noexcept {
  try {
    show_error(std::string(name).append(": ").append(reason ? reason : "unreachable").c_str());
    if (!seen()[destination].lost(now_ms())) return;
    log_line("destination \"%s\" is unreachable: %s", name, reason ? reason : "no reason given");
  } catch (...) {
  }
}

void note_reachable(int32 destination, const char *name) noexcept {
  try {
    const auto found = seen().find(destination);
    if (found == seen().end()) return;
    if (const auto away_for = found->second.back(now_ms()))
      log_line("destination \"%s\" is back after %lld s", name, static_cast<long long>(*away_for / 1000));
  } catch (...) {
  }
}

}  // namespace retrysafe::runtime
