// The destination kind "rabbitmq": publishes each event to an exchange, and counts it as delivered when the
// broker has confirmed it. README.md tells how answers are judged.
#pragma once

#include <deque>
#include <span>
#include <string>

#include "core/outage_detector.hpp"
#include "sinks/rabbitmq/message.hpp"
#include "sinks/rabbitmq/session.hpp"
#include "sinks/rabbitmq/unconfirmed.hpp"

namespace retrysafe::rabbitmq {

class RabbitmqSink final : Session::Listener {
 public:
  explicit RabbitmqSink(const sink::Options &options);

  int wait_fd() const { return session_.wait_fd(); }
  bool submit(const retrysafe_event &event);
  void flush() { advance(); }
  size_t collect(std::span<retrysafe_outcome> outcomes, int *timeout_ms);

 private:
  void advance();
  void publish();
  void lost();
  void give_up(std::string_view reason);
  int timeout_ms() const;

  void on_confirm(uint64_t number, bool multiple, bool taken) override;
  void on_return(std::string_view message_id, std::string_view reason) override;
  void on_blocked(std::string_view reason) override;
  void on_unblocked() override { blocked_.clear(); }
  void on_channel_closed(const Closure &closure) override;

  bool concerns_a_message(const Closure &closure) const;
  void find_culprit(const Closure &closure);
  void take_back();
  void unreachable(std::string_view reason);
  void settle(const retrysafe_event &event, retrysafe_status status, std::string_view reason = {});

  MessageWriter writer_;
  const size_t max_in_flight_;
  const std::chrono::milliseconds timeout_;
  Session session_;

  std::deque<retrysafe_event> waiting_;  // not published, or to be published anew
  Unconfirmed unconfirmed_;
  // So many at the front of waiting_ go one at a time: one of them made the broker close the channel.
  size_t suspects_ = 0;
  std::string blocked_;  // why the broker takes nothing; empty: it does
  // A connection that lay idle may have died unnoticed: that is no failure of the destination, one is made
  // anew.
  bool was_idle_ = false;
  bool working_ = false;  // in advance(), or thrown out of it
  OutageDetector outage_detector_;
  std::deque<retrysafe_outcome> outcomes_;
};

}  // namespace retrysafe::rabbitmq
