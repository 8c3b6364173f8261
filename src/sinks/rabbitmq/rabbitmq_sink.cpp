#include "sinks/rabbitmq/rabbitmq_sink.hpp"

#include <algorithm>
#include <climits>
#include <utility>
#include <vector>

namespace retrysafe::rabbitmq {

namespace {

// Of encoded messages that the network has not taken yet.
constexpr size_t kUnsentAtMost = 1024 * 1024;

// The numbers are those of AMQP 0-9-1.
bool is_about_content(int code) {
  // RabbitMQ gives the second one for what is above its max_message_size.
  return code == AMQP_CONTENT_TOO_LARGE || code == AMQP_PRECONDITION_FAILED;
}

// It does not exist, or may not be written to.
bool is_about_the_exchange(int code) {
  return code == AMQP_NOT_FOUND || code == AMQP_ACCESS_REFUSED;
}

}  // namespace

RabbitmqSink::RabbitmqSink(const sink::Options &options)
    : writer_(options),
      max_in_flight_(static_cast<size_t>(options.number("max_in_flight", 1000))),
      timeout_(options.number("timeout", 30'000)),
      session_(options, *this) {}

bool RabbitmqSink::submit(const retrysafe_event &event) {
  if (!blocked_.empty()) {
    settle(event, RETRYSAFE_UNREACHABLE, blocked_);
    return true;
  }
  if (waiting_.size() + unconfirmed_.size() >= max_in_flight_ || session_.unsent() >= kUnsentAtMost)
    return false;
  waiting_.push_back(event);
  return true;
}

size_t RabbitmqSink::collect(std::span<retrysafe_outcome> outcomes, int *timeout_ms) {
  advance();
  if (waiting_.empty() && unconfirmed_.empty()) outage_detector_.idle();
  outage_detector_.take([&](const retrysafe_outcome &outcome) { outcomes_.push_back(outcome); });

  const size_t count = std::min(outcomes.size(), outcomes_.size());
  std::copy_n(outcomes_.begin(), count, outcomes.begin());
  outcomes_.erase(outcomes_.begin(), outcomes_.begin() + static_cast<std::ptrdiff_t>(count));
  *timeout_ms = outcomes_.empty() ? this->timeout_ms() : 0;
  return count;
}

void RabbitmqSink::advance() {
  using State = Session::State;
  // An exception may have left half a message in what goes out, or one that nothing is known of.
  if (std::exchange(working_, true)) give_up("the work on the connection was interrupted");
  if (session_.state() == State::kClosed && !waiting_.empty()) session_.open();
  const bool was_closed = session_.state() == State::kClosed;
  if (session_.advance() == State::kReady) {
    publish();
    session_.advance();
  }
  if (session_.state() == State::kClosed && !was_closed) lost();
  if (!unconfirmed_.empty() && Clock::now() >= unconfirmed_.oldest() + timeout_)
    give_up("no confirmation came within the timeout");
  if (session_.state() == State::kReady && waiting_.empty() && unconfirmed_.empty()) was_idle_ = true;
  working_ = false;
}

void RabbitmqSink::publish() {
  const auto now = Clock::now();
  while (!waiting_.empty() && blocked_.empty() && session_.unsent() < kUnsentAtMost) {
    if (suspects_ > 0 && !unconfirmed_.empty()) return;
    const retrysafe_event event = waiting_.front();
    std::string reason;
    const bool written =
        writer_.append(event, Session::kChannel, session_.frame_max(), session_.output(), &reason);
    waiting_.pop_front();
    if (suspects_ > 0) --suspects_;
    if (written)
      unconfirmed_.add(event, now);
    else
      settle(event, RETRYSAFE_FAILED_FINAL, reason);
  }
}

void RabbitmqSink::on_confirm(uint64_t number, bool multiple, bool taken) {
  unconfirmed_.confirmed(number, multiple, [&](const Unconfirmed::Message &message) {
    const retrysafe_event &event = message.event;
    if (!taken) {
      // A queue that is full, or whose process died: the event's own trouble, unless it is everybody's.
      retrysafe_outcome outcome;
      sink::report(&outcome, event.tag, RETRYSAFE_FAILED_RETRY,
                   "the broker refused the message (basic.nack)");
      return outage_detector_.failed(sink::view(event.id), outcome);
    }
    was_idle_ = false;
    outage_detector_.answered();
    if (message.returned.empty()) return settle(event, RETRYSAFE_DELIVERED);
    // With one way for all the binding is missing, and that is nothing that an event can help.
    settle(event, writer_.has_one_route() ? RETRYSAFE_UNREACHABLE : RETRYSAFE_FAILED_RETRY, message.returned);
  });
}

void RabbitmqSink::on_return(std::string_view message_id, std::string_view reason) {
  unconfirmed_.give_back(message_id, "no queue took the message: " + std::string(reason));
}

void RabbitmqSink::on_blocked(std::string_view reason) {
  blocked_ = "the broker takes no messages for now: " + std::string(reason);
  unreachable(blocked_);
}

void RabbitmqSink::on_channel_closed(const Closure &closure) {
  if (concerns_a_message(closure))
    find_culprit(closure);
  else
    unreachable(closure.text);
  unconfirmed_.restart();
}

// Whether the broker may have closed over one of the messages, and not over its own state or ours.
bool RabbitmqSink::concerns_a_message(const Closure &closure) const {
  return is_about_content(closure.code) ||
         (is_about_the_exchange(closure.code) && !writer_.has_one_exchange());
}

// The broker took what came before the culprit and passed over what came behind it, and confirms neither any
// more: which message it was is known only when it was alone.
void RabbitmqSink::find_culprit(const Closure &closure) {
  if (unconfirmed_.size() == 1) {
    const auto status = is_about_content(closure.code) ? RETRYSAFE_FAILED_FINAL : RETRYSAFE_FAILED_RETRY;
    unconfirmed_.abandon([&](const retrysafe_event &event) { settle(event, status, closure.text); });
    outage_detector_.answered();
    return;
  }
  suspects_ += unconfirmed_.size();
  take_back();
}

// Back to where they came from, in the same order.
void RabbitmqSink::take_back() {
  std::vector<retrysafe_event> events;
  events.reserve(unconfirmed_.size());
  unconfirmed_.abandon([&](const retrysafe_event &event) { events.push_back(event); });
  waiting_.insert(waiting_.begin(), events.begin(), events.end());
}

// There is no connection.
void RabbitmqSink::lost() {
  blocked_.clear();
  const auto &closure = session_.closure();
  if (closure && concerns_a_message(*closure)) {
    find_culprit(*closure);
  } else if (was_idle_ && session_.has_been_ready()) {
    take_back();
  } else {
    unreachable(session_.error());
  }
  was_idle_ = false;
  unconfirmed_.restart();
  if (!waiting_.empty()) session_.open();
}

void RabbitmqSink::give_up(std::string_view reason) {
  unreachable(reason);
  session_.close();
  unconfirmed_.restart();
  blocked_.clear();
  was_idle_ = false;
}

void RabbitmqSink::unreachable(std::string_view reason) {
  take_back();
  for (const retrysafe_event &event : waiting_) settle(event, RETRYSAFE_UNREACHABLE, reason);
  waiting_.clear();
  suspects_ = 0;
}

void RabbitmqSink::settle(const retrysafe_event &event, retrysafe_status status, std::string_view reason) {
  sink::report(&outcomes_.emplace_back(), event.tag, status, reason);
}

int RabbitmqSink::timeout_ms() const {
  auto due = session_.deadline();
  if (!unconfirmed_.empty()) due = std::min(due, unconfirmed_.oldest() + timeout_);
  if (due == Clock::time_point::max()) return -1;
  const auto left = std::chrono::ceil<std::chrono::milliseconds>(due - Clock::now()).count();
  return static_cast<int>(std::clamp<int64_t>(left, 0, INT_MAX));
}

}  // namespace retrysafe::rabbitmq
