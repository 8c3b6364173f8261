// A connection to the server, made step by step without waiting: resolve, connect, TLS, authenticate, choose
// the database. Then commands go out and replies come in.
#pragma once

#include <chrono>
#include <optional>
#include <string>
#include <vector>

#include "sinks/redis/reply.hpp"
#include "sinks/redis/target.hpp"
#include "sinks/redis/tls.hpp"
#include "sinks/resolver.hpp"

namespace retrysafe::redis {

using Clock = std::chrono::steady_clock;

class Session {
 public:
  enum class State { kClosed, kResolving, kConnecting, kSecuring, kGreeting, kReady };

  explicit Session(const Target &target);
  ~Session();
  Session(const Session &) = delete;
  Session &operator=(const Session &) = delete;

  // Readable when there is something to do.
  int wait_fd() const { return epoll_; }

  void open();
  // Works without waiting. Back in kClosed: it failed, and error() tells why.
  State advance();
  void close();
  void close(std::string reason);

  State state() const { return state_; }
  const std::string &error() const { return error_; }
  // When advance() wants to be called although wait_fd() is silent. Not for kReady.
  Clock::time_point deadline() const { return deadline_; }

  // In kReady. What is to be sent, which push() does as far as possible; bytes that still wait.
  std::string &commands() { return commands_; }
  size_t unsent() const { return commands_.size() + output_.size() - output_sent_; }
  void push();
  // All that the network has taken, for whoever wants to know whether it goes on.
  uint64_t bytes_sent() const { return bytes_sent_; }
  // False: there is none yet, or the connection has ended and this was the last.
  bool next_reply(Reply *reply);

 private:
  void resolve();
  void try_next_address();
  void connected();
  void greet();
  void take_greeting();
  void read_socket();
  void write_socket();
  void watch();
  void fail(std::string reason);

  const Target &target_;
  const int epoll_;
  sink::Resolver resolver_;
  State state_ = State::kClosed;
  int socket_ = -1;
  uint32_t watched_ = 0;
  std::vector<sink::Address> addresses_;  // still to be tried, the next one last
  std::string error_;
  Clock::time_point deadline_{};

  std::optional<Tls> tls_;
  std::optional<ReplyReader> reader_;
  std::string commands_;  // in the clear
  std::string output_;    // as the network gets it, up to output_sent_ already gone
  size_t output_sent_ = 0;
  std::string ended_;  // why no more comes; what came before is still read
  uint64_t bytes_sent_ = 0;
  size_t greetings_ = 0;    // replies to the commands of the greeting that are missing
  bool only_asks_ = false;  // it is a PING
};

}  // namespace retrysafe::redis
