// From host names to addresses, without waiting.
//
// getaddrinfo can take a minute and cannot be interrupted, so it runs in a thread of its own that is left
// alone: it shares nothing with the sink but the answer, and a new question waits for the old thread's end.
// Calls of a sink come with signals blocked, which the thread inherits.
#pragma once

#include <sys/socket.h>

#include <memory>
#include <string>
#include <vector>

namespace retrysafe::sink {

struct Address {
  std::string host;          // as given; a folder for a Unix socket
  sockaddr_storage address;  // AF_UNIX: only the family counts
};

class Resolver {
 public:
  Resolver();

  // Readable when an answer is there.
  int fd() const;

  void ask(const std::vector<std::string> &hosts);
  // True when the answer is there. It may hold no address; `error` then tells why.
  bool answered(std::vector<Address> *addresses, std::string *error);

 private:
  struct Shared;
  static void look_up(Shared &shared) noexcept;
  static void look_up(const std::string &host, std::vector<Address> *found, std::string *error);

  std::shared_ptr<Shared> shared_;
};

}  // namespace retrysafe::sink
