#include "sinks/kafka/kafka_sink.hpp"

#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <exception>
#include <system_error>
#include <utility>

#include "core/printable.hpp"
#include "sinks/kafka/delivery.hpp"

namespace retrysafe::kafka {

namespace {

constexpr std::chrono::seconds kGrace{3};

std::string shown(std::string_view text) {
  return printable(text, sizeof retrysafe_outcome::reason - 1);
}

}  // namespace

KafkaSink::WakeDescriptor::WakeDescriptor() : fd(eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC)) {
  if (fd < 0) throw std::system_error(errno, std::generic_category(), "eventfd");
}

KafkaSink::WakeDescriptor::~WakeDescriptor() {
  close(fd);
}

void KafkaSink::WakeDescriptor::drain() const {
  eventfd_t count;
  (void)eventfd_read(fd, &count);
}

// The producer is made at once, since it checks the settings for us.
KafkaSink::KafkaSink(const sink::Options &options)
    : settings_(options), producer_(Producer::make(settings_, wake_.fd)), flights_(settings_.max_in_flight) {
  free_.reserve(flights_.size());
  for (Flight &flight : flights_) free_.push_back(&flight);
}

bool KafkaSink::submit(const retrysafe_event &event) {
  // While the destination fails nothing new joins, and suspects are alone with the broker.
  if (failure_ || !suspects_.empty() || alone_ || free_.empty()) return false;
  return send(event, false);
}

// Takes the event, whatever happens, unless the library has no room: an event that is refused again and again
// would keep its batch from ending.
bool KafkaSink::send(const retrysafe_event &event, bool alone) {
  try {
    if (!settings_.topic.expand(event, &topic_, &reason_)) {
      report(event, RETRYSAFE_FAILED_FINAL, reason_);
      return true;
    }
    if (!producer_) producer_ = Producer::make(settings_, wake_.fd);
    Message message(event, settings_.source, settings_.structured);
    Flight *flight = free_.back();
    const rd_kafka_resp_err_t error = producer_->send(topic_, &message, flight);
    if (error == RD_KAFKA_RESP_ERR_NO_ERROR) {
      flight->event = &event;
      free_.pop_back();
      if (in_flight_++ == 0) settled_at_ = Clock::now();
      alone_ = alone;
    } else if (error == RD_KAFKA_RESP_ERR__QUEUE_FULL && in_flight_ > 0) {
      return false;
    } else if (error == RD_KAFKA_RESP_ERR_MSG_SIZE_TOO_LARGE) {
      report(event, RETRYSAFE_FAILED_FINAL,
             "the message is larger than max_message_bytes = " + std::to_string(settings_.max_message_bytes));
    } else {
      judged(event, true, error);
    }
  } catch (const std::exception &error) {
    report(event, RETRYSAFE_UNREACHABLE, error.what());
  }
  return true;
}

size_t KafkaSink::collect(std::span<retrysafe_outcome> outcomes, int *timeout_ms) {
  wake_.drain();
  serve();
  send_suspects();
  outage_detector_.take([&](const retrysafe_outcome &outcome) { outcomes_.push_back(outcome); });

  const size_t count = std::min(outcomes.size(), outcomes_.size());
  std::copy_n(outcomes_.begin(), count, outcomes.begin());
  outcomes_.erase(outcomes_.begin(), outcomes_.begin() + static_cast<std::ptrdiff_t>(count));
  *timeout_ms = -1;
  if (!outcomes_.empty()) {
    *timeout_ms = 0;
  } else if (const auto until = last_moment()) {
    const auto left = std::chrono::ceil<std::chrono::milliseconds>(*until - Clock::now());
    *timeout_ms = static_cast<int>(std::max<long>(0, left.count()));
  }
  return count;
}

void KafkaSink::serve() {
  if (!producer_) return;
  bool over = false;
  producer_->serve([&](void *token, rd_kafka_resp_err_t error,
                       bool confirmed) { settled(static_cast<Flight *>(token), error, confirmed); },
                   [&](const Producer::Trouble &trouble) {
                     troubled(trouble);
                     over = over || trouble.final;
                   });
  if (const auto until = last_moment(); until && Clock::now() >= *until) {
    if (!failure_) failure_ = trouble_text_.empty() ? "nothing is heard of what was sent" : trouble_text_;
    over = true;
  }
  // What is still under way may yet arrive, unless nothing can.
  if (failure_ && (over || in_flight_ == 0))
    give_up();
  else if (down_since_ && in_flight_ == 0)
    drop_producer();  // it would try to connect, for nobody, as long as this sink is open
  if (in_flight_ == 0 && suspects_.empty()) outage_detector_.idle();
}

// When a request failed and the one behind it was taken, the library concludes that the first had arrived as
// well: a broker would have refused the second for the gap. But one that has no state of this producer, as at
// its beginning, takes whatever sequence number comes first, though it refused the first request. So such an
// event is sent again. Nothing is behind it then to conclude from.
void KafkaSink::settled(Flight *flight, rd_kafka_resp_err_t error, bool confirmed) {
  const retrysafe_event &event = *std::exchange(flight->event, nullptr);
  const bool alone = std::exchange(alone_, false);
  free_.push_back(flight);
  --in_flight_;
  settled_at_ = Clock::now();
  if (error == RD_KAFKA_RESP_ERR_NO_ERROR && !confirmed && !alone)
    suspects_.push_back(&event);
  else
    judged(event, alone, error);
}

void KafkaSink::judged(const retrysafe_event &event, bool alone, rd_kafka_resp_err_t error) {
  switch (judge(error)) {
    case Verdict::kDelivered:
      down_since_.reset();
      trouble_text_.clear();
      outage_detector_.answered();
      return report(event, RETRYSAFE_DELIVERED);
    case Verdict::kEvent:
      outage_detector_.answered();
      return report(event, RETRYSAFE_FAILED_FINAL, rd_kafka_err2str(error));
    case Verdict::kBatch:
      if (!alone) return suspects_.push_back(&event);
      outage_detector_.answered();
      return report(event, RETRYSAFE_FAILED_FINAL, rd_kafka_err2str(error));
    case Verdict::kTopic: {
      (void)settings_.topic.expand(event, &topic_, &reason_);
      const std::string text = "topic \"" + topic_ + "\": " + rd_kafka_err2str(error);
      if (!settings_.topic.is_constant()) return doubtful(event, text);
      failure_ = text;
      return report(event, RETRYSAFE_UNREACHABLE, text);
    }
    case Verdict::kDestination:
      if (!failure_) failure_ = failure_text(error);
      return report(event, RETRYSAFE_UNREACHABLE, *failure_);
    case Verdict::kUnknown:
      return doubtful(event, rd_kafka_err2str(error));
  }
}

std::string KafkaSink::failure_text(rd_kafka_resp_err_t error) const {
  if (error != RD_KAFKA_RESP_ERR__MSG_TIMED_OUT) return rd_kafka_err2str(error);
  return "no acknowledgement within the timeout" + (trouble_text_.empty() ? "" : "; " + trouble_text_);
}

void KafkaSink::troubled(const Producer::Trouble &trouble) {
  if (trouble.final) {
    failure_ = trouble.text;
  } else if (trouble.error == RD_KAFKA_RESP_ERR__ALL_BROKERS_DOWN) {
    if (!down_since_) down_since_ = Clock::now();
    if (trouble_text_.empty()) trouble_text_ = trouble.text;
  } else {
    trouble_ = trouble.error;
    trouble_text_ = trouble.text;
  }
}

// A broker that is restarted, or replaced by another, is waited for: the library sends again what was under
// way, and the cluster drops second copies. Nothing is gained by waiting where the cluster, or the way to it,
// says no.
std::chrono::milliseconds KafkaSink::patience() const {
  const bool refused = trouble_ == RD_KAFKA_RESP_ERR__AUTHENTICATION || trouble_ == RD_KAFKA_RESP_ERR__SSL ||
                       trouble_ == RD_KAFKA_RESP_ERR__RESOLVE;
  return refused ? std::chrono::milliseconds(0) : settings_.connect_timeout;
}

// Until when something has to be heard of what is under way.
std::optional<KafkaSink::Clock::time_point> KafkaSink::last_moment() const {
  if (in_flight_ == 0) return std::nullopt;
  // The library tells of each event within the timeout, or twice that where a request was sent at its end.
  // But a broker that means harm can keep the thread busy that would.
  const auto silence = settled_at_ + 2 * settings_.timeout + kGrace;
  return down_since_ ? std::min(silence, *down_since_ + patience()) : silence;
}

// Nothing of the library runs while the destination rests, and the next try starts from nothing: with a new
// producer after a fatal error, with fresh names, addresses and certificates.
void KafkaSink::give_up() {
  for (Flight &flight : flights_) {
    if (!flight.event) continue;
    report(*flight.event, RETRYSAFE_UNREACHABLE, *failure_);
    flight.event = nullptr;
    free_.push_back(&flight);
  }
  in_flight_ = 0;
  alone_ = false;
  for (const retrysafe_event *event : suspects_) report(*event, RETRYSAFE_UNREACHABLE, *failure_);
  suspects_.clear();
  failure_.reset();
  drop_producer();
}

void KafkaSink::drop_producer() {
  producer_.reset();
  down_since_.reset();
  trouble_ = RD_KAFKA_RESP_ERR_NO_ERROR;
  trouble_text_.clear();
}

// A broker answers for all messages that it got together. Alone, an event answers for itself.
void KafkaSink::send_suspects() {
  while (in_flight_ == 0 && !suspects_.empty()) {
    const retrysafe_event &event = *suspects_.front();
    suspects_.pop_front();
    send(event, true);
  }
}

void KafkaSink::report(const retrysafe_event &event, retrysafe_status status, std::string_view reason) {
  sink::report(&outcomes_.emplace_back(), event.tag, status, shown(reason));
}

void KafkaSink::doubtful(const retrysafe_event &event, std::string_view reason) {
  retrysafe_outcome outcome;
  sink::report(&outcome, event.tag, RETRYSAFE_FAILED_RETRY, shown(reason));
  outage_detector_.failed(sink::view(event.id), outcome);
}

}  // namespace retrysafe::kafka
