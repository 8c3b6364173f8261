// One idempotent producer of the library, from start to end.
//
// The library works in threads of its own and hands over what became of messages through a queue, whose
// descriptor wakes us. Nothing of ours runs in its threads but the look-up of names, the note of what is
// wrong with a certificate, and a list of sockets.
#pragma once

#include <librdkafka/rdkafka.h>

#include <chrono>
#include <list>
#include <memory>
#include <string>

#include "sinks/kafka/broker_sockets.hpp"
#include "sinks/kafka/certificate_check.hpp"
#include "sinks/kafka/message.hpp"
#include "sinks/kafka/name_lookup.hpp"
#include "sinks/kafka/settings.hpp"

namespace retrysafe::kafka {

class Producer {
 public:
  struct Leave {
    void operator()(Producer *producer) const noexcept { leave(producer); }
  };
  // Whose end is the producer's: nothing of it is sent any more, and nobody waits for its threads.
  using Handle = std::unique_ptr<Producer, Leave>;

  // `wake_fd`: an eventfd that becomes readable when serve() has something to do. Throws
  // std::invalid_argument with what the library says of the settings, and std::runtime_error where earlier
  // producers do not come to an end.
  static Handle make(const Settings &settings, int wake_fd);
  ~Producer() = default;
  Producer(const Producer &) = delete;
  Producer &operator=(const Producer &) = delete;

  // Takes a copy of the message. `token` comes back with what became of it, unless this failed.
  rd_kafka_resp_err_t send(const std::string &topic, Message *message, void *token);

  struct Trouble {
    rd_kafka_resp_err_t error;
    bool final;  // this producer sends nothing any more, or never will to one of the brokers
    std::string text;
  };

  // Calls `settled(void *token, rd_kafka_resp_err_t, bool confirmed)` and `troubled(Trouble)` for what has
  // happened. Not confirmed: the library concludes that the message arrived, and no broker has said so.
  template <class Settled, class Troubled>
  void serve(Settled &&settled, Troubled &&troubled) {
    while (const std::unique_ptr<rd_kafka_event_t, FreeEvent> event{rd_kafka_queue_poll(queue_.get(), 0)}) {
      switch (rd_kafka_event_type(event.get())) {
        case RD_KAFKA_EVENT_DR:
          while (const rd_kafka_message_t *message = rd_kafka_event_message_next(event.get()))
            settled(message->_private, message->err, message->offset >= 0);
          break;
        case RD_KAFKA_EVENT_ERROR:
          troubled(trouble(event.get()));
          break;
        default:
          break;
      }
    }
  }

 private:
  struct FreeEvent {
    void operator()(rd_kafka_event_t *event) const { rd_kafka_event_destroy(event); }
  };
  struct FreeQueue {
    void operator()(rd_kafka_queue_t *queue) const { rd_kafka_queue_destroy(queue); }
  };
  struct Destroy {
    void operator()(rd_kafka_t *producer) const { rd_kafka_destroy(producer); }
  };

  using Clock = std::chrono::steady_clock;
  struct Place {  // among all of the process
    Producer *producer;
    Clock::time_point ends_since;
  };
  struct All;
  static All &all();

  Producer(const Settings &settings, int wake_fd);
  Trouble trouble(rd_kafka_event_t *event) const;
  void stop() noexcept;
  static void leave(Producer *producer) noexcept;
  static void end(Producer *producer) noexcept;
  static void end_all(int exit_code, void *) noexcept;

  std::list<Place>::iterator place_;
  NameLookup lookup_;  // outlives the threads, as do the next two
  BrokerSockets sockets_;
  CertificateCheck certificate_check_;
  std::unique_ptr<rd_kafka_t, Destroy> producer_;
  std::unique_ptr<rd_kafka_queue_t, FreeQueue> queue_;
};

}  // namespace retrysafe::kafka
