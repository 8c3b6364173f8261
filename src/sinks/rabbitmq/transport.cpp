#include "sinks/rabbitmq/transport.hpp"

#include <arpa/inet.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <openssl/err.h>
#include <openssl/x509v3.h>
#include <poll.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <climits>
#include <new>
#include <stdexcept>
#include <system_error>

namespace retrysafe::rabbitmq {

namespace {

constexpr int kKeepAliveSeconds = 60;

std::string system_error(int number) {
  return std::generic_category().message(number);
}

std::string tls_error() {
  const unsigned long code = ERR_peek_last_error();
  const char *reason = code ? ERR_reason_error_string(code) : nullptr;
  return reason ? reason : "unknown error";
}

bool is_address(const std::string &host) {
  unsigned char ignored[sizeof(in6_addr)];
  return inet_pton(AF_INET, host.c_str(), ignored) == 1 || inet_pton(AF_INET6, host.c_str(), ignored) == 1;
}

void set_option(int socket, int level, int option, int value) {
  setsockopt(socket, level, option, &value, sizeof value);
}

void require(bool good) {
  if (!good) throw std::bad_alloc();
}

}  // namespace

void Transport::connect(const sink::Address &address, int port) {
  close();
  error_.clear();
  host_ = address.host;
  sockaddr_storage to = address.address;
  const bool ipv4 = to.ss_family == AF_INET;
  if (ipv4)
    reinterpret_cast<sockaddr_in *>(&to)->sin_port = htons(static_cast<uint16_t>(port));
  else
    reinterpret_cast<sockaddr_in6 *>(&to)->sin6_port = htons(static_cast<uint16_t>(port));

  socket_ = socket(to.ss_family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
  if (socket_ < 0) return fail("could not open a socket: " + system_error(errno));
  set_option(socket_, IPPROTO_TCP, TCP_NODELAY, 1);
  // Heart-beats may be off on both sides; then the system finds out that nobody is there any more.
  set_option(socket_, SOL_SOCKET, SO_KEEPALIVE, 1);
  set_option(socket_, IPPROTO_TCP, TCP_KEEPIDLE, kKeepAliveSeconds);
  set_option(socket_, IPPROTO_TCP, TCP_KEEPINTVL, kKeepAliveSeconds / 4);
  set_option(socket_, IPPROTO_TCP, TCP_KEEPCNT, 4);
  state_ = State::kConnecting;
  const socklen_t size = ipv4 ? sizeof(sockaddr_in) : sizeof(sockaddr_in6);
  if (::connect(socket_, reinterpret_cast<sockaddr *>(&to), size) != 0 && errno != EINPROGRESS)
    return fail("could not connect: " + system_error(errno));
  watch(EPOLLOUT);
}

Transport::State Transport::advance() {
  if (state_ == State::kConnecting) {
    pollfd descriptor{socket_, POLLOUT, 0};
    if (poll(&descriptor, 1, 0) <= 0) return state_;
    int error = 0;
    socklen_t size = sizeof error;
    getsockopt(socket_, SOL_SOCKET, SO_ERROR, &error, &size);
    if (error != 0) {
      fail("could not connect: " + system_error(error));
    } else if (tls_) {
      state_ = State::kShakingHands;
      ssl_.reset(SSL_new(tls_->get()));
      require(ssl_ != nullptr && SSL_set_fd(ssl_.get(), socket_) == 1);
      SSL_set_mode(ssl_.get(), SSL_MODE_ENABLE_PARTIAL_WRITE | SSL_MODE_ACCEPT_MOVING_WRITE_BUFFER);
      if (is_address(host_)) {
        require(X509_VERIFY_PARAM_set1_ip_asc(SSL_get0_param(ssl_.get()), host_.c_str()) == 1);
      } else {
        SSL_set_hostflags(ssl_.get(), X509_CHECK_FLAG_NO_PARTIAL_WILDCARDS);
        require(SSL_set1_host(ssl_.get(), host_.c_str()) == 1);
        require(SSL_ctrl(ssl_.get(), SSL_CTRL_SET_TLSEXT_HOSTNAME, TLSEXT_NAMETYPE_host_name, host_.data()) ==
                1);
      }
    } else {
      state_ = State::kOpen;
      watch(EPOLLIN);
    }
  }
  if (state_ == State::kShakingHands) handshake();
  return state_;
}

void Transport::handshake() {
  ERR_clear_error();
  const int result = SSL_connect(ssl_.get());
  if (result == 1) {
    state_ = State::kOpen;
    watch(EPOLLIN);
    return;
  }
  switch (SSL_get_error(ssl_.get(), result)) {
    case SSL_ERROR_WANT_READ:
      return watch(EPOLLIN);
    case SSL_ERROR_WANT_WRITE:
      return watch(EPOLLOUT);
    default:
      break;
  }
  if (const long verdict = SSL_get_verify_result(ssl_.get()); verdict != X509_V_OK)
    return fail(std::string("the broker's certificate is not accepted: ") +
                X509_verify_cert_error_string(verdict));
  fail(ERR_peek_last_error() ? "TLS: " + tls_error()
                             : std::string("the connection was closed while setting up TLS"));
}

size_t Transport::read(std::span<char> bytes) {
  if (state_ != State::kOpen) return 0;
  if (ssl_) {
    ERR_clear_error();
    return tls_result(
        SSL_read(ssl_.get(), bytes.data(), static_cast<int>(std::min<size_t>(bytes.size(), INT_MAX))),
        "reading");
  }
  const ssize_t count = recv(socket_, bytes.data(), bytes.size(), 0);
  if (count > 0) return static_cast<size_t>(count);
  if (count == 0)
    fail("the broker closed the connection");
  else if (errno != EAGAIN && errno != EINTR)
    fail("the connection broke: " + system_error(errno));
  return 0;
}

size_t Transport::write(std::string_view bytes) {
  if (state_ != State::kOpen || bytes.empty()) return 0;
  if (ssl_) {
    ERR_clear_error();
    tls_wants_write_ = false;
    return tls_result(
        SSL_write(ssl_.get(), bytes.data(), static_cast<int>(std::min<size_t>(bytes.size(), INT_MAX))),
        "writing");
  }
  const ssize_t count = send(socket_, bytes.data(), bytes.size(), MSG_NOSIGNAL);
  if (count >= 0) return static_cast<size_t>(count);
  if (errno != EAGAIN && errno != EINTR) fail("the connection broke: " + system_error(errno));
  return 0;
}

size_t Transport::tls_result(int result, const char *doing) {
  if (result > 0) return static_cast<size_t>(result);
  const int number = errno;
  switch (SSL_get_error(ssl_.get(), result)) {
    case SSL_ERROR_WANT_READ:
      return 0;
    case SSL_ERROR_WANT_WRITE:
      tls_wants_write_ = true;
      return 0;
    case SSL_ERROR_ZERO_RETURN:
      fail("the broker closed the connection");
      return 0;
    case SSL_ERROR_SYSCALL:
      fail("the connection broke: " + (number ? system_error(number) : std::string("end of file")));
      return 0;
    default:
      fail(std::string("TLS failed while ") + doing + ": " + tls_error());
      return 0;
  }
}

void Transport::want_write(bool wanted) {
  if (state_ == State::kOpen) watch(wanted || tls_wants_write_ ? EPOLLIN | EPOLLOUT : EPOLLIN);
}

void Transport::close() {
  // The broker is told of the end by the protocol; TLS adds nothing to that.
  ssl_.reset();
  if (socket_ >= 0) ::close(socket_);
  socket_ = -1;
  watched_ = 0;
  tls_wants_write_ = false;
  state_ = State::kClosed;
}

void Transport::fail(std::string reason) {
  error_ = std::move(reason);
  close();
}

void Transport::watch(uint32_t events) {
  if (events == watched_) return;
  epoll_event event{};
  event.events = events;
  epoll_ctl(epoll_, watched_ == 0 ? EPOLL_CTL_ADD : EPOLL_CTL_MOD, socket_, &event);
  watched_ = events;
}

}  // namespace retrysafe::rabbitmq
