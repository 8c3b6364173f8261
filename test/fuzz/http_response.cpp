// What an HTTP server answers, through the library and the whole sink: it stands on the loopback interface,
// takes the request, answers with the input and closes.
#include "sinks/http/http_sink.hpp"

#include <arpa/inet.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include "input.hpp"
#include "options.hpp"

using namespace retrysafe;

namespace {

class Server {
 public:
  Server() : listener_(socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0)) {
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    socklen_t size = sizeof address;
    auto *generic = reinterpret_cast<sockaddr *>(&address);
    fuzz::require(bind(listener_, generic, size) == 0 && listen(listener_, 16) == 0);
    fuzz::require(getsockname(listener_, generic, &size) == 0);
    port_ = ntohs(address.sin_port);
  }
  Server(const Server &) = delete;
  Server &operator=(const Server &) = delete;

  int port() const { return port_; }

  // One step of what can be done at once.
  void answer(std::string_view bytes) {
    if (connection_ < 0) connection_ = accept4(listener_, nullptr, nullptr, SOCK_NONBLOCK | SOCK_CLOEXEC);
    if (connection_ < 0) return;
    char request[16384];
    const ssize_t count = read(connection_, request, sizeof request);
    if (count > 0) request_.append(request, static_cast<size_t>(count));
    // The payload ends it.
    if (!request_.ends_with("{}") && count != 0) return;
    (void)!write(connection_, bytes.data(), bytes.size());
    hang_up();
  }
  void hang_up() {
    if (connection_ >= 0) close(connection_);
    connection_ = -1;
    request_.clear();
  }

 private:
  int listener_;
  int port_ = 0;
  int connection_ = -1;
  std::string request_;
};

bool has_status_of_success(std::string_view answer) {
  for (size_t at = 0; (at = answer.find("HTTP/", at)) != std::string_view::npos; at += 5) {
    const size_t blank = answer.find(' ', at);
    if (blank != std::string_view::npos && answer.substr(blank + 1).starts_with('2')) return true;
  }
  return false;
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
  static Server server;
  const std::string_view answer(reinterpret_cast<const char *>(data), size);
  fuzz::InputOptions options;
  options.add("url", "http://127.0.0.1:" + std::to_string(server.port()) + "/events");
  options.add("headers.Authorization", "Bearer abcdefghijk");
  options.add("timeout", "2000");
  options.add("response_bytes", "4096");
  retrysafe_event event{};
  event.tag = 7;
  event.id = {"7c9e6679-7425-80de-944b-e07fc1f90ae7", 36};
  event.type = {"order.created", 13};
  event.source = {"retrysafe/shop", 14};
  event.time = {"2026-01-02T03:04:05.678901Z", 27};
  event.event_key = {"order-1", 7};
  event.scope = {"", 0};
  event.payload = {"{}", 2};
  {
    http::HttpSink sink(options.with_addresses("127.0.0.1"));
    fuzz::require(sink.submit(event));
    sink.flush();
    retrysafe_outcome outcome;
    int timeout_ms = 0;
    while (sink.collect({&outcome, 1}, &timeout_ms) == 0) server.answer(answer);
    fuzz::require(outcome.tag == 7);
    fuzz::require(fuzz::is_one_line(outcome.reason));
    fuzz::require((outcome.status == RETRYSAFE_DELIVERED) == (outcome.reason[0] == '\0'));
    fuzz::require(std::string_view(outcome.reason).find("abcdefghijk") == std::string_view::npos);
    fuzz::require(outcome.retry_after_ms >= -1 && outcome.retry_after_ms <= 24 * 3600 * 1000);
    // The word on delivery is the server's.
    if (outcome.status == RETRYSAFE_DELIVERED) fuzz::require(has_status_of_success(answer));
  }
  server.hang_up();
  return 0;
}
