// Threads that cannot be started, for want of memory: nothing is left behind, and the next time it works.
#include "sinks/connector.hpp"

#include <gtest/gtest.h>
#include <poll.h>
#include <signal.h>

#include <cstdlib>
#include <new>

#include "sinks/resolver.hpp"

namespace {

constexpr int kNever = -1;
thread_local int allocations_left = kNever;

}  // namespace

void *operator new(size_t size) {
  if (allocations_left == 0) throw std::bad_alloc();
  if (allocations_left > 0) --allocations_left;
  if (void *const memory = std::malloc(size)) return memory;
  throw std::bad_alloc();
}

void operator delete(void *memory) noexcept {
  std::free(memory);
}

void operator delete(void *memory, size_t) noexcept {
  std::free(memory);
}

namespace retrysafe::sink {
namespace {

bool any_signal_blocked() {
  sigset_t mask;
  pthread_sigmask(SIG_BLOCK, nullptr, &mask);
  return sigismember(&mask, SIGTERM) || sigismember(&mask, SIGURG);
}

bool becomes_readable(int fd) {
  pollfd waiting{fd, POLLIN, 0};
  return poll(&waiting, 1, 10'000) == 1;
}

// Calls `start` with memory for 0, 1, 2 … allocations until it returns true. How often it did not.
template <class Start>
int failures_of(Start start) {
  for (int enough = 0;; ++enough) {
    allocations_left = enough;
    bool started = false;
    try {
      started = start();
    } catch (const std::bad_alloc &) {
    }
    allocations_left = kNever;
    EXPECT_FALSE(any_signal_blocked()) << "after " << enough << " allocations";
    if (started) return enough;
  }
}

TEST(ThreadStart, Connector) {
  Connector connector;
  int begun = 0;
  EXPECT_GT(failures_of([&] {
              return connector.start([&begun]() -> PGconn * {
                ++begun;
                return nullptr;
              }) == nullptr;
            }),
            0);
  ASSERT_TRUE(becomes_readable(connector.fd()));
  EXPECT_THROW(connector.take(), std::bad_alloc);  // so it says that libpq had no memory
  EXPECT_EQ(begun, 1);
}

TEST(ThreadStart, Resolver) {
  Resolver resolver;
  const std::vector<std::string> hosts{"/folder"};
  std::vector<Address> addresses;
  std::string error;
  const auto ask = [&] {
    resolver.ask(hosts);
    if (!becomes_readable(resolver.fd())) return true;
    return resolver.answered(&addresses, &error) && error.empty();
  };
  EXPECT_GT(failures_of(ask), 0);
  ASSERT_EQ(addresses.size(), 1u);
  EXPECT_EQ(addresses[0].host, "/folder");
}

}  // namespace
}  // namespace retrysafe::sink
