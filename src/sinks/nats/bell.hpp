// Wakes another thread that waits on a descriptor.
#pragma once

#include <sys/eventfd.h>
#include <unistd.h>

#include <cerrno>
#include <system_error>

namespace retrysafe::nats {

class Bell {
 public:
  Bell() : fd_(eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC)) {
    if (fd_ < 0) throw std::system_error(errno, std::generic_category(), "eventfd");
  }
  ~Bell() { ::close(fd_); }
  Bell(const Bell &) = delete;
  Bell &operator=(const Bell &) = delete;

  // Readable after ring(), until silence().
  int fd() const { return fd_; }
  void ring() const { eventfd_write(fd_, 1); }
  void silence() const {
    eventfd_t count;
    eventfd_read(fd_, &count);
  }

 private:
  const int fd_;
};

}  // namespace retrysafe::nats
