#include "sinks/postgres/session.hpp"

#include <netdb.h>
#include <sys/epoll.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <iterator>
#include <stdexcept>
#include <system_error>
#include <utility>

#include "sinks/handshake_limit.hpp"
#include "sinks/postgres/message.hpp"

namespace retrysafe::sink {

namespace {

using std::chrono::milliseconds;

// Exists nowhere, not even by accident.
constexpr const char *kNoFile = "/dev/null/none";
constexpr int kRequireAuthVersion = 160000;
constexpr int kInspectedColumns = 5;
// Errors can be long: a function may raise any text.
constexpr uint64_t kAllowance = 16 * 1024 * 1024;

// Keeps the environment of the server's account out of connections that others asked for: PGSERVICE,
// PGPASSWORD, PGSSLKEY and the like, which libpq reads while it takes in the parameters. The variables are
// put out of sight and not unset, since other threads may be reading them.
class EnvironmentHidden {
 public:
  EnvironmentHidden() : before_(environ) { environ = nothing; }
  ~EnvironmentHidden() { environ = before_; }
  EnvironmentHidden(const EnvironmentHidden &) = delete;
  EnvironmentHidden &operator=(const EnvironmentHidden &) = delete;

 private:
  static inline char *nothing[1] = {nullptr};
  char **before_;
};

std::vector<std::string> split_hosts(std::string_view list) {
  std::vector<std::string> hosts;
  while (true) {
    const size_t comma = list.find(',');
    std::string_view host = list.substr(0, comma);
    while (host.starts_with(' ')) host.remove_prefix(1);
    while (host.ends_with(' ')) host.remove_suffix(1);
    if (host.empty()) throw std::invalid_argument("option \"host\" names an empty host");
    hosts.emplace_back(host);
    if (comma == std::string_view::npos) return hosts;
    list.remove_prefix(comma + 1);
  }
}

std::string numeric(const Address &address) {
  char text[NI_MAXHOST];
  const auto *sockaddr_of = reinterpret_cast<const sockaddr *>(&address.address);
  const socklen_t size = address.address.ss_family == AF_INET ? sizeof(sockaddr_in) : sizeof(sockaddr_in6);
  return getnameinfo(sockaddr_of, size, text, sizeof text, nullptr, 0, NI_NUMERICHOST) == 0 ? text : "";
}

PGconn *start_connection(const Target &target, const Address &address) {
  std::vector<std::pair<const char *, std::string>> given;
  given.emplace_back("host", address.host);
  if (address.address.ss_family != AF_UNIX) given.emplace_back("hostaddr", numeric(address));
  given.emplace_back("port", target.port);
  given.emplace_back("dbname", target.dbname);
  given.emplace_back("user", target.user);
  given.emplace_back("password", target.password);
  given.emplace_back("application_name", target.application_name);
  given.emplace_back("client_encoding", "UTF8");
  given.emplace_back("sslmode", target.ssl_mode);
  given.emplace_back("sslrootcert", target.ca_file);
  // A primary that became a standby is passed over.
  given.emplace_back("target_session_attrs", "read-write");
  // Nothing that lies in the home directory of the server's account identifies a destination.
  given.emplace_back("passfile", kNoFile);
  given.emplace_back("sslcrl", kNoFile);
  given.emplace_back("sslcert", target.cert_file);
  given.emplace_back("sslkey", target.key_file);
  given.emplace_back("sslpassword", target.key_password);
  given.emplace_back("gssencmode", "disable");
  if (PQlibVersion() >= kRequireAuthVersion) {
    given.emplace_back("sslcertmode", target.cert_file == kNoFile ? "disable" : "allow");
    if (target.require_password) given.emplace_back("require_auth", "password,md5,scram-sha-256");
  }

  std::vector<const char *> keywords, values;
  for (const auto &[keyword, value] : given) {
    keywords.push_back(keyword);
    values.push_back(value.c_str());
  }
  keywords.push_back(nullptr);
  values.push_back(nullptr);
  const EnvironmentHidden hidden;
  return PQconnectStartParams(keywords.data(), values.data(), 0);
}

// One row: the inbox table and the function as they are to be written in SQL, null where they are not there;
// the columns that can be filled, separated by commas; whether an event id is unique; whether the function
// may be called.
std::string inspection() {
  return std::string(
             "WITH inbox AS ("
             "SELECT c.oid, pg_catalog.format('%I.%I', n.nspname, c.relname) AS name FROM "
             "pg_catalog.pg_class c"
             " JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace"
             " WHERE c.oid = pg_catalog.to_regclass($1::text)), "
             "known (name, type) AS (VALUES ") +
         kInboxColumns +
         "), col AS ("
         "SELECT a.attname::text AS name, a.attnum FROM inbox i JOIN pg_catalog.pg_attribute a ON a.attrelid "
         "= i.oid"
         " JOIN known k ON k.name = a.attname::text AND k.type = pg_catalog.format_type(a.atttypid, null)"
         " WHERE a.attnum > 0 AND NOT a.attisdropped AND a.attgenerated = ''"
         " AND pg_catalog.has_column_privilege(i.oid, a.attnum, 'INSERT')), "
         "uniq AS ("
         "SELECT FROM inbox i JOIN pg_catalog.pg_index x ON x.indrelid = i.oid WHERE x.indisunique AND "
         "x.indimmediate"
         " AND x.indisvalid AND x.indpred IS NULL AND x.indexprs IS NULL AND"
         " (SELECT pg_catalog.bool_or(c.name = 'event_id') AND"
         " pg_catalog.bool_and(coalesce(c.name IN ('event_id', 'consumer'), false))"
         " FROM pg_catalog.unnest((x.indkey::int2[])[0:x.indnkeyatts - 1]) AS key LEFT JOIN col c ON "
         "c.attnum = key)), "
         "handler AS (" +
         "SELECT p.oid, pg_catalog.format('%I.%I', n.nspname, p.proname) AS name FROM pg_catalog.pg_proc p"
         " JOIN pg_catalog.pg_namespace n ON n.oid = p.pronamespace"
         " WHERE p.oid = pg_catalog.to_regprocedure($2::text)), "
         "accept AS ("
         "SELECT p.oid, pg_catalog.format('%I.%I', n.nspname, p.proname) AS name FROM pg_catalog.pg_proc p"
         " JOIN pg_catalog.pg_namespace n ON n.oid = p.pronamespace"
         " WHERE p.oid = pg_catalog.to_regprocedure($3::text) AND p.prorettype = "
         "'pg_catalog.bool'::pg_catalog.regtype"
         " AND NOT p.proretset) "
         "SELECT (SELECT name FROM inbox), (SELECT pg_catalog.string_agg(name, ',') FROM col),"
         " EXISTS (SELECT FROM uniq), (SELECT name FROM handler), (SELECT name FROM accept)";
}

std::string signature(const std::string &function, const char *arguments) {
  if (function.empty() || function.find('(') != std::string::npos) return function;
  return function + arguments;
}

}  // namespace

Target::Target(const Options &options)
    : hosts(split_hosts(options.required("host"))),
      port(std::to_string(options.number("port", 5432))),
      dbname(options.required("dbname")),
      user(options.required("user")),
      password(options.text("password")),
      application_name(options.text("application_name", "retrysafe")),
      ssl_mode(options.text("sslmode", "prefer")),
      ca_file(options.text("ca_file", kNoFile)),
      cert_file(options.text("cert_file", kNoFile)),
      key_file(options.text("key_file", kNoFile)),
      key_password(options.text("key_password")),
      inbox_table(options.text("inbox_table", "public.retrysafe_inbox")),
      inbox_function(signature(std::string(options.text("inbox_function")), "(text, text)")),
      function(signature(std::string(options.text("function")), "(jsonb)")),
      require_password(options.flag("require_password", true)),
      connect_timeout(options.number("connect_timeout", 5000)),
      statement_timeout(options.number("statement_timeout", 30000)),
      filter(options.allowed_addresses()) {
  if (require_password && password.empty()) throw std::invalid_argument("option \"password\" is missing");
  if (!inbox_function.empty() && function.empty())
    throw std::invalid_argument(
        "option \"inbox_function\" needs option \"function\": nothing else would happen");
  if (ssl_mode.starts_with("verify-") && !options.has("ca_file")) {
    // Anything but the full check trusts every customer of every public authority.
    if (PQlibVersion() < kRequireAuthVersion || ssl_mode != "verify-full")
      throw std::invalid_argument("sslmode \"" + ssl_mode + "\" needs option \"ca_file\"");
    ca_file = "system";
  }
  if (options.has("cert_file") != options.has("key_file"))
    throw std::invalid_argument("options \"cert_file\" and \"key_file\" need each other");
  if (options.has("cert_file") && ssl_mode == "disable")
    throw std::invalid_argument("a certificate needs another sslmode than \"disable\"");
  // It would load the engine from a library of that name.
  if (key_file.find(':') != std::string::npos)
    throw std::invalid_argument(
        "option \"key_file\" holds a colon: libpq takes what is before it for an engine of OpenSSL");
  for (const char *name : {"ca_file", "cert_file", "key_file"})
    if (options.has(name)) files.emplace_back(name, options.text(name));
}

Session::Session(const Options &options)
    : target_(options), epoll_(epoll_create1(EPOLL_CLOEXEC)), flood_guard_(kAllowance) {
  if (epoll_ < 0) throw std::system_error(errno, std::generic_category(), "epoll_create1");
  // Else the password of a key that none is given for would be asked for on a terminal.
  [[maybe_unused]] static const bool asks_nobody =
      (PQsetSSLKeyPassHook_OpenSSL(PQdefaultSSLKeyPassHook_OpenSSL), true);
  for (const int fd : {resolver_.fd(), connector_.fd()}) {
    epoll_event event{};
    event.events = EPOLLIN;
    epoll_ctl(epoll_, EPOLL_CTL_ADD, fd, &event);
  }
}

Session::~Session() {
  close();
  ::close(epoll_);
}

void Session::open() {
  close();
  error_.clear();
  addresses_.clear();
  if (!files_are_there()) return;
  state_ = State::kResolving;
  deadline_ = Clock::now() + target_.connect_timeout;
  resolver_.ask(target_.hosts);
}

// What is not there libpq passes over: it would verify nothing, or show no certificate.
bool Session::files_are_there() {
  for (const auto &[option, path] : target_.files) {
    if (::access(path.c_str(), R_OK) == 0) continue;
    error_ =
        "the file of option \"" + option + "\" cannot be read: " + std::generic_category().message(errno);
    return false;
  }
  return true;
}

void Session::close() {
  connector_.give_up();
  if (connection_) PQfinish(connection_);
  connection_ = nullptr;
  state_ = State::kClosed;
}

Session::State Session::advance() {
  resolve();
  if (state_ == State::kConnecting) connect();
  if (state_ == State::kPreparing) prepare();
  if (state_ != State::kClosed && state_ != State::kReady && Clock::now() >= deadline_) {
    const bool connecting = state_ == State::kConnecting;
    error_ = state_ == State::kResolving ? "resolving the host name took longer than connect_timeout"
                                         : "connecting took longer than connect_timeout";
    close();
    if (connecting) try_next_address();
  }
  return state_;
}

void Session::resolve() {
  std::vector<Address> found;
  std::string error;
  if (!resolver_.answered(&found, &error) || state_ != State::kResolving)
    return;  // nobody waits for a late answer
  error_ = error.empty() ? "the host has no address" : error;
  for (const Address &address : found) {
    const auto *sockaddr_of = reinterpret_cast<const sockaddr *>(&address.address);
    const bool is_folder = address.address.ss_family == AF_UNIX;
    if (is_folder ? target_.filter.allows_folder(address.host)
                  : target_.filter.allows(address.host, sockaddr_of))
      addresses_.push_back(address);
    else
      error_ = is_folder ? "Unix sockets in " + address.host +
                               " are not allowed; see allowed_addresses, of the server or of the relay"
                         : AddressFilter::refusal(sockaddr_of);
  }
  std::reverse(addresses_.begin(), addresses_.end());
  try_next_address();
}

void Session::try_next_address() {
  state_ = State::kClosed;
  if (addresses_.empty()) return;
  const Address address = addresses_.back();
  addresses_.pop_back();
  PGconn *const begun = start_connection(target_, address);
  if (!begun) throw std::bad_alloc();
  PQsetNoticeReceiver(
      begun, [](void *, const PGresult *) {}, nullptr);
  state_ = State::kConnecting;
  deadline_ = Clock::now() + target_.connect_timeout;
  if (const char *const reason = connector_.start([begun] { return begun; })) {
    PQfinish(begun);
    fail(reason);
  }
}

void Session::connect() {
  connection_ = connector_.take();
  if (!connection_) return;
  if (PQstatus(connection_) != CONNECTION_OK) return fail(message_of(connection_));
  greet();
}

// Connected. Nothing is sent before it is known whose rights this connection has.
void Session::greet() {
  if (target_.require_password && !PQconnectionUsedPassword(connection_))
    return fail(
        "the server did not ask for the password, which a destination that no superuser made must use");
  PQsetnonblocking(connection_, 1);
  if (void *const tls = PQsslStruct(connection_, "OpenSSL"))
    SSL_set_msg_callback(static_cast<SSL *>(tls), limit_handshake);
  state_ = State::kPreparing;
  step_ = Step::kSettings;
  deadline_ = Clock::now() + target_.connect_timeout;
  watch(EPOLLIN);
  answered();
  send_settings();
}

bool Session::step_sent(int sent) {
  if (sent == 1 && push()) return true;
  fail(message_of(connection_));
  return false;
}

// "Delivered" means durable. Locks of a transaction whose sender is gone must not stay: it is sent again, and
// the second copy waits for the first one's row of the inbox.
void Session::send_settings() {
  const std::string timeout = std::to_string(target_.statement_timeout.count());
  const std::string settings = "SET client_min_messages = warning; SET statement_timeout = " + timeout +
                               "; SET idle_in_transaction_session_timeout = " + timeout +
                               "; SELECT pg_catalog.set_config('synchronous_commit', 'on', false)"
                               " WHERE pg_catalog.current_setting('synchronous_commit') = 'off'";
  step_sent(PQsendQuery(connection_, settings.c_str()));
}

void Session::prepare() {
  if (!push()) return fail(message_of(connection_));
  if (std::string reason; !consume(&reason)) return fail(reason);
  while (state_ == State::kPreparing && !PQisBusy(connection_)) {
    const std::unique_ptr<PGresult, void (*)(PGresult *)> result(PQgetResult(connection_), PQclear);
    if (result) {
      answered();
      take(result.get());
      continue;
    }
    switch (step_) {
      case Step::kSettings: {
        step_ = Step::kInspect;
        const auto name = [](const std::string &given) { return given.empty() ? nullptr : given.c_str(); };
        const char *values[] = {name(target_.inbox_table), name(target_.function),
                                name(target_.inbox_function)};
        if (!step_sent(PQsendQueryParams(connection_, inspection().c_str(), 3, nullptr, values, nullptr,
                                         nullptr, 0)))
          return;
        break;
      }
      case Step::kInspect:
        step_ = Step::kPrepare;
        if (!step_sent(PQsendPrepare(connection_, kStatementName, statement_.sql.c_str(), 0, nullptr)))
          return;
        break;
      case Step::kPrepare:
        if (PQenterPipelineMode(connection_) != 1) return fail(message_of(connection_));
        state_ = State::kReady;
        addresses_.clear();
        error_.clear();
        break;
    }
  }
}

void Session::take(const PGresult *result) {
  const ExecStatusType status = PQresultStatus(result);
  if (status != PGRES_COMMAND_OK && status != PGRES_TUPLES_OK) return fail(message_of(result));
  if (step_ == Step::kInspect) inspect(result);
}

void Session::inspect(const PGresult *result) {
  if (PQntuples(result) != 1 || PQnfields(result) != kInspectedColumns)
    return fail("the answer is not that of a PostgreSQL server");
  const auto text = [&](int column) { return std::string(PQgetvalue(result, 0, column)); };
  FarSide far_side;
  if (!target_.function.empty()) {
    far_side.handler = text(3);
    if (far_side.handler.empty()) return fail("function " + target_.function + " does not exist there");
  }
  if (!target_.inbox_function.empty()) {
    far_side.accept = text(4);
    if (far_side.accept.empty())
      return fail("function " + target_.inbox_function + " returning boolean does not exist there");
  } else {
    far_side.inbox = text(0);
    if (far_side.inbox.empty())
      return fail("table " + target_.inbox_table + " does not exist there; at least: CREATE TABLE " +
                  target_.inbox_table + " (event_id uuid PRIMARY KEY)");
    const std::string columns = text(1);
    for (size_t begin = 0; begin < columns.size();) {
      const size_t end = std::min(columns.find(',', begin), columns.size());
      far_side.columns.push_back(columns.substr(begin, end - begin));
      begin = end + 1;
    }
    if (std::find(far_side.columns.begin(), far_side.columns.end(), "event_id") == far_side.columns.end())
      return fail("table " + target_.inbox_table + " has no column event_id of type uuid or text that \"" +
                  target_.user + "\" may insert into");
    if (text(2) != "t")
      return fail("table " + target_.inbox_table +
                  " has no unique index on event_id, or on consumer and event_id");
  }
  statement_ = delivery_statement(far_side);
}

void Session::fail(std::string reason) {
  const bool connecting = state_ == State::kConnecting;
  error_ = std::move(reason);
  close();
  if (connecting) try_next_address();
}

bool Session::push() {
  const int left = PQflush(connection_);
  if (left < 0) return false;
  watch(left > 0 ? EPOLLIN | EPOLLOUT : EPOLLIN);
  return true;
}

bool Session::consume(std::string *reason) {
  if (PQconsumeInput(connection_) != 1) {
    *reason = message_of(connection_);
    return false;
  }
  // Nobody listens to anything, and the library would keep them.
  while (PGnotify *notification = PQnotifies(connection_)) PQfreemem(notification);
  if (!flood_guard_.is_flooded(PQsocket(connection_))) return true;
  *reason = "the server sends more than any answer takes";
  return false;
}

void Session::answered() {
  flood_guard_.reset(PQsocket(connection_));
}

// libpq opens another socket now and then; a closed one leaves the set by itself, and the new one can have
// its number.
void Session::watch(uint32_t events) {
  epoll_event event{};
  event.events = events;
  const int fd = PQsocket(connection_);
  if (epoll_ctl(epoll_, EPOLL_CTL_MOD, fd, &event) != 0 && errno == ENOENT)
    epoll_ctl(epoll_, EPOLL_CTL_ADD, fd, &event);
}

}  // namespace retrysafe::sink
