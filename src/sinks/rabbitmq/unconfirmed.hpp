// Messages that were published and not confirmed yet, by the numbers that the broker confirms them with: 1,
// 2, 3 … since the channel was opened.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <map>
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
    numbers_.emplace(id(event), first_ + messages_.size());
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
      forget(id(message.event), first_ + i);
      settled(message);
    }
    drop_settled();
  }

  // The broker gave a message back. False: it is not one of ours.
  bool give_back(std::string_view message_id, std::string_view reason) {
    const auto found = numbers_.find(message_id);
    if (found == numbers_.end()) return false;
    messages_[found->second - first_].returned = reason;
    numbers_.erase(found);
    return true;
  }

  // Hands all over, in the order in which they were published. What the broker still says of them is passed
  // over.
  template <class Taken>
  void abandon(Taken &&taken) {
    for (Message &message : messages_)
      if (std::exchange(message.open, false)) taken(message.event);
    numbers_.clear();
    open_ = 0;
    drop_settled();
  }

  // A new channel, which counts anew.
  void restart() {
    messages_.clear();
    numbers_.clear();
    open_ = 0;
    first_ = 1;
  }

 private:
  static std::string_view id(const retrysafe_event &event) { return {event.id.data, event.id.size}; }

  void forget(std::string_view message_id, uint64_t number) {
    const auto [begin, end] = numbers_.equal_range(message_id);
    for (auto it = begin; it != end; ++it)
      if (it->second == number) return static_cast<void>(numbers_.erase(it));
  }

  void drop_settled() {
    for (; !messages_.empty() && !messages_.front().open; ++first_) messages_.pop_front();
  }

  std::deque<Message> messages_;
  // Of those that are open and were not given back, by their ids: a broker may give back what it likes.
  std::multimap<std::string_view, uint64_t> numbers_;
  uint64_t first_ = 1;  // number of the first one
  size_t open_ = 0;
};

}  // namespace retrysafe::rabbitmq
