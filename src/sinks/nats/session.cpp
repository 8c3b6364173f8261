#include "sinks/nats/session.hpp"

#include <nats/nats.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <pthread.h>

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <condition_variable>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <iterator>
#include <mutex>
#include <random>
#include <stdexcept>
#include <thread>
#include <utility>

#include "core/json_string.hpp"
#include "core/printable.hpp"
#include "sinks/flood_guard.hpp"
#include "sinks/nats/sockets.hpp"
#include "sinks/process_end.hpp"

namespace retrysafe::nats {

namespace {

constexpr size_t kMaxReason = 250;
// The library's own time limit comes first, where it holds.
constexpr std::chrono::milliseconds kGrace{500};
constexpr std::chrono::milliseconds kPatienceAtExit{500};
// A connection on which nothing arrives for so long is tried, and given up after some more tries.
constexpr int kKeepaliveIdle = 15, kKeepaliveInterval = 5, kKeepaliveCount = 3;  // seconds, seconds, tries
constexpr int kReadsAtEnd = 1000;
// Answers are short, and so is what a server says besides.
constexpr uint64_t kAllowance = 1024 * 1024;

template <class T, void (*Destroy)(T *)>
struct Destroyer {
  void operator()(T *object) const { Destroy(object); }
};
using OptionsPointer = std::unique_ptr<natsOptions, Destroyer<natsOptions, natsOptions_Destroy>>;
using MessagePointer = std::unique_ptr<natsMsg, Destroyer<natsMsg, natsMsg_Destroy>>;

// Without the place in the library's source, which stands before it.
std::string readable(const char *text, natsStatus status) {
  std::string_view view(text && text[0] ? text : natsStatus_GetText(status));
  if (const size_t end = view.find("): "); view.starts_with("(") && end != std::string_view::npos)
    view.remove_prefix(end + 3);
  return printable(view, kMaxReason);
}

std::string library_error(natsStatus status) {
  return readable(nats_GetLastError(nullptr), status);
}

void check(natsStatus status) {
  if (status != NATS_OK) throw std::runtime_error(library_error(status));
}

// The library writes names and passwords into the JSON of its greeting as they are: a quote would end the
// string, and what comes behind it could be somebody else's name.
std::string json_text(std::string_view text) {
  std::string quoted;
  write_json_string(quoted, text);
  return quoted.substr(1, quoted.size() - 2);
}

// Leaves a session's state with the library, for as long as it may call back.
using Hold = std::shared_ptr<Session::Shared>;

Session::Shared &shared_of(void *hold) {
  return **static_cast<Hold *>(hold);
}

void let_go(void *hold) {
  delete static_cast<Hold *>(hold);
}

std::string url(const Endpoint &endpoint) {
  char text[NI_MAXHOST];
  const bool ipv4 = endpoint.address.ss_family == AF_INET;
  const socklen_t size = ipv4 ? sizeof(sockaddr_in) : sizeof(sockaddr_in6);
  if (getnameinfo(reinterpret_cast<const sockaddr *>(&endpoint.address), size, text, sizeof text, nullptr, 0,
                  NI_NUMERICHOST) != 0)
    throw std::runtime_error("the address cannot be written as text");
  const std::string host = ipv4 ? text : "[" + std::string(text) + "]";
  return "nats://" + host + ":" + std::to_string(endpoint.server.port);
}

// The library would ask for its password on a terminal.
bool is_encrypted(const std::string &key_file) {
  std::ifstream file(key_file);
  const std::string text(std::istreambuf_iterator<char>(file), {});
  return text.find("ENCRYPTED") != std::string::npos;
}

// Not to be guessed: whoever knows it could answer in the server's place.
std::string random_token() {
  constexpr char digits[] = "0123456789abcdef";
  std::random_device random;
  std::string token;
  for (int i = 0; i < 4; ++i) {
    uint32_t bits = random();
    for (int j = 0; j < 8; ++j, bits >>= 4) token += digits[bits & 15];
  }
  return token;
}

// The pings of the library come from another of its threads, which would close the descriptor under ours.
void notice_silence(int fd) {
  const auto set = [&](int level, int option, int value) {
    setsockopt(fd, level, option, &value, sizeof value);
  };
  set(SOL_SOCKET, SO_KEEPALIVE, 1);
  set(IPPROTO_TCP, TCP_KEEPIDLE, kKeepaliveIdle);
  set(IPPROTO_TCP, TCP_KEEPINTVL, kKeepaliveInterval);
  set(IPPROTO_TCP, TCP_KEEPCNT, kKeepaliveCount);
}

}  // namespace

struct Session::Shared {
  Shared(std::shared_ptr<const Target> its_target, std::vector<Endpoint> its_endpoints,
         std::shared_ptr<const Bell> its_owner)
      : target(std::move(its_target)), endpoints(std::move(its_endpoints)), owner(std::move(its_owner)) {}

  const std::shared_ptr<const Target> target;
  const std::vector<Endpoint> endpoints;
  const std::shared_ptr<const Bell> owner;
  const std::string inbox = target->inbox_prefix + "." + random_token() + ".";
  const Bell thread;

  std::mutex mutex;
  State state = State::kConnecting;
  std::string error;
  bool given_up = false;
  int fd = -1;                       // of the connection that was made
  const Endpoint *trying = nullptr;  // to make one
  // Only moves on: whoever waits for it need not be told. Set before the thread runs, which may be late.
  Clock::time_point deadline = Clock::now() + target->connect_timeout + kGrace;
  std::vector<std::pair<uint64_t, MessagePointer>> outgoing;
  std::vector<Answer> answers;
  bool answered = true;  // something came that was waited for; the thread has not looked yet

  // The thread's own.
  sink::FloodGuard flood_guard{kAllowance};
  natsConnection *connection = nullptr;
  natsSubscription *subscription = nullptr;
  bool write_wanted = false;

  void tell(Answer answer);
  void end(const std::string &reason);
  void give_up();
  void hurry();

  // What the thread does.
  void run(const Hold &self) noexcept;
  bool connect(const Hold &self);
  void connect_to(const Endpoint &endpoint, const Hold &self);
  OptionsPointer options_for(const Endpoint &endpoint);
  void subscribe(const Hold &self);
  void work();
  void send();
  void disconnect();
  bool is_given_up();
  bool is_flooded(int socket);
};

namespace {

// The sessions whose threads run. Never destroyed: they may still run when the process ends.
struct Threads {
  std::mutex mutex;
  std::condition_variable ended;
  std::vector<Session::Shared *> sessions;
};

Threads &threads() {
  static auto *const all = new Threads;
  return *all;
}

// One that has left the list may still be in the TLS library, at its own end.
void end_all_threads(int exit_code, void *) noexcept {
  Threads &all = threads();
  std::unique_lock lock(all.mutex);
  for (Session::Shared *session : all.sessions) {
    const std::lock_guard session_lock(session->mutex);
    session->given_up = true;
    if (session->fd >= 0) ::shutdown(session->fd, SHUT_RDWR);
    session->thread.ring();
  }
  all.ended.wait_for(lock, kPatienceAtExit, [&] { return all.sessions.empty(); });
  sink::end_process(exit_code);
}

// Process-wide state of the library, made once and never unmade.
void initialise_library() {
  static const bool once = [] {
    check(nats_Open(-1));
    // Makes the library initialise TLS, so that what is registered below runs before that is taken down.
    natsOptions *options = nullptr;
    check(natsOptions_Create(&options));
    const OptionsPointer owner(options);
    check(natsOptions_SetSecure(options, true));
    return ::on_exit(end_all_threads, nullptr) == 0;
  }();
  if (!once) throw std::runtime_error("could not register a function for the end of the process");
}

// -- what the library calls; no exception gets out ----------------------------------------------------------

natsStatus on_attach(void **user, void *loop, natsConnection *, natsSock fd) {
  auto *session = static_cast<Session::Shared *>(loop);
  *user = session;
  notice_silence(fd);
  const std::lock_guard lock(session->mutex);
  session->fd = fd;
  session->trying = nullptr;
  return NATS_OK;
}

natsStatus on_read(void *user, bool add) {
  auto *session = static_cast<Session::Shared *>(user);
  if (add) return NATS_OK;
  const std::lock_guard lock(session->mutex);
  session->fd = -1;  // about to be closed
  return NATS_OK;
}

natsStatus on_write(void *user, bool add) {
  static_cast<Session::Shared *>(user)->write_wanted = add;
  return NATS_OK;
}

natsStatus on_detach(void *) {
  return NATS_OK;
}

// In a thread of the subscription's.
void on_message(natsConnection *, natsSubscription *, natsMsg *raw, void *hold) noexcept {
  const MessagePointer message(raw);
  Session::Shared &session = shared_of(hold);
  const std::string_view subject(natsMsg_GetSubject(raw));
  if (!subject.starts_with(session.inbox)) return;
  Answer answer{Answer::Kind::kAnswered, 0, {}};
  const std::string_view digits = subject.substr(session.inbox.size());
  if (std::from_chars(digits.data(), digits.data() + digits.size(), answer.number).ec != std::errc{}) return;
  try {
    if (natsMsg_IsNoResponders(raw))
      answer.kind = Answer::Kind::kNobody;
    else
      answer.text.assign(natsMsg_GetData(raw), static_cast<size_t>(natsMsg_GetDataLength(raw)));
    session.tell(std::move(answer));
  } catch (const std::exception &) {
    // Out of memory: as if the answer had been lost on the way.
  }
}

// In a thread of the library's.
void on_error(natsConnection *, natsSubscription *, natsStatus status, void *hold) noexcept {
  if (status != NATS_NOT_PERMITTED) return;
  try {
    shared_of(hold).tell({Answer::Kind::kNotPermitted, 0, library_error(status)});
  } catch (const std::exception &) {
  }
}

void on_closed(natsConnection *, void *hold) noexcept {
  let_go(hold);
}

natsStatus on_token(char **token, char **, void *user) noexcept {
  const auto *session = static_cast<const Session::Shared *>(user);
  *token = strdup(session->target->credentials->token.c_str());
  return *token ? NATS_OK : NATS_NO_MEMORY;
}

natsStatus on_sign(char **, unsigned char **signature, int *size, const char *nonce, void *user) noexcept {
  const Target &target = *static_cast<const Session::Shared *>(user)->target;
  const std::string &seed = target.credentials ? target.credentials->seed : target.nkey_seed;
  return nats_Sign(seed.c_str(), nonce, signature, size);
}

}  // namespace

// -- the thread ---------------------------------------------------------------------------------------------

void Session::Shared::run(const Hold &self) noexcept {
  pthread_setname_np(pthread_self(), "retrysafe nats");
  try {
    if (connect(self)) {
      subscribe(self);
      work();
    }
  } catch (const std::exception &failure) {
    end(failure.what());
  }
  disconnect();
  nats_ReleaseThreadMemory();
}

bool Session::Shared::connect(const Hold &self) {
  std::string reasons;
  for (const Endpoint &endpoint : endpoints) {
    {
      const std::lock_guard lock(mutex);
      if (given_up) return false;
      trying = &endpoint;
      deadline = Clock::now() + target->connect_timeout + kGrace;
    }
    try {
      connect_to(endpoint, self);
      return true;
    } catch (const std::exception &failure) {
      const std::string name = endpoint.server.host + ":" + std::to_string(endpoint.server.port);
      reasons += (reasons.empty() ? "" : "; ") + name + ": " + failure.what();
    }
    disconnect();
    const std::lock_guard lock(mutex);
    trying = nullptr;
  }
  end(reasons);
  return false;
}

void Session::Shared::connect_to(const Endpoint &endpoint, const Hold &self) {
  const OptionsPointer options = options_for(endpoint);
  auto hold = std::make_unique<Hold>(self);
  check(natsOptions_SetErrorHandler(options.get(), on_error, hold.get()));
  check(natsOptions_SetClosedCB(options.get(), on_closed, hold.get()));
  check(natsConnection_Connect(&connection, options.get()));
  static_cast<void>(hold.release());  // on_closed lets go of it
  if (natsConnection_HasHeaderSupport(connection) != NATS_OK)
    throw std::runtime_error("the server is too old: it knows no message headers");
}

OptionsPointer Session::Shared::options_for(const Endpoint &endpoint) {
  natsOptions *options = nullptr;
  check(natsOptions_Create(&options));
  OptionsPointer made(options);
  check(natsOptions_SetURL(options, url(endpoint).c_str()));
  check(natsOptions_SetName(options, json_text("retrysafe " + target->destination).c_str()));
  check(natsOptions_SetTimeout(options, target->connect_timeout.count()));

  // A session has one connection, to the address that was checked, and nothing is sent after its end.
  check(natsOptions_SetAllowReconnect(options, false));
  check(natsOptions_SetRetryOnFailedConnect(options, false, nullptr, nullptr));
  check(natsOptions_SetIgnoreDiscoveredServers(options, true));

  check(natsOptions_SetEventLoop(options, this, on_attach, on_read, on_write, on_detach));
  check(natsOptions_SetSendAsap(options, true));  // no thread that flushes
  check(natsOptions_SetPingInterval(options, 0));

  // The host's name is checked even where it is the server that demands TLS.
  check(natsOptions_SetExpectedHostname(options, endpoint.server.host.c_str()));
  if (!target->ca_file.empty())
    check(natsOptions_LoadCATrustedCertificates(options, target->ca_file.c_str()));
  if (is_encrypted(target->key_file)) throw std::runtime_error("the key in key_file is encrypted");
  if (!target->cert_file.empty())
    check(natsOptions_LoadCertificatesChain(options, target->cert_file.c_str(), target->key_file.c_str()));
  if (target->tls || endpoint.server.tls) check(natsOptions_SetSecure(options, true));

  if (!target->user.empty())
    check(natsOptions_SetUserInfo(options, json_text(target->user).c_str(),
                                  json_text(target->password).c_str()));
  if (!target->token.empty()) check(natsOptions_SetToken(options, json_text(target->token).c_str()));
  if (target->credentials)
    check(natsOptions_SetUserCredentialsCallbacks(options, on_token, this, on_sign, this));
  if (!target->nkey.empty()) check(natsOptions_SetNKey(options, target->nkey.c_str(), on_sign, this));
  return made;
}

void Session::Shared::subscribe(const Hold &self) {
  auto hold = std::make_unique<Hold>(self);
  check(natsConnection_Subscribe(&subscription, connection, (inbox + "*").c_str(), on_message, hold.get()));
  void *const released = hold.release();
  check(natsSubscription_SetOnCompleteCB(subscription, let_go, released));
}

void Session::Shared::work() {
  int socket;
  {
    const std::lock_guard lock(mutex);
    state = State::kReady;
    deadline = Clock::time_point::max();
    socket = fd;
    owner->ring();
  }
  while (!is_given_up()) {
    send();
    if (write_wanted) natsConnection_ProcessWriteEvent(connection);
    if (natsConnection_IsClosed(connection)) break;
    pollfd waiting[] = {{socket, static_cast<short>(write_wanted ? POLLIN | POLLOUT : POLLIN), 0},
                        {thread.fd(), POLLIN, 0}};
    poll(waiting, 2, -1);
    if (waiting[1].revents) thread.silence();
    errno = 0;  // after an error of TLS the library looks at it, though nobody may have set it
    if (waiting[0].revents & ~POLLOUT) natsConnection_ProcessReadEvent(connection);
    if (natsConnection_IsClosed(connection)) break;
    if (is_flooded(socket)) return end("the server sends more than any answer takes");
  }
  const char *text = nullptr;
  const natsStatus status = natsConnection_GetLastError(connection, &text);
  end("connection lost: " + readable(text, status));
}

void Session::Shared::send() {
  decltype(outgoing) messages;
  {
    const std::lock_guard lock(mutex);
    messages.swap(outgoing);
  }
  for (const auto &[number, message] : messages) {
    const natsStatus status = natsConnection_PublishMsg(connection, message.get());
    if (status == NATS_MAX_PAYLOAD)
      tell({Answer::Kind::kTooLarge, number, library_error(status)});
    else if (status == NATS_CONNECTION_CLOSED)
      return;
    else
      check(status);
  }
}

// What is still in the library's buffer is not sent: its events have been reported, or will be, as not
// delivered. A plain close would flush it, and wait for the server to confirm.
void Session::Shared::disconnect() {
  if (!connection) return;
  {
    const std::lock_guard lock(mutex);
    if (fd >= 0) ::shutdown(fd, SHUT_RDWR);
  }
  for (int i = 0; i < kReadsAtEnd && !natsConnection_IsClosed(connection); ++i) {
    errno = 0;
    natsConnection_ProcessReadEvent(connection);
  }
  natsSubscription_Destroy(std::exchange(subscription, nullptr));
  natsConnection_Destroy(std::exchange(connection, nullptr));
}

bool Session::Shared::is_given_up() {
  const std::lock_guard lock(mutex);
  return given_up;
}

bool Session::Shared::is_flooded(int socket) {
  {
    const std::lock_guard lock(mutex);
    if (std::exchange(answered, false)) flood_guard.reset(socket);
  }
  return flood_guard.is_flooded(socket);
}

void Session::Shared::tell(Answer answer) {
  const std::lock_guard lock(mutex);
  answers.push_back(std::move(answer));
  owner->ring();
}

void Session::Shared::end(const std::string &reason) {
  const std::lock_guard lock(mutex);
  state = State::kEnded;
  error = reason;
  owner->ring();
}

// -- the owner's side ---------------------------------------------------------------------------------------

void Session::Shared::give_up() {
  {
    const std::lock_guard lock(mutex);
    given_up = true;
    if (fd >= 0) ::shutdown(fd, SHUT_RDWR);  // it may be stuck in a write
    thread.ring();
  }
  hurry();
}

void Session::Shared::hurry() {
  std::vector<int> in_use;
  {
    Threads &all = threads();
    const std::lock_guard lock(all.mutex);
    for (Shared *session : all.sessions) {
      const std::lock_guard session_lock(session->mutex);
      if (session->fd >= 0) in_use.push_back(session->fd);
    }
  }
  const std::lock_guard lock(mutex);
  if (trying) shut_down_sockets_to(trying->address, in_use);
  deadline = Clock::now() + kGrace;  // and again, if that was before it had connected
}

Session::Session(std::shared_ptr<const Target> target, std::vector<Endpoint> endpoints,
                 std::shared_ptr<const Bell> bell) {
  initialise_library();
  shared_ = std::make_shared<Shared>(std::move(target), std::move(endpoints), std::move(bell));
  Threads &all = threads();
  const std::lock_guard lock(all.mutex);
  all.sessions.push_back(shared_.get());
  try {
    std::thread([shared = shared_]() mutable {
      shared->run(shared);
      Threads &running = threads();
      const std::lock_guard running_lock(running.mutex);
      std::erase(running.sessions, shared.get());
      shared.reset();
      running.ended.notify_all();
    }).detach();
  } catch (...) {
    all.sessions.pop_back();
    throw;
  }
}

Session::~Session() {
  try {
    shared_->give_up();
  } catch (const std::exception &) {
    // No memory to look for its socket: it ends when the library's own time limit does.
  }
}

Session::State Session::state() const {
  const std::lock_guard lock(shared_->mutex);
  return shared_->state;
}

std::string Session::error() const {
  const std::lock_guard lock(shared_->mutex);
  return shared_->error;
}

Clock::time_point Session::deadline() const {
  const std::lock_guard lock(shared_->mutex);
  return shared_->deadline;
}

void Session::hurry() {
  shared_->hurry();
}

void Session::publish(uint64_t number, const std::string &subject, const std::vector<Header> &headers,
                      std::string_view payload) {
  natsMsg *raw = nullptr;
  check(natsMsg_Create(&raw, subject.c_str(), (shared_->inbox + std::to_string(number)).c_str(),
                       payload.data(), static_cast<int>(payload.size())));
  MessagePointer message(raw);
  for (const Header &header : headers)
    check(natsMsgHeader_Set(raw, header.name.c_str(), header.value.c_str()));
  const std::lock_guard lock(shared_->mutex);
  shared_->outgoing.emplace_back(number, std::move(message));
}

void Session::flush() {
  shared_->thread.ring();
}

std::vector<Answer> Session::take_answers() {
  std::vector<Answer> answers;
  const std::lock_guard lock(shared_->mutex);
  answers.swap(shared_->answers);
  return answers;
}

void Session::answered() {
  const std::lock_guard lock(shared_->mutex);
  shared_->answered = true;
}

size_t Session::lingering() {
  Threads &all = threads();
  const std::lock_guard lock(all.mutex);
  return static_cast<size_t>(std::count_if(all.sessions.begin(), all.sessions.end(),
                                           [](Shared *session) { return session->is_given_up(); }));
}

}  // namespace retrysafe::nats
