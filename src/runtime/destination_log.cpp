#include "runtime/destination_log.hpp"

#include <cstdio>
#include <map>
#include <string>

#include "pg/guard.hpp"
#include "pg/text.hpp"
#include "runtime/lane.hpp"
#include "runtime/worker_slot.hpp"

#include "pg/server.hpp"

namespace retrysafe::runtime {

namespace {

// A destination that comes and goes, or of which only some shards get through, says so at most this often.
constexpr Milliseconds kQuietFor = 60'000;

struct Seen {
  bool unreachable = false;
  bool logged = false;
  Milliseconds since = 0;
  Milliseconds last_line = -kQuietFor;
};

// Lives as long as the process: no destructor runs.
std::map<int32, Seen> &seen() {
  static auto *const map = new std::map<int32, Seen>;
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
    Seen &s = seen()[destination];
    if (s.unreachable) return;
    const Milliseconds now = now_ms();
    s.unreachable = true;
    s.since = now;
    s.logged = now - s.last_line >= kQuietFor;
    if (!s.logged) return;
    s.last_line = now;
    log_line("destination \"%s\" is unreachable: %s", name, reason ? reason : "no reason given");
  } catch (...) {
  }
}

void note_reachable(int32 destination, const char *name) noexcept {
  try {
    const auto found = seen().find(destination);
    if (found == seen().end() || !found->second.unreachable) return;
    Seen &s = found->second;
    s.unreachable = false;
    if (s.logged)
      log_line("destination \"%s\" is back after %lld s", name,
               static_cast<long long>((now_ms() - s.since) / 1000));
  } catch (...) {
  }
}

}  // namespace retrysafe::runtime
