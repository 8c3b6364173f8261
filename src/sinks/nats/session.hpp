// One connection to JetStream, in a thread of its own.
//
// The client library blocks: while it connects, in the TLS handshake without any bound, and when it writes
// over TLS to a server that does not read. So all that concerns a connection happens in one thread, which
// shares nothing with the sink but two queues and can be left alone. The library is given no thread of its
// own to read, write or ping with (it is run as part of an event loop), does not reconnect and learns of no
// other server: what was handed to a session that has ended goes nowhere.
#pragma once

#include <sys/socket.h>

#include <chrono>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "sinks/nats/bell.hpp"
#include "sinks/nats/target.hpp"

namespace retrysafe::nats {

using Clock = std::chrono::steady_clock;

// Where a connection may go to; the address has passed the filter.
struct Endpoint {
  Server server;
  sockaddr_storage address;
};

struct Header {
  std::string name;
  std::string value;  // printable
};

// What became of a message.
struct Answer {
  enum class Kind {
    kAnswered,      // text: the body of the answer
    kNobody,        // no stream takes its subject
    kTooLarge,      // text: the library's
    kNotPermitted,  // of any message on a subject; text: the server's
  };
  Kind kind;
  uint64_t number;
  std::string text;
};

class Session {
 public:
  enum class State { kConnecting, kReady, kEnded };

  // Tries one endpoint after the other. `bell` rings when there is something to look at.
  Session(std::shared_ptr<const Target> target, std::vector<Endpoint> endpoints,
          std::shared_ptr<const Bell> bell);
  // Sends nothing more.
  ~Session();
  Session(const Session &) = delete;
  Session &operator=(const Session &) = delete;

  State state() const;
  std::string error() const;  // why it has ended

  // While connecting: when to call hurry(), which makes an attempt fail that hangs in the library.
  Clock::time_point deadline() const;
  void hurry();

  // Hands over a message, whose answer will carry `number`; flush() sends what was handed over.
  void publish(uint64_t number, const std::string &subject, const std::vector<Header> &headers,
               std::string_view payload);
  void flush();
  std::vector<Answer> take_answers();
  // One of them was an answer to a message under way.
  void answered();

  // Sessions that were given up, and whose threads still have not ended.
  static size_t lingering();

  struct Shared;

 private:
  std::shared_ptr<Shared> shared_;
};

}  // namespace retrysafe::nats
