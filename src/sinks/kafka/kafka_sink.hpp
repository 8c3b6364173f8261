// Delivers events as messages of Kafka topics. README.md tells how failures are judged.
#pragma once

#include <chrono>
#include <deque>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "core/outage_detector.hpp"
#include "sinks/kafka/producer.hpp"
#include "sinks/kafka/settings.hpp"

namespace retrysafe::kafka {

class KafkaSink {
 public:
  explicit KafkaSink(const sink::Options &options);
  ~KafkaSink() = default;
  KafkaSink(const KafkaSink &) = delete;
  KafkaSink &operator=(const KafkaSink &) = delete;

  int wait_fd() const { return wake_.fd; }
  bool submit(const retrysafe_event &event);
  void flush() {}
  size_t collect(std::span<retrysafe_outcome> outcomes, int *timeout_ms);

 private:
  using Clock = std::chrono::steady_clock;

  struct WakeDescriptor {
    WakeDescriptor();
    ~WakeDescriptor();
    WakeDescriptor(const WakeDescriptor &) = delete;
    WakeDescriptor &operator=(const WakeDescriptor &) = delete;
    void drain() const;
    const int fd;
  };

  struct Flight {
    const retrysafe_event *event = nullptr;  // null: free
  };

  bool send(const retrysafe_event &event, bool alone);
  void serve();
  void settled(Flight *flight, rd_kafka_resp_err_t error, bool confirmed);
  void judged(const retrysafe_event &event, bool alone, rd_kafka_resp_err_t error);
  void troubled(const Producer::Trouble &trouble);
  void report(const retrysafe_event &event, retrysafe_status status, std::string_view reason = {});
  void doubtful(const retrysafe_event &event, std::string_view reason);
  std::string failure_text(rd_kafka_resp_err_t error) const;
  void give_up();
  void drop_producer();
  void send_suspects();
  std::chrono::milliseconds patience() const;
  std::optional<Clock::time_point> last_moment() const;

  const Settings settings_;
  const WakeDescriptor wake_;
  Producer::Handle producer_;  // null: made when it is needed

  std::vector<Flight> flights_;
  std::vector<Flight *> free_;
  size_t in_flight_ = 0;
  Clock::time_point settled_at_;                  // the last of them, or else when the first one was sent
  std::deque<const retrysafe_event *> suspects_;  // sent once more, each alone
  bool alone_ = false;                            // one of them is under way

  std::optional<std::string> failure_;           // of the destination: the producer is dropped
  std::optional<Clock::time_point> down_since_;  // no broker is connected, for all that is known
  rd_kafka_resp_err_t trouble_ = RD_KAFKA_RESP_ERR_NO_ERROR;
  std::string trouble_text_;

  OutageDetector outage_detector_;
  std::deque<retrysafe_outcome> outcomes_;
  std::string topic_, reason_;  // of the event at hand
};

}  // namespace retrysafe::kafka
