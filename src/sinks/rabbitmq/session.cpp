#include "sinks/rabbitmq/session.hpp"

#include <sys/epoll.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <stdexcept>
#include <system_error>
#include <utility>

#include "core/printable.hpp"

#ifndef RETRYSAFE_VERSION
#define RETRYSAFE_VERSION "unreleased"
#endif

namespace retrysafe::rabbitmq {

namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;

constexpr size_t kWantedFrameMax = 128 * 1024;
constexpr uint16_t kWantedChannelMax = 1;
// Of the frame with the password. RabbitMQ takes 4096 bytes of it, and 8192 from version 4.1 on: a password
// may be a token.
constexpr size_t kGreetingFrameMax = 16 * 1024;
constexpr size_t kShownTextBytes = 180;
// So much that was sent may stand before what was not.
constexpr size_t kSentKept = 1024 * 1024;
// A single large message does not hold its memory for ever.
constexpr size_t kMemoryKept = 8 * 1024 * 1024;
// A broker that talks without pause must not keep the caller for ever.
constexpr size_t kReadAtMost = 4 * 1024 * 1024;
// Answers that wait for the network. Setting up takes five, one after the other.
constexpr int kAnswersAtMost = 100;

std::vector<std::string> split_hosts(std::string_view list) {
  std::vector<std::string> hosts;
  while (true) {
    const size_t comma = list.find(',');
    std::string_view host = list.substr(0, comma);
    while (host.starts_with(' ')) host.remove_prefix(1);
    while (host.ends_with(' ')) host.remove_suffix(1);
    if (host.empty()) throw std::invalid_argument("option \"host\" names an empty host");
    if (host.front() == '/') throw std::invalid_argument("option \"host\" must be a host name or an address");
    hosts.emplace_back(host);
    if (comma == std::string_view::npos) return hosts;
    list.remove_prefix(comma + 1);
  }
}

// A broker may say nothing, or nothing that can be seen.
std::string shown(const amqp_bytes_t &text, const char *otherwise) {
  std::string seen = printable(view(text), kShownTextBytes);
  return seen.empty() ? otherwise : seen;
}

bool has_word(std::string_view list, std::string_view word) {
  while (!list.empty()) {
    const size_t blank = list.find(' ');
    if (list.substr(0, blank) == word) return true;
    list.remove_prefix(blank == std::string_view::npos ? list.size() : blank + 1);
  }
  return false;
}

amqp_table_entry_t text_entry(std::string_view name, std::string_view value) {
  amqp_table_entry_t entry{};
  entry.key = bytes(name);
  entry.value.kind = AMQP_FIELD_KIND_UTF8;
  entry.value.value.bytes = bytes(value);
  return entry;
}

amqp_table_entry_t flag_entry(std::string_view name) {
  amqp_table_entry_t entry{};
  entry.key = bytes(name);
  entry.value.kind = AMQP_FIELD_KIND_BOOLEAN;
  entry.value.value.boolean = 1;
  return entry;
}

}  // namespace

Target::Target(const sink::Options &options)
    : hosts(split_hosts(options.required("host"))),
      port(static_cast<int>(options.number("port", options.flag("tls", false) ? 5671 : 5672))),
      vhost(options.text("vhost", "/")),
      user(options.required("user")),
      password(options.text("password")),
      connection_name("retrysafe " + std::string(options.database()) + "/" +
                      std::string(options.destination())),
      connect_timeout(options.number("connect_timeout", 5000)),
      heartbeat(options.number("heartbeat", 30'000)),
      filter(options.allowed_addresses()),
      tls(sink::TlsContext::of(options)) {}

Session::Session(const sink::Options &options, Listener &listener)
    : target_(options),
      listener_(listener),
      epoll_(epoll_create1(EPOLL_CLOEXEC)),
      transport_(target_.tls ? &*target_.tls : nullptr, epoll_) {
  if (epoll_ < 0) throw std::system_error(errno, std::generic_category(), "epoll_create1");
  epoll_event event{};
  event.events = EPOLLIN;
  epoll_ctl(epoll_, EPOLL_CTL_ADD, resolver_.fd(), &event);
}

Session::~Session() {
  close();
  ::close(epoll_);
}

void Session::open() {
  close();
  error_.clear();
  closure_.reset();
  addresses_.clear();
  has_been_ready_ = false;
  state_ = State::kResolving;
  deadline_ = Clock::now() + target_.connect_timeout;
  resolver_.ask(target_.hosts);
}

void Session::close() {
  // One try to say good-bye: else the broker would warn of a client that has vanished.
  if (state_ == State::kReady && unsent() == 0) {
    amqp_connection_close_t method{};
    method.reply_code = AMQP_REPLY_SUCCESS;
    std::string goodbye;
    append_method(0, AMQP_CONNECTION_CLOSE_METHOD, &method, &goodbye);
    transport_.write(goodbye);
  }
  transport_.close();
  reader_.clear();
  output_.clear();
  sent_ = 0;
  answers_ = 0;
  more_to_read_ = false;
  frame_max_ = kSmallestFrameMax;
  heartbeat_ = milliseconds(0);
  return_awaits_header_ = false;
  state_ = State::kClosed;
}

Session::State Session::advance() {
  try {
    // An answer may be one that nobody waits for any more; it must be taken for the descriptor to fall
    // silent.
    resolve();
    if (state_ == State::kConnecting) {
      switch (transport_.advance()) {
        case Transport::State::kClosed:
          fail(transport_.error());
          break;
        case Transport::State::kOpen:
          state_ = State::kSigningIn;
          last_sent_ = last_received_ = Clock::now();
          append_protocol_header(&output_);
          break;
        default:
          break;
      }
    }
    if (state_ >= State::kSigningIn) {
      receive();
      beat();
      push();
    }
  } catch (const ProtocolError &error) {
    fail(error.what());
  }
  if (state_ != State::kClosed && state_ != State::kReady && Clock::now() >= deadline_)
    fail(state_ == State::kResolving        ? "resolving the host took longer than connect_timeout"
         : state_ == State::kOpeningChannel ? "opening a channel took longer than connect_timeout"
                                            : "connecting took longer than connect_timeout");
  return state_;
}

Clock::time_point Session::deadline() const {
  if (state_ == State::kClosed) return Clock::time_point::max();
  if (more_to_read_) return Clock::now();
  Clock::time_point due = state_ == State::kReady ? Clock::time_point::max() : deadline_;
  if (state_ >= State::kSigningIn && heartbeat_.count() > 0) {
    due = std::min(due, last_received_ + 2 * heartbeat_);
    if (unsent() == 0) due = std::min(due, last_sent_ + heartbeat_ / 2);
  }
  return due;
}

void Session::resolve() {
  std::vector<sink::Address> found;
  std::string error;
  if (!resolver_.answered(&found, &error) || state_ != State::kResolving) return;
  error_ = error.empty() ? "the host has no address" : error;
  for (const sink::Address &address : found) {
    const auto *of = reinterpret_cast<const sockaddr *>(&address.address);
    if (target_.filter.allows(address.host, of))
      addresses_.push_back(address);
    else
      error_ = AddressFilter::refusal(of);
  }
  std::reverse(addresses_.begin(), addresses_.end());
  try_next_address();
}

void Session::try_next_address() {
  state_ = State::kClosed;
  while (!addresses_.empty() && state_ == State::kClosed) {
    const sink::Address address = addresses_.back();
    addresses_.pop_back();
    deadline_ = Clock::now() + target_.connect_timeout;
    transport_.connect(address, target_.port);
    if (transport_.state() == Transport::State::kClosed)
      error_ = transport_.error();
    else
      state_ = State::kConnecting;
  }
}

// While setting up, another address may do better.
void Session::fail(std::string reason) {
  const bool setting_up = !has_been_ready_;
  error_ = std::move(reason);
  close();
  if (setting_up) try_next_address();
}

void Session::receive() {
  more_to_read_ = true;
  for (size_t total = 0; total < kReadAtMost;) {
    const size_t count = transport_.read(reader_.room());
    // What came before the end may tell why it ended.
    if (count == 0) {
      more_to_read_ = false;
      break;
    }
    total += count;
    last_received_ = Clock::now();
    reader_.received(count);
    while (state_ >= State::kSigningIn) {
      const auto frame = reader_.next();
      if (!frame) break;
      take(*frame);
    }
    if (state_ < State::kSigningIn) return;
  }
  if (transport_.state() == Transport::State::kClosed) {
    std::string reason = transport_.error();
    if (state_ == State::kSigningIn) reason += " while signing in";
    if (state_ == State::kSigningIn && long_greeting_)
      reason += "; RabbitMQ before version 4.1 takes no password as long as this one";
    fail(std::move(reason));
  }
}

void Session::take(const Frame &frame) {
  switch (frame.type) {
    case AMQP_FRAME_METHOD: {
      const Method method = decoder_.method(frame.payload);
      return frame.channel == 0 ? take_from_connection(method) : take_from_channel(method);
    }
    case AMQP_FRAME_HEADER:
      if (!return_awaits_header_) throw ProtocolError("the broker sent a header that belongs to nothing");
      return_awaits_header_ = false;
      return listener_.on_return(message_id_of(frame.payload), return_reason_);
    default:
      // The body of a message that is given back, which we have, or a heart-beat, which says all by coming.
      return;
  }
}

void Session::take_from_connection(const Method &method) {
  switch (method.id) {
    case AMQP_CONNECTION_START_METHOD:
      return start(method);
    case AMQP_CONNECTION_TUNE_METHOD:
      return tune(method);
    case AMQP_CONNECTION_OPEN_OK_METHOD:
      return open_channel();
    case AMQP_CONNECTION_BLOCKED_METHOD:
      return listener_.on_blocked(shown(method.as<amqp_connection_blocked_t>().reason, "no reason given"));
    case AMQP_CONNECTION_UNBLOCKED_METHOD:
      return listener_.on_unblocked();
    case AMQP_CONNECTION_CLOSE_METHOD: {
      const auto &close = method.as<amqp_connection_close_t>();
      const Closure closure{close.reply_code, shown(close.reply_text, "the broker closed the connection")};
      amqp_connection_close_ok_t reply{};
      answer(0, AMQP_CONNECTION_CLOSE_OK_METHOD, &reply);
      write_out();
      if (has_been_ready_) closure_ = closure;
      return fail(closure.text);
    }
    default:
      throw ProtocolError("the broker sent something unexpected on the connection");
  }
}

void Session::start(const Method &method) {
  const auto &greeting = method.as<amqp_connection_start_t>();
  if (!has_word(view(greeting.mechanisms), "PLAIN"))
    return fail("the broker does not take user and password (SASL PLAIN)");
  amqp_table_entry_t capabilities[] = {flag_entry("publisher_confirms"), flag_entry("basic.nack"),
                                       flag_entry("connection.blocked"),
                                       flag_entry("authentication_failure_close")};
  amqp_table_entry_t properties[] = {text_entry("product", "retrysafe"),
                                     text_entry("version", RETRYSAFE_VERSION),
                                     text_entry("connection_name", target_.connection_name),
                                     {}};
  properties[3].key = bytes("capabilities");
  properties[3].value.kind = AMQP_FIELD_KIND_TABLE;
  properties[3].value.value.table = {static_cast<int>(std::size(capabilities)), capabilities};
  // NUL user NUL password
  std::string response(1, '\0');
  response += target_.user;
  response += '\0';
  response += target_.password;
  amqp_connection_start_ok_t reply{};
  reply.client_properties = {static_cast<int>(std::size(properties)), properties};
  reply.mechanism = bytes("PLAIN");
  reply.response = bytes(response);
  reply.locale = bytes("en_US");
  const size_t before = output_.size();
  answer(0, AMQP_CONNECTION_START_OK_METHOD, &reply, kGreetingFrameMax);
  long_greeting_ = output_.size() - before > kSmallestFrameMax;
}

void Session::tune(const Method &method) {
  const auto &offer = method.as<amqp_connection_tune_t>();
  const size_t offered = offer.frame_max == 0 ? kWantedFrameMax : offer.frame_max;
  frame_max_ = std::max(kSmallestFrameMax, std::min(kWantedFrameMax, offered));
  reader_.set_frame_max(frame_max_);
  // The smaller one counts, and 0 means: none wanted.
  const auto wanted = std::chrono::ceil<seconds>(target_.heartbeat);
  seconds agreed(offer.heartbeat);
  if (agreed.count() == 0 || (wanted.count() > 0 && wanted < agreed)) agreed = wanted;
  heartbeat_ = agreed;

  amqp_connection_tune_ok_t reply{};
  reply.channel_max = kWantedChannelMax;
  reply.frame_max = static_cast<uint32_t>(frame_max_);
  reply.heartbeat = static_cast<uint16_t>(agreed.count());
  answer(0, AMQP_CONNECTION_TUNE_OK_METHOD, &reply);
  amqp_connection_open_t open_host{};
  open_host.virtual_host = bytes(target_.vhost);
  answer(0, AMQP_CONNECTION_OPEN_METHOD, &open_host);
}

void Session::open_channel() {
  state_ = State::kOpeningChannel;
  return_awaits_header_ = false;
  amqp_channel_open_t method{};
  answer(kChannel, AMQP_CHANNEL_OPEN_METHOD, &method);
}

void Session::take_from_channel(const Method &method) {
  switch (method.id) {
    case AMQP_CHANNEL_OPEN_OK_METHOD: {
      amqp_confirm_select_t select{};
      return answer(kChannel, AMQP_CONFIRM_SELECT_METHOD, &select);
    }
    case AMQP_CONFIRM_SELECT_OK_METHOD:
      state_ = State::kReady;
      has_been_ready_ = true;
      addresses_.clear();
      error_.clear();
      return;
    case AMQP_BASIC_ACK_METHOD: {
      const auto &ack = method.as<amqp_basic_ack_t>();
      return listener_.on_confirm(ack.delivery_tag, ack.multiple, true);
    }
    case AMQP_BASIC_NACK_METHOD: {
      const auto &nack = method.as<amqp_basic_nack_t>();
      return listener_.on_confirm(nack.delivery_tag, nack.multiple, false);
    }
    case AMQP_BASIC_RETURN_METHOD: {
      const auto &given_back = method.as<amqp_basic_return_t>();
      return_reason_ = shown(given_back.reply_text, "no reason given");
      return_awaits_header_ = true;
      return;
    }
    case AMQP_CHANNEL_FLOW_METHOD: {
      const bool active = method.as<amqp_channel_flow_t>().active;
      amqp_channel_flow_ok_t reply{};
      reply.active = active;
      answer(kChannel, AMQP_CHANNEL_FLOW_OK_METHOD, &reply);
      return active ? listener_.on_unblocked() : listener_.on_blocked("channel.flow");
    }
    case AMQP_CHANNEL_CLOSE_METHOD: {
      const auto &close = method.as<amqp_channel_close_t>();
      const Closure closure{close.reply_code, shown(close.reply_text, "the broker closed the channel")};
      amqp_channel_close_ok_t reply{};
      answer(kChannel, AMQP_CHANNEL_CLOSE_OK_METHOD, &reply);
      if (state_ != State::kReady) {
        write_out();
        return fail(closure.text);
      }
      deadline_ = Clock::now() + target_.connect_timeout;
      open_channel();
      return listener_.on_channel_closed(closure);
    }
    default:
      throw ProtocolError("the broker sent something unexpected on the channel");
  }
}

// A broker that asks without an end and takes no answers would fill our memory with them.
void Session::answer(uint16_t channel, amqp_method_number_t id, void *method, size_t frame_max) {
  if (++answers_ > kAnswersAtMost) throw ProtocolError("the broker asks for more answers than it takes");
  append_method(channel, id, method, &output_, frame_max);
}

void Session::write_out() {
  while (sent_ < output_.size()) {
    const size_t count = transport_.write(std::string_view(output_).substr(sent_));
    if (count == 0) break;
    sent_ += count;
    last_sent_ = Clock::now();
  }
}

void Session::push() {
  if (state_ < State::kSigningIn) return;
  write_out();
  if (transport_.state() == Transport::State::kClosed) return fail(transport_.error());
  if (sent_ == output_.size() || sent_ > kSentKept) {
    output_.erase(0, sent_);
    sent_ = 0;
    if (output_.empty()) answers_ = 0;
    if (output_.empty() && output_.capacity() > kMemoryKept) output_.shrink_to_fit();
  }
  transport_.want_write(unsent() > 0);
}

void Session::beat() {
  if (state_ < State::kSigningIn || heartbeat_.count() == 0) return;
  const auto now = Clock::now();
  if (now >= last_received_ + 2 * heartbeat_) return fail("the broker gave no sign of life");
  if (now >= last_sent_ + heartbeat_ / 2 && unsent() == 0) append_heartbeat(&output_);
}

}  // namespace retrysafe::rabbitmq
