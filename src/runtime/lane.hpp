// One shard of one destination, as a worker works it. README.md has the states.
//
// A worker has many lanes. None of them waits: each says when it wants to be called again, so that a slow or
// dead destination never delays another.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "core/dispatcher.hpp"
#include "outbox/engine.hpp"
#include "pg/worker_transaction.hpp"
#include "sink/host.hpp"

#include "pg/server.hpp"

namespace retrysafe::runtime {

using Milliseconds = std::int64_t;  // of a clock that only goes forward
inline constexpr Milliseconds kNever = INT64_MAX;
Milliseconds now_ms();
// From a time of the server's clock: both are looked at in the same moment, so nothing ends early.
Milliseconds to_ms(TimestampTz time);

class Lane;
using Lanes = std::vector<std::unique_ptr<Lane>>;

class Lane {
 public:
  // Takes the first free shard of a destination; null when there is none or, with `error` set, when it could
  // not be found out. `epoll_fd` gets the descriptors of sinks.
  static std::unique_ptr<Lane> claim(int32 destination, int64 lease_us, int epoll_fd,
                                     std::optional<pg::StepError> *error);
  // The same for a shard that was left to others who do not work it, though there is something to do.
  static std::unique_ptr<Lane> claim_neglected(int32 destination, int64 lease_us, Milliseconds free_for,
                                               int epoll_fd, std::optional<pg::StepError> *error);
  ~Lane();
  Lane(const Lane &) = delete;
  Lane &operator=(const Lane &) = delete;

  // Does what can be done now without waiting for the network. Returns when it wants to be called again.
  // `lanes`: all of this worker.
  Milliseconds turn(Milliseconds now, const Lanes &lanes);
  // There may be something to send.
  void wake();
  // The sink's descriptor became readable.
  void ready() { ready_ = true; }
  // The destination was altered, or settings were: what is new counts from the next batch on.
  void reload() { reload_ = true; }
  // Gives the shard back after the batch under way.
  void leave();
  // Nothing more is submitted; what is in flight is waited for.
  void stop();
  // Records what is known of the batch under way and gives up the rest. For the end of a worker.
  void wind_up(int timeout_ms);

  bool gone() const { return state_ == State::kGone; }
  bool idle() const { return state_ == State::kIdle && !awaits_standby_; }
  // There is something to send that the synchronous standbys do not have yet.
  bool awaits_standby() const { return state_ == State::kIdle && awaits_standby_; }
  bool sending() const { return state_ == State::kSending && dispatcher_ && !dispatcher_->done(); }
  // When the batch was begun that is on its way through a sink, or not recorded yet.
  Milliseconds in_flight_since() const { return batch_ && dispatcher_ ? begun_at_ : kNever; }
  bool resting() const { return state_ == State::kResting; }
  bool leaving() const { return leaving_; }
  // It works a shard that is not of this worker's part: only as long as there is something to do.
  bool substitute() const { return substitute_; }
  // True once after something was recorded.
  bool take_recorded();

  int32 destination() const { return claim_.destination; }
  const outbox::Claim &claim() const { return claim_; }
  TransactionId version() const { return destination_ ? destination_->version : InvalidTransactionId; }

 private:
  enum class State { kIdle, kReading, kSending, kRecording, kCalling, kResting, kGone };

  Lane(int epoll_fd);
  template <class Claim>
  static std::unique_ptr<Lane> make(int32 destination, int epoll_fd, Claim &&claim,
                                    std::optional<pg::StepError> *error);

  const char *name() const { return destination_->name; }
  bool waits_for(const Lanes &lanes, Milliseconds now);
  bool load();
  void read(Milliseconds now);
  void ask_for_standby(Milliseconds now);
  void close_sink();
  void step_sink();
  void send(Milliseconds now);
  void keep_lease(Milliseconds now);
  void note_lease(Milliseconds now);
  void record(Milliseconds now, int timeout_ms);
  bool is_function() const;
  void call_function(Milliseconds now);
  bool has_lost_shard();
  void call_failed(const pg::StepError &error, bool called, Milliseconds now);
  std::optional<pg::StepError> blame(const char *reason);
  void count_fatal_call(Milliseconds now);
  void unreachable(const char *reason, Milliseconds now);
  void drop_batch();
  void show_in_status(const pg::StepError &error);
  void failed(const char *what, const pg::StepError &error, Milliseconds now);
  void rest(Milliseconds until);
  void rest_after_failure(Milliseconds now);
  void go();

  State state_ = State::kReading;
  outbox::Claim claim_{};
  outbox::Destination *destination_ = nullptr;  // in settings_memory_
  MemoryContext settings_memory_;
  MemoryContext batch_memory_;

  int epoll_fd_;
  std::unique_ptr<sink::Sink> sink_;
  std::optional<Dispatcher> dispatcher_;
  int idle_calls_ = 0;

  outbox::Batch *batch_ = nullptr;  // in batch_memory_
  std::vector<Dispatcher::Item> items_;
  Milliseconds begun_at_ = 0;  // when the sink got them

  // Kind function: an error that comes only when the outcomes are recorded, or committed, does not tell which
  // event it is the fault of, and of an event that ended a worker nothing but that is to be recorded. So many
  // go singly from then on.
  int32 singles_ = 0;
  Milliseconds wary_until_ = 0;        // a call ended a worker not long ago
  Milliseconds waits_since_ = kNever;  // for the other lanes, before it reads

  bool ready_ = false;
  bool woken_ = false;
  bool reload_ = false;
  bool leaving_ = false;
  bool substitute_ = false;
  bool recorded_ = false;
  bool awaits_standby_ = false;
  int failures_ = 0;  // steps in a row that ended with an error of the server
  Milliseconds rest_until_ = 0;
  Milliseconds leave_at_ = 0;  // not before: it could not give the shard back
  Milliseconds renew_at_ = kNever;
  Milliseconds progress_at_ = kNever;  // when an idle lane stores what it passed over
  Milliseconds standby_at_ = kNever;   // when a lane that awaits the standbys asks for them again
  Milliseconds standby_pause_ = 0;
  Milliseconds sink_at_ = kNever;  // when the sink wants to be called though its descriptor is silent
};

}  // namespace retrysafe::runtime
