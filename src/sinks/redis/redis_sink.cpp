#include "sinks/redis/redis_sink.hpp"

#include <algorithm>
#include <utility>

#include "core/event_fields.hpp"
#include "core/printable.hpp"
#include "sinks/redis/command.hpp"

namespace retrysafe::redis {

namespace {

// Enough to keep a connection busy; more would only be another copy of the payloads.
constexpr size_t kMaxUnsentBytes = 1024 * 1024;
// WAIT ends by itself after `timeout`; its answer needs some time too.
constexpr std::chrono::seconds kGrace{1};
// proto-max-bulk-len cannot be set lower.
constexpr size_t kSmallestLimit = 1024 * 1024;

}  // namespace

RedisSink::RedisSink(const sink::Options &options) : target_(options), session_(target_) {}

bool RedisSink::submit(const retrysafe_event &event) {
  if (events_.size() + stored_ >= target_.max_in_flight) return false;
  Pending pending{&event, {}};
  std::string reason;
  if (target_.stream.expand(event, &pending.stream, &reason))
    events_.push_back(std::move(pending));
  else
    settle(event.tag, RETRYSAFE_FAILED_FINAL, reason);
  return true;
}

size_t RedisSink::collect(std::span<retrysafe_outcome> outcomes, int *timeout_ms) {
  advance();
  if (events_.empty() && bursts_.empty()) outage_detector_.idle();
  outage_detector_.take([&](const retrysafe_outcome &outcome) { outcomes_.push_back(outcome); });
  const size_t count = std::min(outcomes.size(), outcomes_.size());
  std::copy_n(outcomes_.begin(), count, outcomes.begin());
  outcomes_.erase(outcomes_.begin(), outcomes_.begin() + static_cast<std::ptrdiff_t>(count));

  *timeout_ms = -1;
  // The network may have taken all at once that there was room for, and then nobody calls for the rest.
  if (!outcomes_.empty() || may_send()) {
    *timeout_ms = 0;
  } else if (opening_ || under_way()) {
    const auto deadline = opening_ ? session_.deadline() : deadline_;
    const auto left = std::chrono::ceil<std::chrono::milliseconds>(deadline - Clock::now()).count();
    *timeout_ms = static_cast<int>(std::clamp<int64_t>(left, 0, INT32_MAX));
  }
  return count;
}

void RedisSink::advance() {
  if (session_.advance() == Session::State::kReady) {
    opening_ = false;
    // A large payload takes its time on a slow network.
    if (std::exchange(bytes_sent_, session_.bytes_sent()) != session_.bytes_sent()) be_patient();
    receive();
  }
  if (session_.state() == Session::State::kClosed) {
    // A connection that ended while nothing was under way is nobody's failure: servers close idle ones.
    if (opening_ || under_way()) lost(session_.error());
    if (events_.empty()) return;
    session_.open();
    opening_ = true;
  }
  if (session_.state() == Session::State::kReady) send();
}

bool RedisSink::may_send() const {
  return session_.state() == Session::State::kReady && !renew_ && sent_ < events_.size() &&
         session_.unsent() < kMaxUnsentBytes;
}

void RedisSink::send() {
  const bool was_under_way = under_way();
  size_t added = 0;
  for (; may_send(); ++sent_, ++added)
    append_xadd(*events_[sent_].event, events_[sent_].stream, target_.source, target_.max_length,
                &session_.commands());
  if (added == 0) return;
  if (target_.replicas > 0) {
    append_command({"WAIT", std::to_string(target_.replicas), std::to_string(target_.timeout.count())},
                   &session_.commands());
    bursts_.push_back({added, {}});
  }
  if (!was_under_way) be_patient();
  session_.push();
  bytes_sent_ = session_.bytes_sent();
}

void RedisSink::receive() {
  Reply reply;
  while (session_.next_reply(&reply)) {
    // Not as if the connection had ended: it would do so again at once, for ever.
    if (!under_way()) {
      session_.close("the server spoke without being asked");
      return lost(session_.error());
    }
    be_patient();
    take(reply);
  }
  if (session_.state() != Session::State::kReady) return;
  if (renew_ && !under_way()) {
    renew_ = false;
    session_.close();
  }
  if (under_way() && Clock::now() >= deadline_)
    session_.close("no answer within the time of option \"timeout\"");
}

void RedisSink::take(const Reply &reply) {
  if (!bursts_.empty() && bursts_.front().unanswered == 0) return take_wait(reply);
  const Pending pending = std::move(events_.front());
  events_.pop_front();
  --sent_;
  if (!bursts_.empty()) --bursts_.front().unanswered;
  if (reply.type == Reply::Type::kError) return take_error(pending, reply.text);
  if (reply.type != Reply::Type::kText) {
    settle(pending.event->tag, RETRYSAFE_UNREACHABLE, "the answer to XADD is not that of a Redis server");
    return session_.close("the answer to XADD is not that of a Redis server");
  }
  outage_detector_.answered();
  if (bursts_.empty()) return settle(pending.event->tag, RETRYSAFE_DELIVERED);
  bursts_.front().stored.push_back(pending.event->tag);
  ++stored_;
}

void RedisSink::take_error(const Pending &pending, std::string_view error) {
  const std::string reason = reason_of(error);
  const uint64_t tag = pending.event->tag;
  Verdict verdict = judge(error);
  // Not to be believed: it would make a dead letter of every event.
  if (verdict == Verdict::kTooLarge && pending.event->payload.size < kSmallestLimit)
    verdict = Verdict::kElsewhere;
  switch (verdict) {
    case Verdict::kTooLarge:
      outage_detector_.answered();
      settle(tag, RETRYSAFE_FAILED_FINAL, "too large for the server: " + reason);
      if (ends_connection(error)) begin_again();
      break;
    case Verdict::kStream:
      // Where all events go to one stream, nothing passes until somebody puts it right.
      settle(tag, target_.stream.is_constant() ? RETRYSAFE_UNREACHABLE : RETRYSAFE_FAILED_RETRY,
             reason + ", stream \"" + printable(pending.stream, kMaxNameBytes) + "\"");
      break;
    case Verdict::kElsewhere:
      // Behind the name of the host there may be another server by now.
      renew_ = true;
      settle(tag, RETRYSAFE_UNREACHABLE, reason);
      break;
    case Verdict::kDestination:
      settle(tag, RETRYSAFE_UNREACHABLE, reason);
      break;
    case Verdict::kUnclear: {
      retrysafe_outcome outcome;
      sink::report(&outcome, tag, RETRYSAFE_FAILED_RETRY, reason);
      outage_detector_.failed(sink::view(pending.event->id), outcome);
      break;
    }
  }
}

void RedisSink::take_wait(const Reply &reply) {
  const Burst burst = std::move(bursts_.front());
  bursts_.pop_front();
  stored_ -= burst.stored.size();
  const bool confirmed = reply.type == Reply::Type::kInteger && reply.integer >= target_.replicas;
  const std::string reason = confirmed                           ? ""
                             : reply.type == Reply::Type::kError ? reason_of(reply.text)
                             : reply.type != Reply::Type::kInteger
                                 ? "the answer to WAIT is not that of a Redis server"
                                 : std::to_string(reply.integer) + " of " + std::to_string(target_.replicas) +
                                       " replicas confirmed within the time of option \"timeout\"";
  for (const uint64_t tag : burst.stored)
    settle(tag, confirmed ? RETRYSAFE_DELIVERED : RETRYSAFE_UNREACHABLE, reason);
}

// The server closes without having read what comes behind the command that it complained about: that is sent
// again, in the same order.
void RedisSink::begin_again() {
  for (const Burst &burst : bursts_)
    for (const uint64_t tag : burst.stored)
      settle(tag, RETRYSAFE_UNREACHABLE, "the connection ended before replicas confirmed");
  bursts_.clear();
  stored_ = sent_ = 0;
  session_.close();
}

// What was under way may have arrived or not; that is not held against it.
void RedisSink::lost(const std::string &reason) {
  for (const Burst &burst : bursts_)
    for (const uint64_t tag : burst.stored) settle(tag, RETRYSAFE_UNREACHABLE, reason);
  for (const Pending &pending : events_) settle(pending.event->tag, RETRYSAFE_UNREACHABLE, reason);
  bursts_.clear();
  events_.clear();
  stored_ = sent_ = 0;
  opening_ = renew_ = false;
}

void RedisSink::settle(uint64_t tag, retrysafe_status status, std::string_view reason) {
  sink::report(&outcomes_.emplace_back(), tag, status, reason);
}

void RedisSink::be_patient() {
  deadline_ = Clock::now() + target_.timeout + (target_.replicas > 0 ? kGrace : kGrace.zero());
}

}  // namespace retrysafe::redis
