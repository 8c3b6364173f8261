// A connection to a broker with one channel in confirm mode, made and kept without waiting: resolve, filter,
// connect, TLS, sign in, open the channel; heart-beats in both directions; a new channel when the broker has
// closed the old one.
#pragma once

#include <chrono>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "core/address_filter.hpp"
#include "sink/kit.hpp"
#include "sinks/rabbitmq/frames.hpp"
#include "sinks/rabbitmq/transport.hpp"
#include "sinks/resolver.hpp"

namespace retrysafe::rabbitmq {

using Clock = std::chrono::steady_clock;

// Where and how to connect. Throws std::invalid_argument for what can never work.
struct Target {
  explicit Target(const sink::Options &options);

  std::vector<std::string> hosts;
  int port;
  std::string vhost, user, password, connection_name;
  std::chrono::milliseconds connect_timeout, heartbeat;
  AddressFilter filter;
  std::optional<sink::TlsContext> tls;
};

// The broker gave up a channel, or the whole connection, and says why.
struct Closure {
  int code;
  std::string text;  // printable
};

class Session {
 public:
  enum class State { kClosed, kResolving, kConnecting, kSigningIn, kOpeningChannel, kReady };

  // What happens on the channel. Called from advance(), and from nowhere else.
  class Listener {
   public:
    virtual void on_confirm(uint64_t number, bool multiple, bool taken) = 0;
    virtual void on_return(std::string_view message_id, std::string_view reason) = 0;
    // The broker takes nothing for now, or again.
    virtual void on_blocked(std::string_view reason) = 0;
    virtual void on_unblocked() = 0;
    // A new channel is on its way.
    virtual void on_channel_closed(const Closure &closure) = 0;

   protected:
    ~Listener() = default;
  };

  Session(const sink::Options &options, Listener &listener);
  ~Session();
  Session(const Session &) = delete;
  Session &operator=(const Session &) = delete;

  // Readable when there is something to do.
  int wait_fd() const { return epoll_; }

  void open();
  // Works without waiting. Back in kClosed: it failed, and error() tells why.
  State advance();
  void close();

  State state() const { return state_; }
  const std::string &error() const { return error_; }
  // Set when it was the broker that closed a connection which had been ready.
  const std::optional<Closure> &closure() const { return closure_; }
  bool has_been_ready() const { return has_been_ready_; }
  // When advance() wants to be called although wait_fd() is silent.
  Clock::time_point deadline() const;

  // In kReady: frames for the channel are appended here, and go out with advance().
  std::string *output() { return &output_; }
  size_t unsent() const { return output_.size() - sent_; }
  size_t frame_max() const { return frame_max_; }

  static constexpr uint16_t kChannel = 1;

 private:
  void resolve();
  void try_next_address();
  void receive();
  void take(const Frame &frame);
  void take_from_connection(const Method &method);
  void take_from_channel(const Method &method);
  void start(const Method &method);
  void tune(const Method &method);
  void open_channel();
  void answer(uint16_t channel, amqp_method_number_t id, void *method, size_t frame_max = kSmallestFrameMax);
  void write_out();
  void push();
  void beat();
  void fail(std::string reason);

  Target target_;
  Listener &listener_;
  int epoll_;
  sink::Resolver resolver_;
  std::vector<sink::Address> addresses_;  // to be tried, the next one last
  Transport transport_;
  FrameReader reader_;
  Decoder decoder_;
  std::string output_;
  size_t sent_ = 0;
  int answers_ = 0;  // in output_, since that was last empty
  bool more_to_read_ = false;
  bool long_greeting_ = false;  // more than old brokers read

  State state_ = State::kClosed;
  std::string error_;
  std::optional<Closure> closure_;
  bool has_been_ready_ = false;
  Clock::time_point deadline_{};  // of setting up
  size_t frame_max_ = kSmallestFrameMax;
  std::chrono::milliseconds heartbeat_{0};
  Clock::time_point last_sent_{}, last_received_{};

  // Why a message is given back; its header, which comes next, tells which one.
  std::string return_reason_;
  bool return_awaits_header_ = false;
};

}  // namespace retrysafe::rabbitmq
