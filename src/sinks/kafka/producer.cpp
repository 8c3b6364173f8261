#include "sinks/kafka/producer.hpp"

#include <openssl/crypto.h>
#include <pthread.h>
#include <signal.h>

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <cstdlib>
#include <iterator>
#include <mutex>
#include <stdexcept>
#include <thread>

#include "sinks/kafka/delivery.hpp"
#include "sinks/process_end.hpp"

namespace retrysafe::kafka {

namespace {

constexpr size_t kErrorBytes = 512;
// Before, the library added its nonce to the server's once more, which brokers let pass until version 4.
constexpr int kScramRepaired = 0x02060100;

constexpr std::ptrdiff_t kMaxLingering = 4;
constexpr std::chrono::seconds kLingers{1};
constexpr std::chrono::milliseconds kPatienceAtExit{500};

struct FreeConf {
  void operator()(rd_kafka_conf_t *conf) const { rd_kafka_conf_destroy(conf); }
};
using Conf = std::unique_ptr<rd_kafka_conf_t, FreeConf>;

Conf make_conf(const Settings &settings) {
  Conf conf(rd_kafka_conf_new());
  char error[kErrorBytes] = "";
  for (const auto &[name, value] : settings.properties)
    if (rd_kafka_conf_set(conf.get(), name.c_str(), value.c_str(), error, sizeof error) != RD_KAFKA_CONF_OK)
      throw std::invalid_argument(name.find("password") == std::string::npos
                                      ? error
                                      : "librdkafka does not take the value for " + name);
  rd_kafka_conf_set_events(conf.get(), RD_KAFKA_EVENT_DR | RD_KAFKA_EVENT_ERROR);
  // What matters comes as events; by default the rest would go to the standard error of the server.
  rd_kafka_conf_set_log_cb(conf.get(), [](const rd_kafka_t *, int, const char *, const char *) {});
  return conf;
}

rd_kafka_vu_t part(rd_kafka_vtype_t type) {
  rd_kafka_vu_t unit{};
  unit.vtype = type;
  return unit;
}

}  // namespace

struct Producer::All {
  std::mutex mutex;
  std::condition_variable ended;
  std::list<Place> living, ending;
};

// Never destroyed: threads may still run when the process ends.
Producer::All &Producer::all() {
  static auto *const producers = new All;
  return *producers;
}

Producer::Producer(const Settings &settings, int wake_fd)
    : lookup_(settings.addresses, settings.connect_timeout) {
  Conf conf = make_conf(settings);
  rd_kafka_conf_set_opaque(conf.get(), this);
  rd_kafka_conf_set_resolve_cb(conf.get(), [](const char *node, const char *service, const addrinfo *hints,
                                              addrinfo **list, void *self) {
    return NameLookup::resolve(node, service, hints, list, &static_cast<Producer *>(self)->lookup_);
  });
  rd_kafka_conf_set_socket_cb(conf.get(), [](int domain, int type, int protocol, void *self) {
    return static_cast<Producer *>(self)->sockets_.open(domain, type, protocol);
  });
  rd_kafka_conf_set_closesocket_cb(
      conf.get(), [](int fd, void *self) { return static_cast<Producer *>(self)->sockets_.close(fd); });
  if (settings.tls)
    rd_kafka_conf_set_ssl_cert_verify_cb(
        conf.get(), [](rd_kafka_t *, const char *broker, int32_t, int *x509_error, int depth, const char *,
                       size_t, char *, size_t, void *self) {
          return static_cast<Producer *>(self)->certificate_check_.note(broker, *x509_error, depth);
        });
  char error[kErrorBytes] = "";
  producer_.reset(rd_kafka_new(RD_KAFKA_PRODUCER, conf.get(), error, sizeof error));
  if (!producer_) throw std::invalid_argument(error);
  (void)conf.release();
  queue_.reset(rd_kafka_queue_get_main(producer_.get()));
  static constexpr uint64_t one = 1;
  rd_kafka_queue_io_event_enable(queue_.get(), wake_fd, &one, sizeof one);
}

Producer::Handle Producer::make(const Settings &settings, int wake_fd) {
  // A process may end without closing its sinks, after a FATAL error of the server for one, or while threads
  // are left. Handlers that were registered earlier run later then, and OpenSSL's has to be among those: it
  // registers one when it is asked for anything.
  [[maybe_unused]] static const int registered =
      (OPENSSL_init_crypto(OPENSSL_INIT_LOAD_CRYPTO_STRINGS, nullptr), on_exit(end_all, nullptr));
  {
    const std::lock_guard lock(all().mutex);
    const auto now = Clock::now();
    const auto lingers = [&](const Place &place) { return now - place.ends_since > kLingers; };
    if (std::count_if(all().ending.begin(), all().ending.end(), lingers) >= kMaxLingering)
      throw std::runtime_error("earlier attempts to connect have not come to an end");
  }
  std::unique_ptr<Producer> made(new Producer(settings, wake_fd));
  const std::lock_guard lock(all().mutex);
  all().living.push_back({made.get(), {}});
  made->place_ = std::prev(all().living.end());
  return Handle(made.release());
}

void Producer::stop() noexcept {
  rd_kafka_queue_io_event_enable(queue_.get(), -1, nullptr, 0);
  lookup_.stop();
  sockets_.shut_down();
}

void Producer::leave(Producer *producer) noexcept {
  producer->stop();
  {
    const std::lock_guard lock(all().mutex);
    producer->place_->ends_since = Clock::now();
    all().ending.splice(all().ending.end(), all().living, producer->place_);
  }
  try {
    std::thread([producer] {
      pthread_setname_np(pthread_self(), "retrysafe kafka");
      end(producer);
    }).detach();
  } catch (const std::exception &) {
    end(producer);  // without a thread it has to be waited for
  }
}

// Waits for the library's threads.
void Producer::end(Producer *producer) noexcept {
  const auto place = producer->place_;
  delete producer;
  const std::lock_guard lock(all().mutex);
  all().ending.erase(place);
  all().ended.notify_all();
}

void Producer::end_all(int exit_code, void *) noexcept {
  sigset_t all_signals;
  sigfillset(&all_signals);
  pthread_sigmask(SIG_BLOCK, &all_signals, nullptr);  // for the threads that leave() starts
  for (;;) {
    std::unique_lock lock(all().mutex);
    if (all().living.empty()) break;
    Producer *const producer = all().living.front().producer;
    lock.unlock();
    leave(producer);
  }
  std::unique_lock lock(all().mutex);
  all().ended.wait_for(lock, kPatienceAtExit, [] { return all().ending.empty(); });
  sink::end_process(exit_code);
}

rd_kafka_resp_err_t Producer::send(const std::string &topic, Message *message, void *token) {
  rd_kafka_vu_t parts[] = {part(RD_KAFKA_VTYPE_TOPIC),  part(RD_KAFKA_VTYPE_KEY),
                           part(RD_KAFKA_VTYPE_VALUE),  part(RD_KAFKA_VTYPE_HEADERS),
                           part(RD_KAFKA_VTYPE_OPAQUE), part(RD_KAFKA_VTYPE_MSGFLAGS)};
  parts[0].u.cstr = topic.c_str();
  // The library only reads them, though its interface does not say so.
  parts[1].u.mem = {const_cast<char *>(message->key().data), message->key().size};
  parts[2].u.mem = {const_cast<char *>(message->value().data), message->value().size};
  parts[3].u.headers = message->headers();
  parts[4].u.ptr = token;
  parts[5].u.i = RD_KAFKA_MSG_F_COPY;
  rd_kafka_error_t *error = rd_kafka_produceva(producer_.get(), parts, std::size(parts));
  if (!error) {
    message->release_headers();
    return RD_KAFKA_RESP_ERR_NO_ERROR;
  }
  const rd_kafka_resp_err_t code = rd_kafka_error_code(error);
  rd_kafka_error_destroy(error);
  return code;
}

Producer::Trouble Producer::trouble(rd_kafka_event_t *event) const {
  Trouble result{rd_kafka_event_error(event), rd_kafka_event_error_is_fatal(event) != 0, {}};
  const char *text = rd_kafka_event_error_string(event);
  if (result.final) {
    char reason[kErrorBytes] = "";
    result.error = rd_kafka_fatal_error(producer_.get(), reason, sizeof reason);
    result.text = reason;
  } else if (result.error == RD_KAFKA_RESP_ERR__RESOLVE) {
    const NameLookup::Failure failure = lookup_.failure();
    result.text = failure.text;
    result.final = failure.refused;
  } else if (result.error == RD_KAFKA_RESP_ERR__SSL) {
    result.text = certificate_check_.failure();
  }
  if (result.text.empty()) result.text = stable_text(text ? text : rd_kafka_err2str(result.error));
  if (result.error == RD_KAFKA_RESP_ERR__AUTHENTICATION && rd_kafka_version() < kScramRepaired &&
      result.text.find("SCRAM") != std::string::npos)
    result.text += std::string("; librdkafka ") + rd_kafka_version_str() + " cannot log in so to Kafka 4";
  return result;
}

}  // namespace retrysafe::kafka
