// Client libraries keep what a server sends until a message is complete, however long, and some of it for
// good. The kernel counts what arrives on a connection: when it is more than any answer takes, and nothing
// has come that was waited for, the other side is not one to listen to.
#pragma once

#include <cstdint>

namespace retrysafe::sink {

class FloodGuard {
 public:
  // `allowance`: bytes that may come beyond what is about what was sent.
  explicit FloodGuard(uint64_t allowance) : allowance_(allowance) {}

  // A new connection, or something came that was waited for.
  void reset(int socket);

  // Since then more came than a server can have to say about what it was sent. Never true of a Unix socket.
  bool is_flooded(int socket) const;

 private:
  uint64_t allowance_;
  uint64_t received_ = 0;
  uint64_t sent_ = 0;
};

}  // namespace retrysafe::sink
