// A connection to the far side, made step by step without waiting: resolve, connect, look at what is there,
// prepare.
#pragma once

#include <chrono>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <libpq-fe.h>

#include "core/address_filter.hpp"
#include "sink/kit.hpp"
#include "sinks/connector.hpp"
#include "sinks/flood_guard.hpp"
#include "sinks/postgres/delivery_statement.hpp"
#include "sinks/resolver.hpp"

namespace retrysafe::sink {

using Clock = std::chrono::steady_clock;

// Where and how to connect. Throws std::invalid_argument for what can never work.
struct Target {
  explicit Target(const Options &options);

  std::vector<std::string> hosts;
  std::string port, dbname, user, password, application_name;
  std::string ssl_mode, ca_file, cert_file, key_file, key_password;
  std::vector<std::pair<std::string, std::string>> files;  // that options name: option, path
  std::string inbox_table, inbox_function, function;
  bool require_password;
  std::chrono::milliseconds connect_timeout, statement_timeout;
  AddressFilter filter;
};

class Session {
 public:
  static constexpr const char *kStatementName = "deliver";

  enum class State { kClosed, kResolving, kConnecting, kPreparing, kReady };

  explicit Session(const Options &options);
  ~Session();
  Session(const Session &) = delete;
  Session &operator=(const Session &) = delete;

  // Readable when there is something to do.
  int wait_fd() const { return epoll_; }

  void open();
  // Works without waiting. Back in kClosed: it failed, and error() tells why.
  State advance();
  void close();

  State state() const { return state_; }
  const std::string &error() const { return error_; }
  // When advance() wants to be called although wait_fd() is silent. Not for kReady.
  Clock::time_point deadline() const { return deadline_; }

  // In kReady, in pipeline mode.
  PGconn *connection() const { return connection_; }
  const DeliveryStatement &statement() const { return statement_; }
  const Target &target() const { return target_; }
  // Sends what is waiting; false: the connection is lost.
  bool push();
  // Takes in what has come; false: the connection is of no use any more.
  bool consume(std::string *reason);
  // What came was an answer.
  void answered();

 private:
  enum class Step { kSettings, kInspect, kPrepare };

  bool files_are_there();
  void resolve();
  void try_next_address();
  void connect();
  void greet();
  bool step_sent(int sent);
  void send_settings();
  void prepare();
  void take(const PGresult *result);
  void inspect(const PGresult *result);
  void fail(std::string reason);
  void watch(uint32_t events);

  Target target_;
  int epoll_;
  Resolver resolver_;
  Connector connector_;
  PGconn *connection_ = nullptr;
  State state_ = State::kClosed;
  Step step_ = Step::kSettings;
  std::vector<Address> addresses_;  // still to be tried, the next one last
  std::string error_;
  Clock::time_point deadline_{};
  FloodGuard flood_guard_;
  DeliveryStatement statement_;
};

}  // namespace retrysafe::sink
