// Adds events to Redis streams. README.md tells how replies are judged.
#pragma once

#include <cstdint>
#include <deque>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "core/outage_detector.hpp"
#include "sinks/redis/session.hpp"
#include "sinks/redis/target.hpp"

namespace retrysafe::redis {

class RedisSink {
 public:
  explicit RedisSink(const sink::Options &options);

  int wait_fd() const { return session_.wait_fd(); }
  bool submit(const retrysafe_event &event);
  void flush() {}  // collect follows, and sends
  size_t collect(std::span<retrysafe_outcome> outcomes, int *timeout_ms);

 private:
  struct Pending {
    const retrysafe_event *event;
    std::string stream;
  };
  // XADDs with a WAIT behind them.
  struct Burst {
    size_t unanswered;
    std::vector<uint64_t> stored;  // tags of those that the server has
  };

  void advance();
  bool may_send() const;
  void send();
  void receive();
  void take(const Reply &reply);
  void take_error(const Pending &pending, std::string_view error);
  void take_wait(const Reply &reply);
  void lost(const std::string &reason);
  void begin_again();
  bool under_way() const { return sent_ > 0 || !bursts_.empty(); }
  void settle(uint64_t tag, retrysafe_status status, std::string_view reason = {});
  void be_patient();

  const Target target_;
  Session session_;
  bool opening_ = false;
  std::deque<Pending> events_;  // without an answer: the first sent_ are sent, in this order
  size_t sent_ = 0;
  std::deque<Burst> bursts_;  // only where replicas are waited for
  size_t stored_ = 0;         // events in them
  bool renew_ = false;        // this connection is to be given up once nothing is under way
  Clock::time_point deadline_{};
  uint64_t bytes_sent_ = 0;  // when it was last looked at
  OutageDetector outage_detector_;
  std::deque<retrysafe_outcome> outcomes_;
};

}  // namespace retrysafe::redis
