#include "relay/session.hpp"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <new>
#include <optional>
#include <random>

#include "core/backoff.hpp"
#include "relay/configuration.hpp"
#include "sinks/copy_result.hpp"

namespace retrysafe::relay {

namespace {

constexpr char kHidden = '*';  // how libpq marks what is not to be shown: password, sslpassword
constexpr Milliseconds kRetry = 100;
constexpr Milliseconds kRetryMax = 10'000;
constexpr Milliseconds kStatementTimeout = 30'000;
constexpr Milliseconds kLongestTimeout = 24 * 3600 * 1000;

std::string one_line(const char *message) {
  std::string text = message ? message : "";
  while (!text.empty() && text.back() == '\n') text.pop_back();
  std::replace(text.begin(), text.end(), '\n', ' ');
  return text;
}

std::vector<std::string> split(const std::string &list) {
  std::vector<std::string> parts;
  for (size_t begin = 0; begin <= list.size();) {
    const size_t end = std::min(list.find(',', begin), list.size());
    parts.push_back(list.substr(begin, end - begin));
    begin = end + 1;
  }
  return parts;
}

// Where a service file or the environment say that the hosts are. libpq would try them one after the other,
// without a limit for each. Of a service it tells that only by way of the environment.
void take_defaults(const std::optional<std::string> &service, std::string *host, std::string *hostaddr,
                   std::string *port) {
  constexpr const char *variable = "PGSERVICE";
  const char *const value = std::getenv(variable);
  const std::optional<std::string> before = value ? std::optional<std::string>(value) : std::nullopt;
  if (service) setenv(variable, service->c_str(), 1);
  PQconninfoOption *const defaults = PQconndefaults();
  if (before)
    setenv(variable, before->c_str(), 1);
  else
    unsetenv(variable);
  if (!defaults) throw std::bad_alloc();
  for (const PQconninfoOption *option = defaults; option->keyword; ++option) {
    const std::string_view keyword = option->keyword;
    if (!option->val) continue;
    if (keyword == "host") *host = option->val;
    if (keyword == "hostaddr") *hostaddr = option->val;
    if (keyword == "port" && port->empty()) *port = option->val;
  }
  PQconninfoFree(defaults);
}

// To fetch is not to wait for the disk: the server itself waits for what must not be lost, which is seldom.
// Time is limited by this side. A parallel worker has the timeouts of the role before it is told ours.
constexpr const char *kSettings =
    "SELECT pg_catalog.set_config(s.name, v.value, false) FROM (VALUES"
    " ('synchronous_commit', 'off'), ('default_transaction_isolation', 'read committed'),"
    " ('default_transaction_read_only', 'off'), ('default_transaction_deferrable', 'off'), "
    "('statement_timeout', '0'),"
    " ('transaction_timeout', '0'), ('idle_session_timeout', '0'), ('idle_in_transaction_session_timeout', "
    "'0'),"
    " ('lock_timeout', '10s'), ('client_min_messages', 'warning'), ('max_parallel_workers_per_gather', '0')"
    ") AS v (name, value) JOIN pg_catalog.pg_settings s USING (name)";

constexpr const char *kFindExtension =
    "SELECT pg_catalog.quote_ident(n.nspname) || '.'"
    " FROM pg_catalog.pg_extension e JOIN pg_catalog.pg_namespace n ON n.oid = e.extnamespace"
    " WHERE e.extname = 'retrysafe'";
constexpr const char *kNotInstalled = "the extension retrysafe is not installed in this database";

// A name that stands for nothing, for something else, or for what is not ours to use.
bool is_about_names(std::string_view sqlstate) {
  return sqlstate.starts_with("42") || sqlstate.starts_with("3F");
}

// What is prepared does not fit any more, or is not there. After any other error it is as good as a new one:
// the server looks its names up again where they have changed. And it keeps all that is prepared until the
// connection ends.
bool is_about_plans(std::string_view sqlstate) {
  return sqlstate == "0A000" || sqlstate == "26000";
}

}  // namespace

Hosts::Hosts(const std::string &connection) {
  char *error = nullptr;
  PQconninfoOption *given = PQconninfoParse(connection.c_str(), &error);
  if (!given) {
    // libpq's message may quote what was written, a password for example.
    PQfreemem(error);
    throw ConfigurationError(
        "connection is not a connection string or URI of PostgreSQL, such as \"host=db1 dbname=shop "
        "user=courier\"");
  }
  Parameters common;
  std::string host, hostaddr, port;
  for (const PQconninfoOption *option = given; option->keyword; ++option) {
    if (!option->val) continue;
    const std::string_view keyword = option->keyword;
    if (keyword == "host")
      host = option->val;
    else if (keyword == "hostaddr")
      hostaddr = option->val;
    else if (keyword == "port")
      port = option->val;
    else
      common.emplace_back(keyword, option->val);
    if (option->dispchar[0] == kHidden) has_password_ = true;
    if (keyword == "connect_timeout") {
      const long seconds = std::min(std::strtol(option->val, nullptr, 10), kLongestTimeout / 1000);
      if (seconds > 0) timeout_ = seconds * 1000;
    }
  }
  PQconninfoFree(given);
  const auto default_to = [&](const char *keyword, const char *value) {
    for (const auto &parameter : common)
      if (parameter.first == keyword) return;
    common.emplace_back(keyword, value);
  };
  default_to("target_session_attrs", "read-write");
  default_to("fallback_application_name", "retrysafe-relay");
  std::erase_if(common, [](const auto &parameter) { return parameter.first == "client_encoding"; });
  default_to("client_encoding", "UTF8");  // events leave in it
  default_to("keepalives_idle", "10");
  default_to("keepalives_interval", "5");
  default_to("keepalives_count", "3");
  default_to("tcp_user_timeout", "30000");
  if (host.empty() && hostaddr.empty()) {
    const auto service =
        std::find_if(common.begin(), common.end(), [](const auto &c) { return c.first == "service"; });
    take_defaults(service == common.end() ? std::nullopt : std::optional(service->second), &host, &hostaddr,
                  &port);
  }
  const std::vector<std::string> hosts = split(host), addresses = split(hostaddr), ports = split(port);
  const size_t count = std::max(hosts.size(), addresses.size());
  for (size_t i = 0; i < count; ++i) {
    Parameters parameters = common;
    const auto add = [&](const char *keyword, const std::vector<std::string> &list) {
      const std::string &value = list.size() == 1 ? list[0] : i < list.size() ? list[i] : std::string();
      if (!value.empty()) parameters.emplace_back(keyword, value);
    };
    add("host", hosts);
    add("hostaddr", addresses);
    add("port", ports);
    hosts_.push_back(std::move(parameters));
  }
}

std::function<PGconn *()> Hosts::start(size_t attempt) const {
  return [parameters = hosts_[attempt % hosts_.size()]] {
    std::vector<const char *> keywords, values;
    for (const auto &[keyword, value] : parameters) {
      keywords.push_back(keyword.c_str());
      values.push_back(value.c_str());
    }
    keywords.push_back(nullptr);
    values.push_back(nullptr);
    PGconn *const connection = PQconnectStartParams(keywords.data(), values.data(), 0);
    if (connection)
      PQsetNoticeReceiver(
          connection, [](void *, const PGresult *) {}, nullptr);
    return connection;
  };
}

Session::Session(const Hosts &hosts, std::function<void()> on_ready,
                 std::function<void(const std::string &, bool)> on_failure)
    : hosts_(hosts), on_ready_(std::move(on_ready)), on_failure_(std::move(on_failure)) {}

Session::~Session() {
  if (connection_) PQfinish(connection_);
}

void Session::turn(Milliseconds now) {
  if (state_ == State::kDown) {
    if (now >= connect_at_) connect(now);
    return;
  }
  if (state_ == State::kConnecting) {
    connection_ = connector_.take();
    if (!connection_) {
      if (now >= deadline_) fail("connecting took too long");
      return;
    }
    if (PQstatus(connection_) != CONNECTION_OK) return fail(one_line(PQerrorMessage(connection_)));
    return prepare();
  }
  read();
  if (!sent_.empty() && now >= sent_.front().deadline) fail("the server did not answer in time");
}

void Session::connect(Milliseconds now) {
  state_ = State::kConnecting;
  deadline_ = now + hosts_.timeout();
  if (const char *const reason = connector_.start(hosts_.start(attempt_++))) fail(reason);
}

void Session::prepare() {
  if (PQsetnonblocking(connection_, 1) != 0 || PQenterPipelineMode(connection_) != 1)
    return fail(one_line(PQerrorMessage(connection_)));
  state_ = State::kPreparing;
  send(kSettings, {}, false, kStatementTimeout, [this](const Answer &answer) {
    if (!answer.lost() && !answer.good()) fail(answer.message);
  });
  if (state_ != State::kPreparing) return;
  send(kFindExtension, {}, false, kStatementTimeout, [this](const Answer &answer) {
    if (answer.lost() || state_ != State::kPreparing) return;
    if (!answer.good()) return fail(answer.message);
    if (answer.rows() == 0) return fail(kNotInstalled);
    schema_ = answer.text(0, 0);
    const char *encoding = PQparameterStatus(connection_, "server_encoding");
    utf8_ = encoding && std::string_view(encoding) == "UTF8";
    state_ = State::kReady;
    failures_ = 0;
    on_ready_();
  });
}

void Session::send(std::string_view sql, std::vector<Parameter> parameters, bool binary, Milliseconds timeout,
                   Callback callback) {
  send({std::string(sql), std::move(parameters), binary, timeout, std::move(callback)});
}

void Session::send(Statement statement) {
  std::string text;
  for (const char c : statement.sql)
    if (c == '@')
      text += schema_;
    else
      text += c;
  const bool names_schema = text != statement.sql;
  std::vector<const char *> values;
  values.reserve(statement.parameters.size());
  for (const Parameter &parameter : statement.parameters)
    values.push_back(parameter ? parameter->c_str() : nullptr);
  const int format = statement.binary ? 1 : 0;
  const Milliseconds deadline = now_ms() + statement.timeout;
  const auto [known, fresh] = prepared_.try_emplace(std::move(text));
  if (fresh) known->second = "s" + std::to_string(++prepared_in_all_);
  sent_.push_back(
      {std::move(statement), known->second, names_schema ? schema_ : std::string(), deadline, fresh, {}});
  const char *name = known->second.c_str();
  if ((fresh && PQsendPrepare(connection_, name, known->first.c_str(), 0, nullptr) != 1) ||
      PQsendQueryPrepared(connection_, name, static_cast<int>(values.size()), values.data(), nullptr, nullptr,
                          format) != 1 ||
      PQpipelineSync(connection_) != 1 || PQflush(connection_) < 0)
    fail(one_line(PQerrorMessage(connection_)));
}

void Session::read() {
  if (PQconsumeInput(connection_) != 1 || PQflush(connection_) < 0)
    return fail(one_line(PQerrorMessage(connection_)));
  while (connection_ && !sent_.empty() && !PQisBusy(connection_)) {
    Result result(PQgetResult(connection_));
    // Null ends the results of one statement; its synchronisation point follows, unless the connection broke.
    if (result)
      take(std::move(result));
    else if (PQstatus(connection_) == CONNECTION_BAD)
      break;
  }
  if (connection_ && PQstatus(connection_) == CONNECTION_BAD) fail(one_line(PQerrorMessage(connection_)));
}

void Session::take(Result result) {
  const ExecStatusType status = PQresultStatus(result.get());
  if (sink::is_copy(status)) return fail(std::string("the server answered with ") + PQresStatus(status));
  Sent &first = sent_.front();
  if (status != PGRES_PIPELINE_SYNC) {
    if (status == PGRES_PIPELINE_ABORTED && !first.answer.sqlstate.empty())
      return;  // it could not be prepared
    if (status != PGRES_TUPLES_OK && status != PGRES_COMMAND_OK) {
      const char *state = PQresultErrorField(result.get(), PG_DIAG_SQLSTATE);
      const char *message = PQresultErrorField(result.get(), PG_DIAG_MESSAGE_PRIMARY);
      const char *hint = PQresultErrorField(result.get(), PG_DIAG_MESSAGE_HINT);
      first.answer.sqlstate = state ? state : "XX000";
      if (first.preparing || is_about_plans(first.answer.sqlstate))
        std::erase_if(prepared_, [&](const auto &p) { return p.second == first.name; });
      first.answer.message = one_line(message ? message : PQresultErrorMessage(result.get()));
      if (hint) first.answer.message.append(" (").append(one_line(hint)).append(")");
    }
    first.preparing = false;
    first.answer.result = std::move(result);
    return;
  }
  Sent done = std::move(first);
  sent_.pop_front();
  if (!done.schema.empty() && is_about_names(done.answer.sqlstate)) return look_again(std::move(done));
  done.statement.callback(std::move(done.answer));
}

// An error of a statement that named the right schema is what it is.
void Session::look_again(Sent refused) {
  send(kFindExtension, {}, false, kStatementTimeout,
       [this, refused = std::make_shared<Sent>(std::move(refused))](const Answer &answer) {
         const bool gone = answer.good() && answer.rows() == 0;
         if (answer.good() && !gone) schema_ = answer.text(0, 0);
         if (answer.lost() || gone)
           refused->statement.callback(Answer{});
         else if (schema_ == refused->schema)
           refused->statement.callback(std::move(refused->answer));
         else
           send(std::move(refused->statement));
         if (gone) fail(kNotInstalled);
       });
}

void Session::fail(const std::string &reason) {
  connector_.give_up();
  if (connection_) PQfinish(connection_);
  connection_ = nullptr;
  prepared_.clear();
  state_ = State::kDown;
  // The next host at once; all of them again after a while.
  static thread_local std::minstd_rand random{std::random_device{}()};
  const int count = static_cast<int>(hosts_.count());
  const bool nowhere = ++failures_ % count == 0;
  const Milliseconds rest =
      backoff(kRetry, kRetryMax, std::max(failures_ / count, 1), static_cast<std::uint32_t>(random()));
  connect_at_ = now_ms() + (nowhere ? rest : 0);
  std::deque<Sent> lost;
  lost.swap(sent_);
  for (Sent &sent : lost) sent.statement.callback(Answer{});
  on_failure_(reason, nowhere);
}

std::optional<pollfd> Session::waits_for() const {
  if (state_ == State::kDown) return std::nullopt;
  if (state_ == State::kConnecting) return pollfd{connector_.fd(), POLLIN, 0};
  const short output = PQflush(connection_) == 1 ? POLLOUT : 0;
  return pollfd{PQsocket(connection_), static_cast<short>(POLLIN | output), 0};
}

Milliseconds Session::wakes_at() const {
  if (state_ == State::kDown) return connect_at_;
  if (state_ == State::kConnecting) return deadline_;
  return sent_.empty() ? kNever : sent_.front().deadline;
}

}  // namespace retrysafe::relay
