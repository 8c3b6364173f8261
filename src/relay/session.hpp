// A connection to the database that comes back by itself.
//
// Nothing here waits: turn() does what can be done. Statements are sent at once and answered in order, each
// in a transaction of its own; several may be under way. When the connection breaks every statement that was
// not answered yet is answered as lost, and nobody knows what became of it.
//
// The schema may be renamed, or the extension made anew in another one. So when a name in a statement stands
// for nothing, the extension is looked up again, and the statement, which has done nothing, is sent again if
// it is elsewhere. Then those behind it may be answered first.
#pragma once

#include <libpq-fe.h>
#include <poll.h>

#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "relay/clock.hpp"
#include "sinks/connector.hpp"

namespace retrysafe::relay {

struct FreeResult {
  void operator()(PGresult *result) const { PQclear(result); }
};
using Result = std::unique_ptr<PGresult, FreeResult>;

struct Answer {
  Result result;         // null when lost
  std::string sqlstate;  // of an error; empty: none
  std::string message;   // of an error, on one line

  bool lost() const { return !result; }
  bool good() const { return result && sqlstate.empty(); }
  int rows() const { return PQntuples(result.get()); }
  std::string text(int row, int column) const {
    return {PQgetvalue(result.get(), row, column),
            static_cast<size_t>(PQgetlength(result.get(), row, column))};
  }
  bool is_null(int row, int column) const { return PQgetisnull(result.get(), row, column) != 0; }
};

// Where to connect to: each host of the list by itself, so that one that does not answer is passed over in
// time.
class Hosts {
 public:
  // Throws ConfigurationError.
  explicit Hosts(const std::string &connection);
  // What begins a connection; waits for the name service.
  std::function<PGconn *()> start(size_t attempt) const;
  size_t count() const { return hosts_.size(); }
  Milliseconds timeout() const { return timeout_; }
  bool has_password() const { return has_password_; }

 private:
  using Parameters = std::vector<std::pair<std::string, std::string>>;
  std::vector<Parameters> hosts_;
  Milliseconds timeout_ = 10'000;
  bool has_password_ = false;
};

class Session {
 public:
  using Callback = std::function<void(Answer)>;

  // `on_ready`: connected, again or for the first time. `on_failure`: the connection broke or could not be
  // made, and why; `nowhere`: at none of the hosts.
  Session(const Hosts &hosts, std::function<void()> on_ready,
          std::function<void(const std::string &reason, bool nowhere)> on_failure);
  ~Session();
  Session(const Session &) = delete;
  Session &operator=(const Session &) = delete;

  bool ready() const { return state_ == State::kReady; }
  // The extension's schema, quoted, and a dot.
  const std::string &schema() const { return schema_; }
  // Whether the encoding of the database is UTF-8.
  bool utf8() const { return utf8_; }

  using Parameter = std::optional<std::string>;
  // When ready. Texts are few: each is prepared, once. `@` in the text stands for the schema. `binary`: the
  // form of the answer. An answer that takes longer than `timeout` counts as a broken connection.
  void send(std::string_view sql, std::vector<Parameter> parameters, bool binary, Milliseconds timeout,
            Callback callback);

  void turn(Milliseconds now);
  // What to wait for; no descriptor: only time.
  std::optional<pollfd> waits_for() const;
  Milliseconds wakes_at() const;

 private:
  enum class State { kDown, kConnecting, kPreparing, kReady };
  struct Statement {
    std::string sql;
    std::vector<Parameter> parameters;
    bool binary;
    Milliseconds timeout;
    Callback callback;
  };
  struct Sent {
    Statement statement;
    std::string name;    // as it is prepared
    std::string schema;  // that its text names; empty: none
    Milliseconds deadline;
    bool preparing;  // the first result is that of preparing it
    Answer answer;
  };

  void connect(Milliseconds now);
  void prepare();
  void send(Statement statement);
  void look_again(Sent refused);
  void read();
  void take(Result result);
  void fail(const std::string &reason);

  const Hosts &hosts_;
  std::function<void()> on_ready_;
  std::function<void(const std::string &, bool)> on_failure_;
  State state_ = State::kDown;
  PGconn *connection_ = nullptr;
  sink::Connector connector_;
  std::deque<Sent> sent_;
  std::map<std::string, std::string, std::less<>> prepared_;  // texts, and how they are called
  int prepared_in_all_ = 0;
  std::string schema_;
  bool utf8_ = true;
  size_t attempt_ = 0;
  int failures_ = 0;
  Milliseconds connect_at_ = 0;
  Milliseconds deadline_ = kNever;  // of connecting
};

}  // namespace retrysafe::relay
