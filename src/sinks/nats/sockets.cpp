#include "sinks/nats/sockets.hpp"

#include <netinet/in.h>

#include <algorithm>
#include <charconv>
#include <cstring>
#include <filesystem>
#include <string>
#include <system_error>

namespace retrysafe::nats {

namespace {

bool same(const sockaddr_storage &a, const sockaddr_storage &b) {
  if (a.ss_family != b.ss_family) return false;
  if (a.ss_family == AF_INET) {
    sockaddr_in left, right;
    std::memcpy(&left, &a, sizeof left);
    std::memcpy(&right, &b, sizeof right);
    return left.sin_port == right.sin_port && left.sin_addr.s_addr == right.sin_addr.s_addr;
  }
  if (a.ss_family != AF_INET6) return false;
  sockaddr_in6 left, right;
  std::memcpy(&left, &a, sizeof left);
  std::memcpy(&right, &b, sizeof right);
  return left.sin6_port == right.sin6_port &&
         std::memcmp(&left.sin6_addr, &right.sin6_addr, sizeof left.sin6_addr) == 0;
}

}  // namespace

void shut_down_sockets_to(const sockaddr_storage &peer, std::span<const int> keep) {
  std::error_code none;
  for (const auto &entry : std::filesystem::directory_iterator("/proc/self/fd", none)) {
    const std::string name = entry.path().filename();
    int fd = -1;
    std::from_chars(name.data(), name.data() + name.size(), fd);
    if (fd < 0 || std::find(keep.begin(), keep.end(), fd) != keep.end()) continue;
    sockaddr_storage address{};
    socklen_t size = sizeof address;
    if (getpeername(fd, reinterpret_cast<sockaddr *>(&address), &size) == 0 && same(address, peer))
      ::shutdown(fd, SHUT_RDWR);
  }
}

}  // namespace retrysafe::nats
