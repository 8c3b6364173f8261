// The test sink: delivers to nowhere, or to a file, and misbehaves on command. In test builds only; a test
// registers the kind with outbox_register_kind('null', 'retrysafe_null', …).
//
// Options:
//   file        each attempt appends a line: time, id, event key, attempt, outcome
//   delay_ms    how long an attempt takes
//   parallel    attempts at a time, default 16
//   control     a file with one word, read anew before each attempt: what becomes of it. ok (also when there
//   is no
//               such file), retry, final, unreachable, hang (no outcome until the word changes),
//   forget (the same, and it does not ask to be called again)
//   refuse      event keys that begin with this are refused for good
//   breaks      event keys that begin with this find the destination away
#include <sys/timerfd.h>
#include <unistd.h>

#include <chrono>
#include <cstdio>
#include <fstream>
#include <queue>

#include "sink/kit.hpp"

namespace {

using Clock = std::chrono::steady_clock;
using std::chrono::milliseconds;

class NullSink {
 public:
  explicit NullSink(const retrysafe::sink::Options &options)
      : file_(options.text("file")),
        control_(options.text("control")),
        refuse_(options.text("refuse")),
        breaks_(options.text("breaks")),
        delay_(options.number("delay_ms", 0)),
        parallel_(static_cast<size_t>(options.number("parallel", 16))),
        timer_(timerfd_create(CLOCK_MONOTONIC, TFD_NONBLOCK | TFD_CLOEXEC)) {
    if (timer_ < 0) throw std::runtime_error("no timer");
    if (options.has("broken")) throw std::invalid_argument(std::string(options.text("broken")));
  }
  ~NullSink() { close(timer_); }
  NullSink(const NullSink &) = delete;
  NullSink &operator=(const NullSink &) = delete;

  int wait_fd() const { return timer_; }

  bool submit(const retrysafe_event &event) {
    if (attempts_.size() >= parallel_) return false;
    attempts_.push({&event, delay_ == delay_.zero() ? Clock::time_point{} : Clock::now() + delay_});
    return true;
  }

  void flush() {}

  size_t collect(std::span<retrysafe_outcome> outcomes, int *timeout_ms) {
    uint64_t expirations;
    (void)!read(timer_, &expirations, sizeof expirations);
    *timeout_ms = -1;
    size_t count = 0;
    const auto now = Clock::now();
    while (!attempts_.empty() && attempts_.front().until <= now && count < outcomes.size()) {
      const std::string word = command();
      if (word == "hang") {
        *timeout_ms = 20;
        break;
      }
      if (word == "forget") return count;
      retrysafe_status status = RETRYSAFE_DELIVERED;
      if (word == "retry") status = RETRYSAFE_FAILED_RETRY;
      if (word == "final") status = RETRYSAFE_FAILED_FINAL;
      if (word == "unreachable") status = RETRYSAFE_UNREACHABLE;
      const retrysafe_event &event = *attempts_.front().event;
      const std::string_view key = retrysafe::sink::view(event.event_key);
      if (!refuse_.empty() && key.starts_with(refuse_)) status = RETRYSAFE_FAILED_FINAL;
      if (!breaks_.empty() && key.starts_with(breaks_)) status = RETRYSAFE_UNREACHABLE;
      note(event, status);
      retrysafe::sink::report(&outcomes[count++], event.tag, status,
                              status == RETRYSAFE_DELIVERED ? "" : "told to fail");
      attempts_.pop();
    }
    if (count < outcomes.size()) arm();  // else the caller asks again at once
    return count;
  }

 private:
  struct Attempt {
    const retrysafe_event *event;
    Clock::time_point until;
  };

  std::string command() const {
    std::string word;
    if (!control_.empty()) std::ifstream(control_) >> word;
    return word;
  }

  void note(const retrysafe_event &event, retrysafe_status status) const {
    if (file_.empty()) return;
    std::FILE *file = std::fopen(file_.c_str(), "a");
    if (!file) return;
    const auto now =
        std::chrono::duration_cast<milliseconds>(std::chrono::system_clock::now().time_since_epoch());
    std::fprintf(file, "%lld %.*s %.*s %d %d %d\n", static_cast<long long>(now.count()),
                 static_cast<int>(event.id.size), event.id.data, static_cast<int>(event.event_key.size),
                 event.event_key.data, event.attempt, static_cast<int>(status), static_cast<int>(getpid()));
    std::fclose(file);
  }

  void arm() {
    if (attempts_.empty()) return;  // a timer that still runs wakes for nothing, once
    const auto left = std::max(std::chrono::nanoseconds(1),
                               std::chrono::nanoseconds(attempts_.front().until - Clock::now()));
    itimerspec when{};
    when.it_value.tv_sec = left.count() / 1'000'000'000;
    when.it_value.tv_nsec = left.count() % 1'000'000'000;
    timerfd_settime(timer_, 0, &when, nullptr);
  }

  std::string file_, control_, refuse_, breaks_;
  milliseconds delay_;
  size_t parallel_;
  int timer_;
  std::queue<Attempt> attempts_;  // each takes as long, so they end in the order in which they began
};

}  // namespace

RETRYSAFE_SINK(NullSink, "null", 0)
