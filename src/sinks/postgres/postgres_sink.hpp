// The destination kind "postgres": another database remembers each event's id in its inbox, and calls a
// function with those that are new there. Effectively once: a batch that is sent again finds the ids that
// were committed.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>

#include "sinks/postgres/event_queue.hpp"
#include "sinks/postgres/session.hpp"

namespace retrysafe::sink {

class PostgresSink {
 public:
  explicit PostgresSink(const Options &options);

  int wait_fd() const { return session_.wait_fd(); }
  bool submit(const retrysafe_event &event) { return queue_.add(event); }
  void flush() { advance(); }
  size_t collect(std::span<retrysafe_outcome> outcomes, int *timeout_ms);

 private:
  enum class Phase { kIdle, kDelivering, kRollingBack };

  struct Error {
    size_t statement;  // 0 is BEGIN, then one for each event, then COMMIT
    std::string sqlstate;
    std::string message;
  };

  void advance();
  void begin();
  void start_phase(Phase phase);
  bool send(const retrysafe_event &event);
  void send_rollback();
  void receive();
  void take(const PGresult *result);
  void finish_delivery();
  void finish_phase();
  void lost(const std::string &reason);
  void patience();

  std::string consumer_;
  Session session_;
  EventQueue queue_;
  Phase phase_ = Phase::kIdle;
  // A connection that lay idle may have died unnoticed: that is no failure of the destination, one is made
  // anew.
  bool was_idle_ = false;
  size_t sent_ = 0;      // events of the transaction
  size_t answered_ = 0;  // statements of it
  bool heard_ = false;   // any of them was carried out
  std::optional<Error> error_;
  // The event failed over something that may be the destination's fault. A new session tells: if what it
  // needs is there, it was the event's.
  std::optional<Error> suspicion_;
  Clock::time_point deadline_{};
};

}  // namespace retrysafe::sink
