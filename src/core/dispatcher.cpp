#include "core/dispatcher.hpp"

#include <algorithm>
#include <cstring>
#include <memory_resource>
#include <unordered_map>

namespace retrysafe {

namespace {

// Each is an event that failed in this way not long ago; more of them means that something else is wrong.
constexpr size_t kMaxConvicts = 64;
constexpr size_t kOutcomesAtOnce = 64;

std::string_view view(const retrysafe_text &text) {
  return {text.data, text.size};
}

}  // namespace

void Dispatcher::begin(std::span<Item> batch) {
  ++generation_;
  items_ = batch;
  slots_.assign(batch.size(), Slot{});
  outcomes_.assign(batch.size(), Outcome{});
  failed_keys_.clear();
  ready_ = {};
  ready_convicts_.clear();
  in_flight_ = delivered_ = 0;
  furthest_ = 0;
  answered_ = stopped_ = finished_ = unreachable_ = witness_called_ = false;
  accused_ = witness_ = kNone;
  unreachable_reason_.clear();
  unreachable_retry_after_ms_ = -1;
  timeout_ms_ = -1;
  // One event tells whether a destination is back. Once it stays away, those that were in flight when the
  // last burst failed go one by one, since one of them may be what breaks it.
  singles_left_ = failures_ == 0 ? 0 : failures_ < kPatience ? 1 : breadth_;

  struct Key {
    uint32_t number;
    uint32_t last = kNone;
    bool serial;  // the next event waits for the last one
    bool held = false;
  };
  std::pmr::monotonic_buffer_resource memory(batch.size() * 2 * sizeof(Key));
  std::pmr::unordered_map<std::string_view, Key> keys(batch.size(), &memory);
  for (uint32_t i = 0; i < batch.size(); ++i) {
    retrysafe_event &event = batch[i].event;
    event.tag = uint64_t{generation_} << 32 | i;
    Slot &slot = slots_[i];
    slot.convict = is_convict(id(i));
    if (!event.ordering_key.data) {
      if (batch[i].held)
        block(i);
      else
        make_ready(i);
      continue;
    }
    Key fresh{static_cast<uint32_t>(failed_keys_.size()), kNone, !sink_.keeps_order()};
    auto [entry, inserted] = keys.try_emplace(view(event.ordering_key), fresh);
    if (inserted) failed_keys_.push_back(false);
    Key &key = entry->second;
    slot.key = key.number;
    // What is before it in the batch, itself parked before, may go.
    key.held = key.held || batch[i].held;
    if (key.held) {
      block(i);
      continue;
    }
    if (key.serial && key.last != kNone)
      slots_[key.last].next = i;
    else
      make_ready(i);
    key.last = i;
    key.serial = key.serial || slot.convict;
  }
}

void Dispatcher::step() {
  // What came back decides what may go out, so it comes first; and the sink has the last word on the timeout.
  retrysafe_outcome outcomes[kOutcomesAtOnce];
  bool progress = true;
  while (progress) {
    timeout_ms_ = -1;
    const size_t count = sink_.collect(outcomes, &timeout_ms_);
    for (size_t i = 0; i < count; ++i) settle(outcomes[i]);
    const bool submitted = submit();
    progress = count > 0 || submitted;
  }
  if (done() && !finished_) finish();
}

void Dispatcher::block(uint32_t index) {
  outcomes_[index].status = Status::kBlocked;
  slots_[index].state = State::kSettled;
}

void Dispatcher::make_ready(uint32_t index) {
  slots_[index].state = State::kReady;
  if (slots_[index].convict)
    ready_convicts_.push_back(index);
  else
    ready_.push(index);
}

bool Dispatcher::may_submit() const {
  if (unreachable_) return false;
  if (stopped_) return accused_ == kNone && !ready_.empty() && ready_.top() < furthest_;
  return !ready_.empty() || !ready_convicts_.empty();
}

// The event to offer to the sink now, kNone when it has to wait for others or when there is none.
uint32_t Dispatcher::next_to_submit() {
  if (!may_submit()) return kNone;
  if (accused_ != kNone) return in_flight_ == 0 ? witness_ : kNone;
  if (singles_left_ > 0 && in_flight_ > 0) return kNone;
  while (!ready_.empty() && may_submit()) {
    const uint32_t index = ready_.top();
    if (slots_[index].state == State::kReady && !key_failed(index)) {
      if (stopped_ || delivered_ > 0 || witness_called_ || !is_suspect(index)) return index;
      call_witness(index);
      return witness_ == kNone ? index : witness_;
    }
    // It went as a witness, or (where the sink keeps order) an event before it failed.
    if (slots_[index].state == State::kReady) block(index);
    ready_.pop();
  }
  while (in_flight_ == 0 && !stopped_ && !ready_convicts_.empty()) {
    const uint32_t index = ready_convicts_.front();
    if (!key_failed(index)) return index;
    block(index);
    block_followers(index);
    ready_convicts_.pop_front();
  }
  return kNone;
}

bool Dispatcher::submit() {
  bool any = false;
  for (uint32_t index; (index = next_to_submit()) != kNone && sink_.submit(items_[index].event); any = true) {
    slots_[index].state = State::kInFlight;
    ++in_flight_;
    furthest_ = std::max(furthest_, index);
    if (index == witness_) continue;  // stays in the queue, which passes it over later
    if (slots_[index].convict)
      ready_convicts_.pop_front();
    else
      ready_.pop();
  }
  if (any) sink_.flush();
  return any;
}

void Dispatcher::settle(const retrysafe_outcome &outcome) {
  const auto index = static_cast<uint32_t>(outcome.tag);
  if (outcome.tag >> 32 != generation_ || index >= slots_.size() || slots_[index].state != State::kInFlight)
    return;
  --in_flight_;
  if (outcome.status == RETRYSAFE_DELIVERED) return settle_delivered(index);
  outcomes_[index].retry_after_ms = outcome.retry_after_ms;
  outcomes_[index].reason.assign(outcome.reason, strnlen(outcome.reason, sizeof outcome.reason));
  switch (outcome.status) {
    case RETRYSAFE_UNREACHABLE:
      return settle_unreachable(index);
    case RETRYSAFE_FAILED_FINAL:
      return settle_failed(index, Status::kFailedFinal);
    default:
      return settle_failed(index, Status::kFailedRetry);
  }
}

void Dispatcher::settle_delivered(uint32_t index) {
  slots_[index].state = State::kSettled;
  outcomes_[index].status = Status::kDelivered;
  ++delivered_;
  answered_ = true;
  if (singles_left_ > 0 && index != witness_) --singles_left_;
  acquit(index);
  if (index == witness_) hear_witness();
  release_follower(index);
}

void Dispatcher::settle_failed(uint32_t index, Status status) {
  slots_[index].state = State::kSettled;
  outcomes_[index].status = status;
  answered_ = true;
  if (singles_left_ > 0 && index != witness_) --singles_left_;
  if (status == Status::kFailedFinal) acquit(index);
  if (key_goes_on(status)) {
    release_follower(index);
  } else {
    if (slots_[index].key != kNone) failed_keys_[slots_[index].key] = true;
    block_followers(index);
  }
  // A witness that failed proves nothing about the event that is accused.
  if (index != witness_) return;
  if (slots_[accused_].state == State::kUnreachable)
    give_up(accused_);
  else
    accused_ = witness_ = kNone;
}

void Dispatcher::settle_unreachable(uint32_t index) {
  slots_[index].state = State::kUnreachable;
  if (unreachable_) {
    unreachable_retry_after_ms_ = std::max(unreachable_retry_after_ms_, outcomes_[index].retry_after_ms);
    return;
  }
  // It did so before, and the destination has just taken others: no need to try again.
  if (slots_[index].convict && delivered_ > 0) return settle_failed(index, Status::kFailedRetry);

  // In its turn it is alone, so what was delivered before it was delivered before its attempt began.
  const bool speaks_against_it = accused_ == kNone && !stopped_ && delivered_ > 0 && is_suspect(index);
  if (speaks_against_it) {
    if (++proofs_ == kProofs) return condemn(index);
    call_witness(index);
    if (witness_ != kNone) return;
  }
  give_up(index);
}

// Whether this event stood first in line at enough failures in a row, and still does.
bool Dispatcher::is_suspect(uint32_t index) const {
  return singles_left_ > 0 && first_count_ >= kPatience && id(index) == first_id_ && index == first_in_line();
}

void Dispatcher::call_witness(uint32_t accused) {
  witness_ = choose_witness(accused);
  accused_ = witness_ == kNone ? kNone : accused;
  witness_called_ = true;
}

// The witness was delivered. One that went before its suspect only opens the way for it.
void Dispatcher::hear_witness() {
  const uint32_t accused = accused_;
  accused_ = witness_ = kNone;
  if (slots_[accused].state == State::kUnreachable) condemn(accused);
}

void Dispatcher::condemn(uint32_t index) {
  convicts_.emplace_back(id(index));
  if (convicts_.size() > kMaxConvicts) convicts_.pop_front();
  settle_failed(index, Status::kFailedRetry);
  singles_left_ = 0;
}

void Dispatcher::give_up(uint32_t index) {
  if (in_flight_ > 0) breadth_ = in_flight_ + 1;
  unreachable_ = true;
  unreachable_reason_ = outcomes_[index].reason;
  unreachable_retry_after_ms_ = outcomes_[index].retry_after_ms;
}

// Everything is settled that will be: remember what matters to the next batch.
void Dispatcher::finish() {
  finished_ = true;
  if (!unreachable_) {
    if (answered_) failures_ = first_count_ = proofs_ = 0;
    return;
  }
  ++failures_;
  const uint32_t first = first_in_line();
  const std::string_view first_id = first == kNone ? std::string_view{} : id(first);
  if (first_id != first_id_) first_count_ = proofs_ = 0;
  ++first_count_;
  first_id_ = first_id;
}

bool Dispatcher::key_goes_on(Status status) const {
  if (status == Status::kDelivered) return true;
  // A sink that keeps order has refused what was behind the dead letter as well.
  return status == Status::kFailedFinal && dead_letters_ == DeadLetters::kStepOver && !sink_.keeps_order();
}

void Dispatcher::release_follower(uint32_t index) {
  if (slots_[index].next != kNone) make_ready(slots_[index].next);
}

void Dispatcher::block_followers(uint32_t index) {
  for (uint32_t next = slots_[index].next; next != kNone; next = slots_[next].next) block(next);
}

bool Dispatcher::key_failed(uint32_t index) const {
  return slots_[index].key != kNone && failed_keys_[slots_[index].key];
}

uint32_t Dispatcher::first_in_line() const {
  for (uint32_t i = 0; i < slots_.size(); ++i)
    if (slots_[i].state != State::kSettled && !slots_[i].convict) return i;
  return kNone;
}

// Another one each time: the one that was taken may be bad itself. Never one of the accused one's key, nor
// one with an event of its key before it that failed or is yet to go (where the sink keeps order, all of a
// key are ready).
uint32_t Dispatcher::choose_witness(uint32_t accused) const {
  std::vector<uint32_t> candidates;
  std::vector<bool> closed_keys = failed_keys_;
  if (slots_[accused].key != kNone) closed_keys[slots_[accused].key] = true;
  for (uint32_t i = 0; i < slots_.size(); ++i) {
    const Slot &slot = slots_[i];
    if (i == accused || slot.state == State::kSettled) continue;
    const bool open = slot.key == kNone || !closed_keys[slot.key];
    if (open && slot.state == State::kReady && !slot.convict) candidates.push_back(i);
    if (slot.key != kNone) closed_keys[slot.key] = true;
  }
  if (candidates.empty()) return kNone;
  return candidates[static_cast<size_t>(first_count_ - kPatience) % candidates.size()];
}

std::string_view Dispatcher::id(uint32_t index) const {
  return view(items_[index].event.id);
}

bool Dispatcher::is_convict(std::string_view event_id) const {
  return std::find(convicts_.begin(), convicts_.end(), event_id) != convicts_.end();
}

void Dispatcher::acquit(uint32_t index) {
  if (slots_[index].convict) std::erase(convicts_, id(index));
}

std::span<const Dispatcher::Outcome> Dispatcher::outcomes() {
  // Where the sink keeps order, what it reports for the events behind a failed one is that they did not go
  // out.
  std::vector<bool> failed(failed_keys_.size());
  for (uint32_t i = 0; i < slots_.size(); ++i) {
    if (slots_[i].key == kNone) continue;
    const bool behind_failure = failed[slots_[i].key];
    Status &status = outcomes_[i].status;
    if (behind_failure && status != Status::kDelivered) status = Status::kBlocked;
    if (status != Status::kNotTried && !key_goes_on(status)) failed[slots_[i].key] = true;
  }
  return outcomes_;
}

}  // namespace retrysafe
