// What the receiver can take: flood PORT CONNECTIONS REQUESTS posts 200 bytes over and over, one request
// under way on each connection, and prints requests per second.
#include <arpa/inet.h>
#include <netinet/tcp.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <array>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <string_view>

int main(int argc, char **argv) {
  if (argc != 4) return 2;
  const long connections = std::atol(argv[2]);
  const long long requests = std::atoll(argv[3]);
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_port = htons(static_cast<uint16_t>(std::atoi(argv[1])));
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  const std::string request =
      "POST / HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: 200\r\n\r\n" +
      std::string(200, 'x');
  const std::string_view answer = "HTTP/1.1 204 No Content\r\n\r\n";

  const int poller = epoll_create1(0);
  const auto start = std::chrono::steady_clock::now();
  long long sent = 0;
  long long answered = 0;
  const auto post = [&](int connection) {
    if (sent == requests) return;
    ++sent;
    if (write(connection, request.data(), request.size()) != static_cast<ssize_t>(request.size()))
      std::exit(1);
  };
  for (long i = 0; i < connections; ++i) {
    const int connection = socket(AF_INET, SOCK_STREAM, 0);
    const int on = 1;
    setsockopt(connection, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
    epoll_event event{};
    event.events = EPOLLIN;
    event.data.fd = connection;
    if (connect(connection, reinterpret_cast<sockaddr *>(&address), sizeof address) ||
        epoll_ctl(poller, EPOLL_CTL_ADD, connection, &event)) {
      std::perror("flood");
      return 1;
    }
    post(connection);
  }
  std::array<epoll_event, 256> events;
  std::array<char, 4096> buffer;
  while (answered < sent) {
    const int count = epoll_wait(poller, events.data(), static_cast<int>(events.size()), -1);
    for (int i = 0; i < count; ++i) {
      const int connection = events[static_cast<size_t>(i)].data.fd;
      // An answer is smaller than any segment: it comes whole.
      if (read(connection, buffer.data(), buffer.size()) != static_cast<ssize_t>(answer.size())) return 1;
      ++answered;
      post(connection);
    }
  }
  const std::chrono::duration<double> took = std::chrono::steady_clock::now() - start;
  std::printf("%.0f\n", static_cast<double>(answered) / took.count());
}
