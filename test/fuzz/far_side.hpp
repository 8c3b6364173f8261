// A far side that says what the fuzzer wants, to a sink that talks to it through its client library.
#pragma once

#include <arpa/inet.h>
#include <netinet/in.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <set>
#include <span>

#include "options.hpp"

namespace retrysafe::fuzz {

// Listens on the loopback interface. The input is cut at "<wait>": each piece is sent once the other side has
// said something, or keeps silent for a while. After the last one the connection is closed.
class FarSide {
 public:
  FarSide() : listener_(socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0)) {
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    socklen_t size = sizeof address;
    auto *generic = reinterpret_cast<sockaddr *>(&address);
    require(bind(listener_, generic, size) == 0 && listen(listener_, 16) == 0);
    require(getsockname(listener_, generic, &size) == 0);
    port_ = ntohs(address.sin_port);
  }
  FarSide(const FarSide &) = delete;
  FarSide &operator=(const FarSide &) = delete;

  std::string port() const { return std::to_string(port_); }

  void begin(std::string_view input) {
    hang_up();
    rest_ = input;
    silence_ = 0;
    heard_ = true;  // it need not wait for the first word
  }

  // What can be done at once.
  void step() {
    if (connection_ < 0) connection_ = accept4(listener_, nullptr, nullptr, SOCK_NONBLOCK | SOCK_CLOEXEC);
    if (connection_ < 0) return;
    char heard[16384];
    while (read(connection_, heard, sizeof heard) > 0) heard_ = true;
    if (!heard_ && ++silence_ < kPatience) return;
    heard_ = false;
    silence_ = 0;
    if (rest_.empty()) return hang_up();
    const size_t end = rest_.find(kWait);
    (void)!send(connection_, rest_.data(), std::min(end, rest_.size()), MSG_NOSIGNAL);
    rest_.remove_prefix(end == std::string_view::npos ? rest_.size() : end + kWait.size());
  }

 private:
  static constexpr std::string_view kWait = "<wait>";
  static constexpr int kPatience = 4;

  void hang_up() {
    if (connection_ >= 0) close(connection_);
    connection_ = -1;
  }

  int listener_;
  int port_ = 0;
  int connection_ = -1;
  std::string_view rest_;
  int silence_ = 0;
  bool heard_ = true;
};

inline retrysafe_event an_event(uint64_t tag, const char *id, const char *key) {
  retrysafe_event event{};
  event.tag = tag;
  event.attempt = 1;
  event.id = {id, 36};
  event.type = {"order.created", 13};
  event.source = {"retrysafe/shop", 14};
  event.time = {"2026-01-02T03:04:05.678901Z", 27};
  event.ordering_key = {key, key ? 1u : 0u};
  event.event_key = {"order-1", 7};
  event.scope = {"", 0};
  event.payload = {"{}", 2};
  return event;
}

// Sends three events through a sink. Each has one outcome, or none yet where the far side keeps it waiting.
template <class Sink>
void converse(FarSide &far_side, std::string_view input, const sink::Options &options) {
  const retrysafe_event events[] = {an_event(11, "7c9e6679-7425-80de-944b-e07fc1f90ae7", "a"),
                                    an_event(12, "7c9e6679-7425-80de-944b-e07fc1f90ae8", "a"),
                                    an_event(13, "7c9e6679-7425-80de-944b-e07fc1f90ae9", nullptr)};
  constexpr int kLongest = 400;
  far_side.begin(input);
  Sink sink(options);
  size_t submitted = 0;
  std::set<uint64_t> settled;
  for (int round = 0; round < kLongest && settled.size() < std::size(events); ++round) {
    while (submitted < std::size(events) && sink.submit(events[submitted])) ++submitted;
    sink.flush();
    retrysafe_outcome outcomes[2];
    int timeout_ms = -1;
    const size_t count = sink.collect(outcomes, &timeout_ms);
    require(count <= std::size(outcomes));
    for (const retrysafe_outcome &outcome : std::span(outcomes).first(count)) {
      require(outcome.tag >= 11 && outcome.tag < 11 + submitted);
      require(settled.insert(outcome.tag).second);
      require(std::memchr(outcome.reason, '\0', sizeof outcome.reason) != nullptr);
      require(is_one_line(outcome.reason));
      require((outcome.status == RETRYSAFE_DELIVERED) == (outcome.reason[0] == '\0'));
    }
    far_side.step();
    pollfd ready{sink.wait_fd(), POLLIN, 0};
    if (count == 0) poll(&ready, 1, 1);
  }
}

}  // namespace retrysafe::fuzz
