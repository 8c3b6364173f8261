#include "sinks/kafka/broker_sockets.hpp"

#include <sys/socket.h>
#include <unistd.h>

#include <cerrno>
#include <exception>

namespace retrysafe::kafka {

int BrokerSockets::open(int domain, int type, int protocol) noexcept {
  const std::lock_guard lock(mutex_);
  errno = ECONNABORTED;
  if (over_) return -1;
  const int fd = ::socket(domain, type | SOCK_CLOEXEC, protocol);
  try {
    if (fd >= 0) open_.push_back(fd);
    return fd;
  } catch (const std::exception &) {
    ::close(fd);
    errno = ENOMEM;
    return -1;
  }
}

int BrokerSockets::close(int fd) noexcept {
  const std::lock_guard lock(mutex_);
  std::erase(open_, fd);
  return ::close(fd);
}

void BrokerSockets::shut_down() {
  const std::lock_guard lock(mutex_);
  over_ = true;
  for (const int fd : open_) {
    ::shutdown(fd, SHUT_RDWR);
    // What has come already is thrown away, or it would be read first.
    while (::recv(fd, nullptr, 1 << 20, MSG_TRUNC | MSG_DONTWAIT) > 0) continue;
  }
}

}  // namespace retrysafe::kafka
