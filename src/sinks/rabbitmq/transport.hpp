// Bytes to and from a broker, over TCP or TLS, without waiting.
#pragma once

#include <openssl/ssl.h>

#include <memory>
#include <span>
#include <string>
#include <string_view>

#include "sinks/resolver.hpp"
#include "sinks/tls_context.hpp"

namespace retrysafe::rabbitmq {

class Transport {
 public:
  enum class State { kClosed, kConnecting, kShakingHands, kOpen };

  // `tls`: null for plain TCP. Watches its socket with the epoll descriptor.
  Transport(const sink::TlsContext *tls, int epoll) : tls_(tls), epoll_(epoll), ssl_(nullptr, SSL_free) {}
  ~Transport() { close(); }
  Transport(const Transport &) = delete;
  Transport &operator=(const Transport &) = delete;

  void connect(const sink::Address &address, int port);
  // Goes on with connecting. Back in kClosed: it failed, and error() tells why.
  State advance();
  State state() const { return state_; }
  const std::string &error() const { return error_; }

  // Both return how many bytes went through, 0 when none can go now. A connection that ends is closed.
  size_t read(std::span<char> bytes);
  size_t write(std::string_view bytes);
  // Whether to be woken when something can be written.
  void want_write(bool wanted);

  void close();

 private:
  void handshake();
  void fail(std::string reason);
  size_t tls_result(int result, const char *doing);
  void watch(uint32_t events);

  const sink::TlsContext *tls_;
  int epoll_;
  int socket_ = -1;
  uint32_t watched_ = 0;
  bool tls_wants_write_ = false;
  std::unique_ptr<SSL, void (*)(SSL *)> ssl_;
  std::string host_;
  State state_ = State::kClosed;
  std::string error_;
};

}  // namespace retrysafe::rabbitmq
