#include "sinks/flood_guard.hpp"

#include <linux/tcp.h>  // the C library's header knows less of the structure, and does not go with this one
#include <netinet/in.h>
#include <sys/socket.h>

namespace retrysafe::sink {

namespace {

// An error may quote what it is about, more than once.
constexpr uint64_t kQuotes = 4;

struct Traffic {
  uint64_t received;
  uint64_t sent;
};

// Nothing of a socket that is no TCP connection.
Traffic traffic(int socket) {
  tcp_info info{};
  socklen_t size = sizeof info;
  if (getsockopt(socket, IPPROTO_TCP, TCP_INFO, &info, &size) != 0) return {0, 0};
  return {info.tcpi_bytes_received, info.tcpi_bytes_acked};
}

}  // namespace

void FloodGuard::reset(int socket) {
  const Traffic now = traffic(socket);
  received_ = now.received;
  sent_ = now.sent;
}

bool FloodGuard::is_flooded(int socket) const {
  const Traffic now = traffic(socket);
  return now.received > received_ && now.received - received_ > allowance_ + kQuotes * (now.sent - sent_);
}

}  // namespace retrysafe::sink
