#include "sinks/resolver.hpp"

#include <netdb.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <exception>
#include <mutex>
#include <system_error>
#include <thread>

namespace retrysafe::sink {

struct Resolver::Shared {
  Shared() : fd(eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC)) {
    if (fd < 0) throw std::system_error(errno, std::generic_category(), "eventfd");
  }
  ~Shared() { ::close(fd); }
  Shared(const Shared &) = delete;
  Shared &operator=(const Shared &) = delete;

  const int fd;
  std::mutex mutex;
  bool running = false;
  std::vector<std::string> hosts;  // the question of the running thread
  bool done = false;
  std::vector<Address> addresses;
  std::string error;
};

Resolver::Resolver() : shared_(std::make_shared<Shared>()) {}

int Resolver::fd() const {
  return shared_->fd;
}

void Resolver::ask(const std::vector<std::string> &hosts) {
  const std::lock_guard lock(shared_->mutex);
  if (shared_->running) return;
  shared_->done = false;
  try {
    shared_->hosts = hosts;
    std::thread([shared = shared_] { look_up(*shared); }).detach();
    shared_->running = true;
  } catch (const std::exception &failure) {
    shared_->error = failure.what();
    shared_->addresses.clear();
    shared_->done = true;
    eventfd_write(shared_->fd, 1);
  }
}

void Resolver::look_up(Shared &shared) noexcept {
  std::vector<Address> found;
  std::string error;
  try {
    for (const std::string &host : shared.hosts) look_up(host, &found, &error);
  } catch (const std::exception &failure) {
    found.clear();
    error.clear();
  }
  const std::lock_guard lock(shared.mutex);
  shared.addresses.swap(found);
  shared.error.swap(error);
  shared.running = false;
  shared.done = true;
  eventfd_write(shared.fd, 1);
}

void Resolver::look_up(const std::string &host, std::vector<Address> *found, std::string *error) {
  if (host.starts_with('/')) {
    Address folder{host, {}};
    folder.address.ss_family = AF_UNIX;
    found->push_back(folder);
    return;
  }
  addrinfo hints{};
  hints.ai_family = AF_UNSPEC;
  hints.ai_socktype = SOCK_STREAM;
  addrinfo *list = nullptr;
  const int result = getaddrinfo(host.c_str(), nullptr, &hints, &list);
  if (result != 0) {
    *error = "could not resolve host \"" + host + "\": " + gai_strerror(result);
    return;
  }
  const std::unique_ptr<addrinfo, void (*)(addrinfo *)> owner(list, freeaddrinfo);
  for (const addrinfo *entry = list; entry; entry = entry->ai_next) {
    Address address{host, {}};
    std::memcpy(&address.address, entry->ai_addr, entry->ai_addrlen);
    found->push_back(address);
  }
}

bool Resolver::answered(std::vector<Address> *addresses, std::string *error) {
  const std::lock_guard lock(shared_->mutex);
  if (!shared_->done) return false;
  eventfd_t count;
  eventfd_read(shared_->fd, &count);
  shared_->done = false;
  *addresses = std::move(shared_->addresses);
  *error = std::move(shared_->error);
  return true;
}

}  // namespace retrysafe::sink
