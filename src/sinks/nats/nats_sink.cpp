#include "sinks/nats/nats_sink.hpp"

#include <netinet/in.h>
#include <sys/epoll.h>

#include <algorithm>
#include <cerrno>
#include <exception>
#include <system_error>
#include <utility>

#include "core/cloud_event.hpp"
#include "sinks/nats/publish_answer.hpp"

namespace retrysafe::nats {

namespace {

using Kind = Answer::Kind;

constexpr size_t kMaxLingering = 8;

void set_port(sockaddr_storage *address, uint16_t port) {
  if (address->ss_family == AF_INET)
    reinterpret_cast<sockaddr_in *>(address)->sin_port = htons(port);
  else
    reinterpret_cast<sockaddr_in6 *>(address)->sin6_port = htons(port);
}

}  // namespace

NatsSink::NatsSink(const sink::Options &options)
    : target_(std::make_shared<const Target>(options)),
      bell_(std::make_shared<const Bell>()),
      epoll_(epoll_create1(EPOLL_CLOEXEC)) {
  if (epoll_ < 0) throw std::system_error(errno, std::generic_category(), "epoll_create1");
  for (const int fd : {bell_->fd(), resolver_.fd()}) {
    epoll_event event{};
    event.events = EPOLLIN;
    epoll_ctl(epoll_, EPOLL_CTL_ADD, fd, &event);
  }
}

NatsSink::~NatsSink() {
  ::close(epoll_);
}

bool NatsSink::submit(const retrysafe_event &event) {
  if (waiting_.size() + in_flight_.size() >= target_->max_in_flight) return false;
  Message message{.event = event, .subject = {}};
  std::string problem;
  if (target_->subject.expand(event, &message.subject, &problem))
    waiting_.push_back(std::move(message));
  else
    sink::report(&outcomes_.emplace_back(), event.tag, RETRYSAFE_FAILED_FINAL, problem);
  return true;
}

size_t NatsSink::collect(std::span<retrysafe_outcome> outcomes, int *timeout_ms) {
  advance();
  const size_t count = std::min(outcomes.size(), outcomes_.size());
  std::copy_n(outcomes_.begin(), count, outcomes.begin());
  outcomes_.erase(outcomes_.begin(), outcomes_.begin() + static_cast<std::ptrdiff_t>(count));
  *timeout_ms = -1;
  if (!outcomes_.empty()) {
    *timeout_ms = 0;
  } else if (const Clock::time_point next = deadline(); next != Clock::time_point::max()) {
    const auto left = std::chrono::ceil<std::chrono::milliseconds>(next - Clock::now()).count();
    *timeout_ms = static_cast<int>(std::clamp<int64_t>(left, 0, INT32_MAX));
  }
  return count;
}

Clock::time_point NatsSink::deadline() const {
  if (resolving_) return resolve_deadline_;
  if (!session_) return Clock::time_point::max();
  if (session_->state() == Session::State::kConnecting) return session_->deadline();
  // Those that were refused are judged when another one is settled.
  for (const auto &[number, message] : in_flight_)
    if (message.refusal.empty()) return message.deadline;
  return Clock::time_point::max();
}

void NatsSink::advance() {
  bell_->silence();
  resolve();
  if (session_) {
    // Looked at first: answers that came before the end count.
    const Session::State state = session_->state();
    for (const Answer &answer : session_->take_answers()) take(answer);
    refuse_forbidden();
    if (session_ && state == Session::State::kReady) {
      connected_ = true;
      send();
      judge_late();
      judge_refusals();
    } else if (session_ && state == Session::State::kEnded) {
      lose(session_->error());
    } else if (session_ && Clock::now() >= session_->deadline()) {
      session_->hurry();
    }
  }
  if (!session_ && !resolving_ && !waiting_.empty()) connect();
}

void NatsSink::connect() {
  if (Session::lingering() >= kMaxLingering)
    return unreachable("earlier attempts to connect have not come to an end");
  std::vector<std::string> hosts;
  for (const Server &server : target_->servers)
    if (std::find(hosts.begin(), hosts.end(), server.host) == hosts.end()) hosts.push_back(server.host);
  resolver_.ask(hosts);
  resolving_ = true;
  resolve_deadline_ = Clock::now() + target_->connect_timeout;
}

void NatsSink::resolve() {
  std::vector<sink::Address> found;
  std::string error;
  const bool answered = resolver_.answered(&found, &error);
  if (!resolving_) return;  // nobody waits for a late answer
  if (!answered) {
    if (Clock::now() < resolve_deadline_) return;
    resolving_ = false;
    return unreachable("resolving the host name took longer than connect_timeout");
  }
  resolving_ = false;
  std::vector<Endpoint> endpoints;
  for (const Server &server : target_->servers) {
    for (const sink::Address &address : found) {
      if (address.host != server.host) continue;
      const auto *any = reinterpret_cast<const sockaddr *>(&address.address);
      if (!target_->filter.allows(server.host, any)) {
        error = AddressFilter::refusal(any);
        continue;
      }
      endpoints.push_back({server, address.address});
      set_port(&endpoints.back().address, server.port);
    }
  }
  if (endpoints.empty()) return unreachable(error.empty() ? "the host has no address" : error);
  last_stored_ = 0;
  session_ = std::make_unique<Session>(target_, std::move(endpoints), bell_);
}

void NatsSink::send() {
  if (waiting_.empty()) return;
  for (; !waiting_.empty(); waiting_.pop_front()) {
    Message &message = waiting_.front();
    try {
      message.deadline = Clock::now() + target_->timeout;
      publish(last_number_ + 1, message);
      in_flight_.emplace(++last_number_, std::move(message));
    } catch (const std::exception &failure) {
      sink::report(&outcomes_.emplace_back(), message.event.tag, RETRYSAFE_UNREACHABLE, failure.what());
    }
  }
  session_->flush();
}

void NatsSink::publish(uint64_t number, const Message &message) {
  const retrysafe_event &event = message.event;
  const CloudEvent cloud_event(event, target_->source);
  std::vector<Header> headers;
  headers.reserve(cloud_event.attributes().size() + 5);
  const auto add = [&](std::string name, std::string_view value) {
    headers.push_back({std::move(name), {}});
    CloudEvent::append_header_value(value, &headers.back().value);
  };
  headers.push_back({"Nats-Msg-Id", target_->id_prefix + std::string(sink::view(event.id))});
  if (!target_->stream.empty()) headers.push_back({"Nats-Expected-Stream", target_->stream});
  std::string_view body(event.payload.data ? event.payload.data : "", event.payload.size);
  if (target_->structured) {
    body_.clear();
    cloud_event.append_json(&body_);
    body = body_;
    headers.push_back({"Content-Type", "application/cloudevents+json; charset=utf-8"});
  } else {
    if (cloud_event.has_data()) headers.push_back({"Content-Type", "application/json"});
    for (const CloudEvent::Attribute &attribute : cloud_event.attributes())
      add("ce-" + attribute.name, attribute.value);
  }
  // Tracing tools look for the W3C headers themselves.
  for (const CloudEvent::Attribute &attribute : cloud_event.attributes())
    if (attribute.name == "traceparent" || attribute.name == "tracestate")
      add(attribute.name, attribute.value);
  session_->publish(number, message.subject, headers, body);
}

void NatsSink::take(const Answer &answer) {
  if (answer.kind == Kind::kNotPermitted) return not_permitted(answer.text);
  const auto found = in_flight_.find(answer.number);
  if (found == in_flight_.end()) return;  // given up before
  session_->answered();
  switch (answer.kind) {
    case Kind::kNobody:
      return refuse(answer.number,
                    "no stream takes subject \"" + found->second.subject + "\", or JetStream is not enabled");
    case Kind::kTooLarge:
      return settle(answer.number, RETRYSAFE_FAILED_FINAL, answer.text);
    default:
      break;
  }
  const PublishAnswer verdict = parse_answer(answer.text);
  switch (verdict.verdict) {
    case PublishAnswer::Verdict::kStored:
      last_stored_ = std::max(last_stored_, answer.number);
      return settle(answer.number, RETRYSAFE_DELIVERED, {});
    case PublishAnswer::Verdict::kFailedFinal:
      return settle(answer.number, RETRYSAFE_FAILED_FINAL, verdict.reason);
    case PublishAnswer::Verdict::kFailedRetry:
      return settle(answer.number, RETRYSAFE_FAILED_RETRY, verdict.reason);
    case PublishAnswer::Verdict::kRefused:
      return refuse(answer.number, verdict.reason);
  }
}

// Such an error names a subject and no message: it is that of all messages on it. A server that lets nobody
// hear the answers is of no use.
void NatsSink::not_permitted(const std::string &text) {
  if (text.find("for Subscription") != std::string::npos) return lose(text + "; see the option inbox_prefix");
  const size_t begin = text.find('"'), end = text.rfind('"');
  if (begin < end) forbidden_[text.substr(begin + 1, end - begin - 1)] = text;
}

// All at once: a server may say of any number of subjects that they are not permitted.
void NatsSink::refuse_forbidden() {
  if (forbidden_.empty()) return;
  for (auto &[number, message] : in_flight_)
    if (const auto found = forbidden_.find(message.subject); found != forbidden_.end())
      message.refusal = found->second;
  forbidden_.clear();
}

void NatsSink::refuse(uint64_t number, const std::string &reason) {
  in_flight_.at(number).refusal = reason;
}

// A server deals with the messages of a connection in their order. So when it has stored one that was sent
// after one that it refused, the refusal was that message's own and not that of all. With nothing left under
// way that could show this, it counts as the destination's.
void NatsSink::judge_refusals() {
  std::vector<uint64_t> own;
  bool others = false;
  for (const auto &[number, message] : in_flight_) {
    if (message.refusal.empty())
      others = true;
    else if (number < last_stored_)
      own.push_back(number);
  }
  for (const uint64_t number : own) {
    const std::string reason = in_flight_.at(number).refusal;
    settle(number, RETRYSAFE_FAILED_RETRY, reason);
  }
  if (others) return;
  while (!in_flight_.empty()) {
    const auto &[number, message] = *in_flight_.begin();
    settle(number, RETRYSAFE_UNREACHABLE, std::string(message.refusal));
  }
}

// The same for messages that get no answer: one that others have overtaken waits for something of its own.
void NatsSink::judge_late() {
  const Clock::time_point now = Clock::now();
  std::vector<uint64_t> late;
  for (const auto &[number, message] : in_flight_)
    if (message.refusal.empty() && message.deadline <= now) late.push_back(number);
  for (const uint64_t number : late) {
    if (number > last_stored_) return lose("no acknowledgement within the time that option timeout allows");
    settle(number, RETRYSAFE_FAILED_RETRY, "no acknowledgement within the time that option timeout allows");
  }
}

void NatsSink::settle(uint64_t number, retrysafe_status status, std::string_view reason) {
  const auto found = in_flight_.find(number);
  sink::report(&outcomes_.emplace_back(), found->second.event.tag, status, reason);
  in_flight_.erase(found);
}

// The connection is of no use any more. What it has not yet carried goes over the next one, unless there was
// none to begin with.
void NatsSink::lose(const std::string &reason) {
  session_.reset();
  for (const auto &[number, message] : in_flight_)
    sink::report(&outcomes_.emplace_back(), message.event.tag, RETRYSAFE_UNREACHABLE, reason);
  in_flight_.clear();
  if (!std::exchange(connected_, false)) unreachable(reason);
}

void NatsSink::unreachable(const std::string &reason) {
  for (const Message &message : waiting_)
    sink::report(&outcomes_.emplace_back(), message.event.tag, RETRYSAFE_UNREACHABLE, reason);
  waiting_.clear();
}

}  // namespace retrysafe::nats
