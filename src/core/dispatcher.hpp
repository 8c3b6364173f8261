// Drives one batch of events through a sink and finds out what became of each.
//
// A pure state machine: it knows no server, no clock and no network. The publisher (background worker or
// relay) calls begin(), then step() whenever the sink's descriptor is readable or timeout_ms() has passed,
// until done(). What it keeps to:
//
// - At most one event of an ordering key is in flight, unless the sink itself keeps order. After an
//   event has failed no later one of its key is sent: those are kBlocked. Only where a dead letter holds back
//   nothing (DeadLetters::kStepOver) does its key go on after a failure for good.
// - `unreachable` ends the batch: nothing more is submitted, what is in flight is waited for, the rest is
//   kNotTried.
// - The batch after such a failure begins with a single event, so that a destination that is down gets one
//   request per attempt and not a burst.
// - An event that breaks the destination for all (its receiver crashes, the connection is reset) must
//   not stop the others for ever, and an outage must not count against the event that happens to stand first.
//   That the destination takes another event just after proves nothing: it may have come back in between. So
//   an attempt speaks against an event only when it began after the destination had taken another one:
//   when one and the same event stood first in line at kPatience such failures in a row, another event goes
//   first, as a witness, and the suspect after it, alone. If the suspect fails, a further witness follows;
//   when that is delivered, or when the suspect fails so in kProofs batches (a receiver that crashed may need
//   longer to come back), it is the culprit: it is counted as failed, which burns one of its attempts, and
//   the others go on. From then on it is sent last in its batches and alone. Without a witness nobody is
//   blamed.
//
// How outcomes map to outbox::Status: kBlocked and kNotTried both become kNotTried. The engine parks an event
// that was not tried and whose ordering key has an earlier failure in the batch (or an earlier parked event:
// `held`) as blocked, and parks an other one that stands before events that were tried as due at once, unless
// the destination is unreachable. At the first one beyond that the recorded prefix ends.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <queue>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "sink/abi.h"

namespace retrysafe {

// The dispatcher's view of an open sink: retrysafe_sink_module without its handle.
class SinkPort {
 public:
  virtual ~SinkPort() = default;
  virtual bool keeps_order() const = 0;
  virtual bool submit(const retrysafe_event &event) = 0;
  virtual void flush() = 0;
  virtual size_t collect(std::span<retrysafe_outcome> outcomes, int *timeout_ms) = 0;
};

class Dispatcher {
 public:
  enum class Status : uint8_t {
    kNotTried,
    kDelivered,
    kFailedRetry,
    kFailedFinal,
    kBlocked,  // not sent, because an earlier event of its key failed or is parked
  };

  struct Outcome {
    Status status = Status::kNotTried;
    int32_t retry_after_ms = -1;
    std::string reason;
  };

  struct Item {
    retrysafe_event event;  // its tag is the dispatcher's to set
    bool held = false;      // not to be sent: an earlier event of its key is parked
  };

  enum class DeadLetters : uint8_t { kBlock, kStepOver };

  // Failures in a row with one event first in line, before that event is suspected.
  static constexpr int kPatience = 3;
  // In a batch of fewer events there may be none that can be a witness.
  static constexpr int32_t kCompany = 4;
  // So many times it fails right behind a witness, where no further one gets through.
  static constexpr int kProofs = 2;

  explicit Dispatcher(SinkPort &sink, DeadLetters dead_letters = DeadLetters::kBlock)
      : sink_(sink), dead_letters_(dead_letters) {}

  // The items, and all that they point to, stay until done(), or until the sink was closed.
  void begin(std::span<Item> batch);
  // Submits and collects what is possible without waiting.
  void step();
  // Submits nothing more, but for what stands before an event that went out: where that is delivered, too,
  // the batch can be recorded up to there. What is in flight is still collected.
  void stop() { stopped_ = true; }

  bool done() const { return in_flight_ == 0 && !may_submit(); }
  size_t in_flight() const { return in_flight_; }
  // When step() wants to be called although the sink's descriptor is silent; -1: not at all.
  int timeout_ms() const { return timeout_ms_; }

  // One for each item. Events that are still in flight count as not tried: give them up by closing the sink.
  std::span<const Outcome> outcomes();

  // How many events the next batch is to hold if there are so many, whatever limits there are to batches.
  int32_t least_events() const { return failures_ == 0 ? 1 : kCompany; }

  // Whether the destination as a whole failed, why, and how long it asked to be left alone (-1: it did not).
  bool unreachable() const { return unreachable_; }
  const std::string &unreachable_reason() const { return unreachable_reason_; }
  int32_t unreachable_retry_after_ms() const { return unreachable_retry_after_ms_; }

 private:
  enum class State : uint8_t { kWaiting, kReady, kInFlight, kSettled, kUnreachable };
  static constexpr uint32_t kNone = UINT32_MAX;

  struct Slot {
    State state = State::kWaiting;
    bool convict = false;   // goes last and alone
    uint32_t key = kNone;   // number of its ordering key
    uint32_t next = kNone;  // the event of the same key that waits for this one
  };

  void block(uint32_t index);
  void make_ready(uint32_t index);
  bool may_submit() const;
  uint32_t next_to_submit();
  bool submit();
  void settle(const retrysafe_outcome &outcome);
  void settle_delivered(uint32_t index);
  void settle_failed(uint32_t index, Status status);
  void settle_unreachable(uint32_t index);
  void call_witness(uint32_t accused);
  void hear_witness();
  bool is_suspect(uint32_t index) const;
  void condemn(uint32_t index);
  void give_up(uint32_t index);
  void finish();
  bool key_goes_on(Status status) const;
  void release_follower(uint32_t index);
  void block_followers(uint32_t index);
  bool key_failed(uint32_t index) const;
  uint32_t first_in_line() const;
  uint32_t choose_witness(uint32_t accused) const;
  std::string_view id(uint32_t index) const;
  bool is_convict(std::string_view event_id) const;
  void acquit(uint32_t index);

  SinkPort &sink_;
  const DeadLetters dead_letters_;

  // The batch.
  std::span<Item> items_;
  std::vector<Slot> slots_;
  std::vector<Outcome> outcomes_;
  std::vector<bool> failed_keys_;
  std::priority_queue<uint32_t, std::vector<uint32_t>, std::greater<>> ready_;
  std::deque<uint32_t> ready_convicts_;
  uint32_t generation_ = 0;  // upper half of the tags: outcomes of an abandoned batch are told apart
  size_t in_flight_ = 0;
  size_t delivered_ = 0;
  uint32_t furthest_ = 0;     // event that was submitted
  bool answered_ = false;     // some event got an answer of its own
  size_t singles_left_ = 0;   // so many events still go one by one
  uint32_t accused_ = kNone;  // its witness is ready or under way
  uint32_t witness_ = kNone;
  bool witness_called_ = false;
  bool stopped_ = false;
  bool finished_ = true;
  bool unreachable_ = false;
  std::string unreachable_reason_;
  int32_t unreachable_retry_after_ms_ = -1;
  int timeout_ms_ = -1;

  // What is remembered from batch to batch.
  int failures_ = 0;      // batches in a row that ended with the destination unreachable
  std::string first_id_;  // the event that stood first in line at the last of them
  int first_count_ = 0;   // … and at how many in a row
  int proofs_ = 0;        // at how many of these it failed right behind a witness
  size_t breadth_ = 1;    // events in flight when the last burst failed: the culprit was one of them
  std::deque<std::string> convicts_;
};

}  // namespace retrysafe
