// Messages that were published and not confirmed yet, by the numbers that the broker confirms them with: 1,
// 2, 3 … since the channel was opened.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <string>
#include <string_view>
#include <utility>

#include "sink/abi.h"

namespace retrysafe::rabbitmq {

using Clock = std::chrono::steady_clock;

class Unconfirmed {
 public:
  struct Message {
    retrysafe_event event;
    Clock::time_point since;
    bool open = true;
    std::string returned;  // why no queue took it; it is confirmed nevertheless, later
  };

  // Messages that an outcome is awaited of.
  size_t size() const { return open_; }
  bool empty() const { return open_ == 0; }
  Clock::time_point oldest() const { return messages_.front().since; }  // unless empty()

  void add(const retrysafe_event &event, Clock::time_point now) {
    messages_.push_back({.event = event, .since = now, .returned = {}});
    ++open_;
  }

  // The broker has dealt with a message, or with all up to it (number 0: with all). `settled(message)` is
  // called for each.
  template <class Settled>
  void confirmed(uint64_t number, bool multiple, Settled &&settled) {
    const uint64_t last = number == 0 && multiple ? first_ + messages_.size() - 1 : number;
    if (last < first_ || last >= first_ + messages_.size()) return;
    for (uint64_t i = multiple ? 0 : last - first_; i <= last - first_; ++i) {
      Message &message = messages_[i];
      if (!message.open) continue;
      message.open = false;
      --open_;
      settled(message);
    }
    drop_settled();
  }

  // The broker gave a message back. False: it is not one of ours.
  bool give_back(std::string_view message_id, std::string_view reason) {
    for (Message &message : messages_) {
      if (!message.open || !message.returned.empty()) continue;
      if (std::string_view(message.event.id.data, message.event.id.size) != message_id) continue;
      message.returned = reason;
      return true;
    }
    return false;
  }

  // Hands all over, in the order in which they were published. What the broker still says of them is passed
  // over.
  template <class Taken>
  void abandon(Taken &&taken) {
    for (Message &message : messages_)
      if (std::exchange(message.open, false)) taken(message.event);
    open_ = 0;
    drop_settled();
  }

  // A new channel, which counts anew.
  void restart() {
    messages_.clear();
    open_ = 0;
    first_ = 1;
  }

 private:
  void drop_settled() {
    for (; !messages_.empty() && !messages_.front().open; ++first_) messages_.pop_front();
  }

  std::deque<Message> messages_;
  uint64_t first_ = 1;  // number of the first one
  size_t open_ = 0;
};

}  // namespace retrysafe::rabbitmq
