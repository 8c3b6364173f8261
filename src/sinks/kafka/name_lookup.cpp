#include "sinks/kafka/name_lookup.hpp"

#include <netinet/in.h>
#include <poll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <cerrno>
#include <charconv>
#include <cstring>
#include <new>
#include <system_error>
#include <vector>

#include "sinks/resolver.hpp"

namespace retrysafe::kafka {

namespace {

// What the library gets: one block, whose first member is the head of the list.
struct Entry {
  addrinfo info;
  sockaddr_storage address;
};

addrinfo *make_list(const std::vector<sink::Address> &found, in_port_t port) {
  auto *entries = new Entry[found.size()]();
  for (size_t i = 0; i < found.size(); ++i) {
    Entry &entry = entries[i];
    entry.address = found[i].address;
    entry.info.ai_family = entry.address.ss_family;
    entry.info.ai_socktype = SOCK_STREAM;
    entry.info.ai_protocol = IPPROTO_TCP;
    entry.info.ai_addr = reinterpret_cast<sockaddr *>(&entry.address);
    if (entry.address.ss_family == AF_INET) {
      entry.info.ai_addrlen = sizeof(sockaddr_in);
      reinterpret_cast<sockaddr_in *>(&entry.address)->sin_port = port;
    } else {
      entry.info.ai_addrlen = sizeof(sockaddr_in6);
      reinterpret_cast<sockaddr_in6 *>(&entry.address)->sin6_port = port;
    }
    entry.info.ai_next = i + 1 < found.size() ? &entries[i + 1].info : nullptr;
  }
  return &entries[0].info;
}

void free_list(addrinfo *list) {
  delete[] reinterpret_cast<Entry *>(list);
}

}  // namespace

NameLookup::NameLookup(const AddressFilter &addresses, std::chrono::milliseconds timeout)
    : addresses_(addresses), timeout_(timeout), stop_fd_(eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC)) {
  if (stop_fd_ < 0) throw std::system_error(errno, std::generic_category(), "eventfd");
}

NameLookup::~NameLookup() {
  close(stop_fd_);
}

void NameLookup::stop() {
  eventfd_write(stop_fd_, 1);
}

int NameLookup::resolve(const char *node, const char *service, const addrinfo *, addrinfo **list,
                        void *self) noexcept {
  if (!node) {
    free_list(*list);
    return 0;
  }
  try {
    return static_cast<NameLookup *>(self)->look_up(node, service, list);
  } catch (const std::bad_alloc &) {
    return EAI_MEMORY;
  } catch (const std::exception &) {
    return EAI_FAIL;
  }
}

int NameLookup::look_up(const char *node, const char *service, addrinfo **list) {
  unsigned port = 0;
  const std::string_view digits(service ? service : "");
  if (std::from_chars(digits.data(), digits.data() + digits.size(), port).ec != std::errc{} || port > 65535)
    return EAI_SERVICE;

  sink::Resolver resolver;
  resolver.ask({node});
  pollfd fds[] = {{resolver.fd(), POLLIN, 0}, {stop_fd_, POLLIN, 0}};
  const auto until = std::chrono::steady_clock::now() + timeout_;
  std::vector<sink::Address> found;
  std::string error;
  while (!resolver.answered(&found, &error)) {
    const auto left = std::chrono::ceil<std::chrono::milliseconds>(until - std::chrono::steady_clock::now());
    if (fds[1].revents) return EAI_AGAIN;
    if (left.count() <= 0) {
      note({"resolving host \"" + std::string(node) + "\" took longer than connect_timeout"});
      return EAI_AGAIN;
    }
    (void)poll(fds, 2, static_cast<int>(left.count()));
  }
  if (found.empty()) {
    note({error.empty() ? "host \"" + std::string(node) + "\" has no address" : error});
    return EAI_NONAME;
  }
  std::vector<sink::Address> allowed;
  for (const sink::Address &address : found) {
    const auto *sockaddr_of = reinterpret_cast<const sockaddr *>(&address.address);
    if (address.address.ss_family != AF_UNIX && addresses_.allows(node, sockaddr_of))
      allowed.push_back(address);
    else
      error = AddressFilter::refusal(sockaddr_of);
  }
  if (allowed.empty()) {
    note({error, true});
    return EAI_FAIL;
  }
  note({});
  *list = make_list(allowed, htons(static_cast<uint16_t>(port)));
  return 0;
}

void NameLookup::note(Failure failure) {
  const std::lock_guard lock(mutex_);
  failure_ = std::move(failure);
}

NameLookup::Failure NameLookup::failure() const {
  const std::lock_guard lock(mutex_);
  return failure_;
}

}  // namespace retrysafe::kafka
