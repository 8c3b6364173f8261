#include "sinks/connector.hpp"

#include <openssl/crypto.h>
#include <poll.h>
#include <pthread.h>
#include <sched.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <condition_variable>
#include <cstdlib>
#include <exception>
#include <mutex>
#include <new>
#include <system_error>
#include <thread>
#include <utility>

#include "sinks/process_end.hpp"

namespace retrysafe::sink {

namespace {

constexpr size_t kMaxAbandoned = 4;
constexpr std::chrono::milliseconds kPatienceAtExit{500};

int make_bell() {
  const int fd = eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC);
  if (fd < 0) throw std::system_error(errno, std::generic_category(), "eventfd");
  return fd;
}

// Of threads that were given up. Never destroyed: they may still run when the process ends.
struct Abandoned {
  std::mutex mutex;
  std::condition_variable ended;
  size_t running = 0;
};

Abandoned &abandoned() {
  static auto *const all = new Abandoned;
  return *all;
}

}  // namespace

struct Connector::Attempt {
  Attempt(std::function<PGconn *()> its_begin, int its_owner_fd)
      : begin(std::move(its_begin)), owner_fd(its_owner_fd), stop_fd(make_bell()) {}
  ~Attempt() { ::close(stop_fd); }
  Attempt(const Attempt &) = delete;
  Attempt &operator=(const Attempt &) = delete;

  const std::function<PGconn *()> begin;
  const int owner_fd;  // open as long as it was not given up
  const int stop_fd;
  std::thread thread;

  std::mutex mutex;
  pid_t thread_id = 0;
  bool given_up = false;
  bool done = false;
  PGconn *connection = nullptr;
};

Connector::Connector() : fd_(make_bell()) {
  abandoned_.reserve(kMaxAbandoned);  // giving up must not fail
}

Connector::~Connector() {
  give_up();
  ::close(fd_);
}

const char *Connector::start(std::function<PGconn *()> begin) {
  give_up();
  std::erase_if(abandoned_, [](const auto &attempt) {
    const std::lock_guard lock(attempt->mutex);
    return attempt->done;
  });
  if (abandoned_.size() >= kMaxAbandoned) return "earlier attempts to connect have not come to an end";
  // A process may end while a thread runs, after a FATAL error of the server for one. Handlers that were
  // registered earlier run later then, and OpenSSL's has to be among those: it registers one when it is asked
  // for anything.
  [[maybe_unused]] static const int registered =
      (OPENSSL_init_crypto(OPENSSL_INIT_LOAD_CRYPTO_STRINGS, nullptr), on_exit(end_all, nullptr));
  try {
    auto attempt = std::make_shared<Attempt>(std::move(begin), fd_);
    attempt->thread = std::thread([attempt] { run(*attempt); });
    attempt_ = std::move(attempt);
    return nullptr;
  } catch (const std::exception &) {
    return "there is no memory, descriptor or thread left to connect with";
  }
}

void Connector::run(Attempt &attempt) noexcept {
  pthread_setname_np(pthread_self(), "retrysafe pq");
  {
    const std::lock_guard lock(attempt.mutex);
    attempt.thread_id = gettid();
  }
  PGconn *connection = attempt.begin();
  // Called too early, libpq takes a socket that is still connecting for a connected one.
  PostgresPollingStatusType next = PGRES_POLLING_WRITING;
  if (!connection || PQstatus(connection) == CONNECTION_BAD) next = PGRES_POLLING_FAILED;
  while (next == PGRES_POLLING_READING || next == PGRES_POLLING_WRITING) {
    const short wanted = next == PGRES_POLLING_READING ? POLLIN : POLLOUT;
    pollfd waiting[] = {{PQsocket(connection), wanted, 0}, {attempt.stop_fd, POLLIN, 0}};
    (void)poll(waiting, 2, -1);
    if (waiting[1].revents) break;
    if (waiting[0].revents) next = PQconnectPoll(connection);
  }
  {
    const std::lock_guard lock(attempt.mutex);
    if (!attempt.given_up) {
      attempt.connection = connection;
      attempt.done = true;
      eventfd_write(attempt.owner_fd, 1);
      return;
    }
  }
  PQfinish(connection);
  {
    const std::lock_guard lock(attempt.mutex);
    attempt.done = true;
  }
  Abandoned &all = abandoned();
  const std::lock_guard lock(all.mutex);
  --all.running;
  all.ended.notify_all();
}

PGconn *Connector::take() {
  if (!attempt_) return nullptr;
  {
    const std::lock_guard lock(attempt_->mutex);
    if (!attempt_->done) return nullptr;
  }
  PGconn *const connection = collect();
  if (!connection) throw std::bad_alloc();
  return connection;
}

// Of an attempt that is done: its thread has nothing left to do.
PGconn *Connector::collect() {
  eventfd_t count;
  eventfd_read(fd_, &count);
  attempt_->thread.join();
  return std::exchange(attempt_, nullptr)->connection;
}

void Connector::give_up() {
  if (!attempt_) return;
  if (!abandon(*attempt_)) return PQfinish(collect());
  attempt_->thread.detach();
  abandoned_.push_back(std::move(attempt_));
}

// False: it is done already.
bool Connector::abandon(Attempt &attempt) {
  const std::lock_guard lock(attempt.mutex);
  if (attempt.done) return false;
  attempt.given_up = true;
  eventfd_write(attempt.stop_fd, 1);
  // So that it takes no time from those who have something to do.
  const sched_param least{};
  if (attempt.thread_id != 0) sched_setscheduler(attempt.thread_id, SCHED_IDLE, &least);
  Abandoned &all = abandoned();
  const std::lock_guard all_lock(all.mutex);
  ++all.running;
  return true;
}

void Connector::end_all(int exit_code, void *) noexcept {
  Abandoned &all = abandoned();
  std::unique_lock lock(all.mutex);
  all.ended.wait_for(lock, kPatienceAtExit, [&] { return all.running == 0; });
  end_process(exit_code);
}

}  // namespace retrysafe::sink
