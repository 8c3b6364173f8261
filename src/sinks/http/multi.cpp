#include "sinks/http/multi.hpp"

#include <sys/epoll.h>
#include <unistd.h>

#include <cerrno>
#include <new>
#include <stdexcept>
#include <string>

namespace retrysafe::http {

namespace {

constexpr int kEventsAtOnce = 64;
// The library asks for one more turn at once when it starts or ends a transfer; this many are taken in a row.
constexpr int kTurns = 8;

// Process-wide state of the library, made once and never unmade: other sinks of this process may use it.
void initialise_library() {
  static const CURLcode code = curl_global_init(CURL_GLOBAL_DEFAULT);
  if (code != CURLE_OK) throw std::runtime_error(std::string("libcurl: ") + curl_easy_strerror(code));
}

}  // namespace

Multi::Multi(long max_connections, bool multiplex) {
  initialise_library();
  epoll_ = epoll_create1(EPOLL_CLOEXEC);
  if (epoll_ < 0) throw std::runtime_error("could not create an epoll descriptor");
  multi_ = curl_multi_init();
  if (!multi_) {
    close(epoll_);
    throw std::bad_alloc();
  }
  curl_multi_setopt(multi_, CURLMOPT_SOCKETFUNCTION, &Multi::on_socket);
  curl_multi_setopt(multi_, CURLMOPT_SOCKETDATA, this);
  curl_multi_setopt(multi_, CURLMOPT_TIMERFUNCTION, &Multi::on_timer);
  curl_multi_setopt(multi_, CURLMOPT_TIMERDATA, this);
  curl_multi_setopt(multi_, CURLMOPT_MAXCONNECTS, max_connections);
  curl_multi_setopt(multi_, CURLMOPT_PIPELINING,
                    static_cast<long>(multiplex ? CURLPIPE_MULTIPLEX : CURLPIPE_NOTHING));
}

Multi::~Multi() {
  curl_multi_cleanup(multi_);
  close(epoll_);
}

void Multi::add(CURL *transfer) {
  const CURLMcode code = curl_multi_add_handle(multi_, transfer);
  if (code != CURLM_OK) throw std::runtime_error(std::string("libcurl: ") + curl_multi_strerror(code));
}

void Multi::remove(CURL *transfer) {
  curl_multi_remove_handle(multi_, transfer);
}

// What goes wrong here shows in the transfers, at the latest when their time is over.
void Multi::advance() {
  int running;
  epoll_event events[kEventsAtOnce];
  const int count = epoll_wait(epoll_, events, kEventsAtOnce, 0);
  for (int i = 0; i < count; ++i) {
    const int mask = (events[i].events & EPOLLIN ? CURL_CSELECT_IN : 0) |
                     (events[i].events & EPOLLOUT ? CURL_CSELECT_OUT : 0) |
                     (events[i].events & (EPOLLERR | EPOLLHUP) ? CURL_CSELECT_ERR : 0);
    curl_multi_socket_action(multi_, events[i].data.fd, mask, &running);
  }
  for (int turn = 0; turn < kTurns && deadline_ && *deadline_ <= Clock::now(); ++turn) {
    deadline_.reset();
    curl_multi_socket_action(multi_, CURL_SOCKET_TIMEOUT, 0, &running);
  }
}

int Multi::timeout_ms() const {
  if (!deadline_) return -1;
  const auto left = std::chrono::ceil<std::chrono::milliseconds>(*deadline_ - Clock::now()).count();
  return left > 0 ? static_cast<int>(left) : 0;
}

// libcurl may close a socket that is still connecting before it says so here, and have another one of its
// number by then: only epoll knows which sockets are known to it.
int Multi::on_socket(CURL *, curl_socket_t socket, int what, void *self, void *) {
  const int epoll = static_cast<Multi *>(self)->epoll_;
  if (what == CURL_POLL_REMOVE) {
    epoll_ctl(epoll, EPOLL_CTL_DEL, socket, nullptr);
    return 0;
  }
  epoll_event event{};
  event.events = (what & CURL_POLL_IN ? EPOLLIN : 0u) | (what & CURL_POLL_OUT ? EPOLLOUT : 0u);
  event.data.fd = socket;
  if (epoll_ctl(epoll, EPOLL_CTL_ADD, socket, &event) != 0 && errno == EEXIST)
    epoll_ctl(epoll, EPOLL_CTL_MOD, socket, &event);
  return 0;
}

int Multi::on_timer(CURLM *, long timeout_ms, void *self) {
  auto *multi = static_cast<Multi *>(self);
  if (timeout_ms < 0)
    multi->deadline_.reset();
  else
    multi->deadline_ = Clock::now() + std::chrono::milliseconds(timeout_ms);
  return 0;
}

}  // namespace retrysafe::http
