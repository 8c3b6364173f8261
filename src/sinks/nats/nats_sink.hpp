// The destination kind "nats": each event becomes a message that a stream of JetStream has to store.
//
// A message carries a reply subject of its own, on which the acknowledgement comes back, so that any number
// of them can be under way. Which of them were stored is known exactly; when a connection breaks, the others
// are reported once, as not known to be delivered, and the stream drops those that it has by their ids.
#pragma once

#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "sink/kit.hpp"
#include "sinks/nats/session.hpp"
#include "sinks/nats/target.hpp"
#include "sinks/resolver.hpp"

namespace retrysafe::nats {

class NatsSink {
 public:
  explicit NatsSink(const sink::Options &options);
  ~NatsSink();
  NatsSink(const NatsSink &) = delete;
  NatsSink &operator=(const NatsSink &) = delete;

  int wait_fd() const { return epoll_; }
  bool submit(const retrysafe_event &event);
  void flush() { advance(); }
  size_t collect(std::span<retrysafe_outcome> outcomes, int *timeout_ms);

 private:
  struct Message {
    retrysafe_event event;
    std::string subject;
    Clock::time_point deadline{};
    // Set when the far side would not take it; whether that is its own fault shows in what happens to others.
    std::string refusal{};
  };

  void advance();
  void resolve();
  void connect();
  void send();
  void publish(uint64_t number, const Message &message);
  void take(const Answer &answer);
  void not_permitted(const std::string &text);
  void refuse_forbidden();
  void refuse(uint64_t number, const std::string &reason);
  void judge_refusals();
  void judge_late();
  void settle(uint64_t number, retrysafe_status status, std::string_view reason);
  void lose(const std::string &reason);
  void unreachable(const std::string &reason);
  Clock::time_point deadline() const;

  const std::shared_ptr<const Target> target_;
  const std::shared_ptr<const Bell> bell_;
  int epoll_;
  sink::Resolver resolver_;
  bool resolving_ = false;
  Clock::time_point resolve_deadline_{};
  std::unique_ptr<Session> session_;
  bool connected_ = false;                        // it was seen ready
  std::deque<Message> waiting_;                   // for a connection
  std::map<uint64_t, Message> in_flight_;         // by number
  std::map<std::string, std::string> forbidden_;  // subjects, and what the server says of them
  uint64_t last_number_ = 0;
  uint64_t last_stored_ = 0;  // the highest number of a message that this session has stored
  std::deque<retrysafe_outcome> outcomes_;
  std::string body_;  // scratch
};

}  // namespace retrysafe::nats
