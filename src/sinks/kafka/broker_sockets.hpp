// The library's sockets. A thread of it reads what a broker sends over TLS for as long as OpenSSL finds
// nothing in it for the library: with a broker that means harm that is for ever, and who waits for the
// thread's end waits as long. So its sockets can be taken away.
#pragma once

#include <mutex>
#include <vector>

namespace retrysafe::kafka {

class BrokerSockets {
 public:
  // The hooks; called by threads of the library.
  int open(int domain, int type, int protocol) noexcept;
  int close(int fd) noexcept;

  // Nothing comes or goes any more, on those that are open and those to come.
  void shut_down();

 private:
  std::mutex mutex_;
  std::vector<int> open_;
  bool over_ = false;
};

}  // namespace retrysafe::kafka
