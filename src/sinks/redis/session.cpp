#include "sinks/redis/session.hpp"

#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <system_error>
#include <utility>

#include "sinks/redis/command.hpp"

namespace retrysafe::redis {

namespace {

constexpr const char *kClosedByServer = "the server closed the connection";

std::string system_error(const char *what, int code) {
  return std::string(what) + ": " + std::generic_category().message(code);
}

void set_port(sockaddr_storage *address, uint16_t port) {
  if (address->ss_family == AF_INET)
    reinterpret_cast<sockaddr_in *>(address)->sin_port = htons(port);
  else
    reinterpret_cast<sockaddr_in6 *>(address)->sin6_port = htons(port);
}

}  // namespace

Session::Session(const Target &target) : target_(target), epoll_(epoll_create1(EPOLL_CLOEXEC)) {
  if (epoll_ < 0) throw std::system_error(errno, std::generic_category(), "epoll_create1");
  epoll_event event{};
  event.events = EPOLLIN;
  epoll_ctl(epoll_, EPOLL_CTL_ADD, resolver_.fd(), &event);
}

Session::~Session() {
  close();
  ::close(epoll_);
}

void Session::open() {
  close();
  error_.clear();
  addresses_.clear();
  state_ = State::kResolving;
  deadline_ = Clock::now() + target_.connect_timeout;
  resolver_.ask({target_.host});
}

void Session::close() {
  if (socket_ >= 0) ::close(socket_);
  socket_ = -1;
  watched_ = 0;
  state_ = State::kClosed;
  tls_.reset();
  reader_.reset();
  commands_.clear();
  output_.clear();
  output_sent_ = 0;
  ended_.clear();
}

void Session::close(std::string reason) {
  error_ = std::move(reason);
  close();
}

// While addresses are left the next one is tried.
void Session::fail(std::string reason) {
  const bool opening = state_ != State::kReady;
  close(std::move(reason));
  if (opening) try_next_address();
}

Session::State Session::advance() {
  resolve();
  if (state_ == State::kConnecting) connected();
  if (state_ == State::kSecuring || state_ == State::kGreeting || state_ == State::kReady) {
    read_socket();
    push();
  }
  if (state_ == State::kGreeting) take_greeting();
  if (state_ != State::kClosed && state_ != State::kReady && Clock::now() >= deadline_)
    fail(state_ == State::kResolving ? "resolving the host name took longer than connect_timeout"
                                     : "connecting took longer than connect_timeout");
  return state_;
}

void Session::resolve() {
  std::vector<sink::Address> found;
  std::string error;
  if (!resolver_.answered(&found, &error) || state_ != State::kResolving)
    return;  // nobody waits for a late answer
  error_ = error.empty() ? "the host has no address" : error;
  for (const sink::Address &address : found) {
    const auto *sockaddr_of = reinterpret_cast<const sockaddr *>(&address.address);
    if (target_.addresses.allows(target_.host, sockaddr_of))
      addresses_.push_back(address);
    else
      error_ = AddressFilter::refusal(sockaddr_of);
  }
  std::reverse(addresses_.begin(), addresses_.end());
  try_next_address();
}

void Session::try_next_address() {
  state_ = State::kClosed;
  if (addresses_.empty()) return;
  sockaddr_storage address = addresses_.back().address;
  addresses_.pop_back();
  set_port(&address, target_.port);
  const socklen_t size = address.ss_family == AF_INET ? sizeof(sockaddr_in) : sizeof(sockaddr_in6);
  socket_ = ::socket(address.ss_family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
  if (socket_ < 0) return fail(system_error("could not make a socket", errno));
  const int on = 1;
  setsockopt(socket_, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
  setsockopt(socket_, SOL_SOCKET, SO_KEEPALIVE, &on, sizeof on);
  state_ = State::kConnecting;
  deadline_ = Clock::now() + target_.connect_timeout;
  watch();
  if (::connect(socket_, reinterpret_cast<const sockaddr *>(&address), size) != 0 && errno != EINPROGRESS)
    fail(system_error("could not connect", errno));
}

void Session::connected() {
  sockaddr_storage peer;
  socklen_t size = sizeof peer;
  int code = 0;
  socklen_t code_size = sizeof code;
  getsockopt(socket_, SOL_SOCKET, SO_ERROR, &code, &code_size);
  if (code != 0) return fail(system_error("could not connect", code));
  if (getpeername(socket_, reinterpret_cast<sockaddr *>(&peer), &size) != 0) return;  // not yet
  reader_.emplace();
  if (!target_.tls) return greet();
  tls_.emplace(*target_.tls, target_.host);
  state_ = State::kSecuring;
}

void Session::greet() {
  state_ = State::kGreeting;
  greetings_ = 0;
  const auto say = [&](std::initializer_list<std::string_view> words) {
    append_command(words, &commands_);
    ++greetings_;
  };
  if (!target_.user.empty())
    say({"AUTH", target_.user, target_.password});
  else if (!target_.password.empty())
    say({"AUTH", target_.password});
  if (target_.database != 0) say({"SELECT", std::to_string(target_.database)});
  // What is wrong with a user of whom nothing was asked shows better here than with the first event.
  only_asks_ = greetings_ == 0;
  if (only_asks_) say({"PING"});
  push();
}

void Session::take_greeting() {
  Reply reply;
  while (greetings_ > 0 && next_reply(&reply)) {
    // Not allowed to do what was only a question: the rest will show. Not so of SELECT: events would go to
    // another database.
    const bool harmless = only_asks_ && reply.text.starts_with("NOPERM ");
    if (reply.type == Reply::Type::kError && !harmless) return fail(reason_of(reply.text));
    --greetings_;
  }
  if (state_ != State::kGreeting || greetings_ > 0) return;
  state_ = State::kReady;
  addresses_.clear();
  error_.clear();
}

// Whatever the socket has, even when the other side is gone: its last word may tell why.
void Session::read_socket() {
  char buffer[16 * 1024];
  std::string plain;
  // Not without an end: there is other work, and what is read is kept until it is looked at.
  for (int rounds = 0; rounds < 16 && ended_.empty(); ++rounds) {
    const ssize_t size = recv(socket_, buffer, sizeof buffer, 0);
    if (size < 0 && errno == EINTR) continue;
    if (size < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) break;
    if (size < 0) ended_ = system_error("the connection is lost", errno);
    if (size == 0) ended_ = kClosedByServer;
    if (size <= 0) break;
    const std::string_view bytes(buffer, static_cast<size_t>(size));
    if (!tls_) {
      reader_->feed(bytes);
      continue;
    }
    tls_->feed(bytes);
    if (!tls_->is_ready() && !tls_->handshake()) return fail(tls_->error());
    plain.clear();
    if (tls_->is_ready() && !tls_->decrypt(&plain)) ended_ = tls_->error();
    reader_->feed(plain);
  }
  if (state_ == State::kSecuring) {
    if (!tls_->is_ready() && !tls_->handshake()) return fail(tls_->error());
    if (tls_->is_ready()) greet();
  }
  if (!ended_.empty() && state_ == State::kSecuring) fail(ended_);
}

void Session::push() {
  if (state_ == State::kClosed) return;
  if (tls_) {
    if (tls_->is_ready() && !commands_.empty()) {
      if (!tls_->encrypt(commands_)) ended_ = tls_->error();
      commands_.clear();
    }
    tls_->take_output(&output_);
  } else if (output_.empty()) {
    output_.swap(commands_);
  } else {
    output_.erase(0, output_sent_);
    output_sent_ = 0;
    output_ += commands_;
    commands_.clear();
  }
  write_socket();
  if (state_ != State::kClosed) watch();
}

// An error here is not told: reading gives what the server said before, and then tells that the connection is
// lost.
void Session::write_socket() {
  while (output_sent_ < output_.size()) {
    const ssize_t size =
        send(socket_, output_.data() + output_sent_, output_.size() - output_sent_, MSG_NOSIGNAL);
    if (size < 0 && errno == EINTR) continue;
    if (size < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) return;
    if (size < 0) break;
    output_sent_ += static_cast<size_t>(size);
    bytes_sent_ += static_cast<uint64_t>(size);
  }
  output_.clear();
  output_sent_ = 0;
}

bool Session::next_reply(Reply *reply) {
  if (state_ != State::kGreeting && state_ != State::kReady) return false;
  switch (reader_->next(reply)) {
    case ReplyReader::Result::kReply:
      return true;
    case ReplyReader::Result::kGarbage:
      fail("the answer is not that of a Redis server");
      return false;
    case ReplyReader::Result::kIncomplete:
      break;
  }
  if (!ended_.empty()) fail(ended_);
  return false;
}

void Session::watch() {
  uint32_t wanted = EPOLLIN;
  if (state_ == State::kConnecting || output_sent_ < output_.size()) wanted |= EPOLLOUT;
  if (wanted == watched_) return;
  epoll_event event{};
  event.events = wanted;
  epoll_ctl(epoll_, watched_ == 0 ? EPOLL_CTL_ADD : EPOLL_CTL_MOD, socket_, &event);
  watched_ = wanted;
}

}  // namespace retrysafe::redis
