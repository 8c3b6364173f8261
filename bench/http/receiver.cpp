// A web server that does next to nothing: answers 204 to every request on loopback and counts. One thread,
// epoll, HTTP/1.1 with Content-Length. It prints its port, and when its standard input ends, how many
// requests there were.
#include <arpa/inet.h>
#include <netinet/tcp.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <array>
#include <charconv>
#include <cstdio>
#include <map>
#include <string>
#include <string_view>

namespace {

// The length of the request that `data` begins with, 0 while it is not complete.
size_t request_length(std::string_view data) {
  const size_t end = data.find("\r\n\r\n");
  if (end == std::string_view::npos) return 0;
  const std::string_view head = data.substr(0, end);
  size_t body = 0;
  for (const std::string_view name : {"\r\nContent-Length: ", "\r\ncontent-length: "}) {
    const size_t at = head.find(name);
    if (at == std::string_view::npos) continue;
    std::from_chars(head.data() + at + name.size(), head.data() + head.size(), body);
  }
  const size_t length = end + 4 + body;
  return data.size() >= length ? length : 0;
}

}  // namespace

int main() {
  const int listener = socket(AF_INET, SOCK_STREAM, 0);
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t size = sizeof address;
  if (listener < 0 || bind(listener, reinterpret_cast<sockaddr *>(&address), size) ||
      listen(listener, 1024) || getsockname(listener, reinterpret_cast<sockaddr *>(&address), &size)) {
    std::perror("receiver");
    return 1;
  }
  std::printf("%d\n", ntohs(address.sin_port));
  std::fflush(stdout);

  const int poller = epoll_create1(0);
  const auto watch = [poller](int descriptor) {
    epoll_event event{};
    event.events = EPOLLIN;
    event.data.fd = descriptor;
    epoll_ctl(poller, EPOLL_CTL_ADD, descriptor, &event);
  };
  watch(listener);
  watch(STDIN_FILENO);

  std::map<int, std::string> connections;  // what has come of a request
  long long requests = 0;
  std::array<epoll_event, 256> events;
  std::array<char, 65536> buffer;
  for (;;) {
    const int count = epoll_wait(poller, events.data(), static_cast<int>(events.size()), -1);
    for (int i = 0; i < count; ++i) {
      const int descriptor = events[static_cast<size_t>(i)].data.fd;
      if (descriptor == listener) {
        const int connection = accept(listener, nullptr, nullptr);
        const int on = 1;
        setsockopt(connection, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
        connections[connection];
        watch(connection);
        continue;
      }
      const ssize_t got = read(descriptor, buffer.data(), buffer.size());
      if (descriptor == STDIN_FILENO) {
        std::printf("%lld\n", requests);
        return 0;
      }
      if (got <= 0) {
        connections.erase(descriptor);
        close(descriptor);
        continue;
      }
      std::string &pending = connections[descriptor];
      pending.append(buffer.data(), static_cast<size_t>(got));
      std::string answers;
      size_t done = 0;
      while (const size_t length = request_length(std::string_view(pending).substr(done))) {
        done += length;
        ++requests;
        answers += "HTTP/1.1 204 No Content\r\n\r\n";
      }
      pending.erase(0, done);
      if (!answers.empty() && write(descriptor, answers.data(), answers.size()) < 0) std::perror("receiver");
    }
  }
}
