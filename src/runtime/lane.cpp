#include "runtime/lane.hpp"

#include <sys/epoll.h>

#include <algorithm>
#include <chrono>
#include <string>

#include "core/kinds/kinds.hpp"
#include "outbox/function_destination.hpp"
#include "outbox/options.hpp"
#include "pg/database_name.hpp"
#include "pg/fault_point.hpp"
#include "pg/text.hpp"
#include "runtime/destination_log.hpp"
#include "runtime/envelope.hpp"
#include "runtime/fatal_calls.hpp"
#include "runtime/wakeup.hpp"
#include "runtime/worker_slot.hpp"
#include "settings.hpp"

#include "pg/server.hpp"

namespace retrysafe::runtime {

namespace {

constexpr Milliseconds kFailureRest = 1000;
constexpr Milliseconds kFailureRestMax = 60'000;
// Outcomes that could not be recorded are kept for so many tries. Then the batch is read and sent again.
constexpr int kRecordTries = 8;
// So long the other destinations have the worker for themselves after a call has ended one.
constexpr Milliseconds kFatalCallRest = 1000;
// So long after that its lane waits, before each batch, for what the others have in flight; so long at most
// each time; and it looks so often.
constexpr Milliseconds kWaryFor = 60'000;
constexpr Milliseconds kPatience = 30'000;
constexpr Milliseconds kPatienceLook = 100;
// An idle lane looks no sooner whether there is progress to store.
constexpr Milliseconds kProgressRest = 100;
// A sink whose descriptor stays readable without anything to do would keep the worker awake for ever.
constexpr int kIdleCallsMax = 1000;

outbox::Status status_of(Dispatcher::Status status) {
  switch (status) {
    case Dispatcher::Status::kDelivered:
      return outbox::Status::kDelivered;
    case Dispatcher::Status::kFailedRetry:
      return outbox::Status::kFailedRetry;
    case Dispatcher::Status::kFailedFinal:
      return outbox::Status::kFailedFinal;
    case Dispatcher::Status::kNotTried:
    case Dispatcher::Status::kBlocked:  // the engine parks it behind the earlier failure of its key
      break;
  }
  return outbox::Status::kNotTried;
}

int64 microseconds(int32_t ms) {
  return ms < 0 ? -1 : int64{ms} * 1000;
}

void log_of_sink(const char *message) {
  log_line("%s", message);
}

}  // namespace

Milliseconds now_ms() {
  return std::chrono::duration_cast<std::chrono::milliseconds>(
             std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

Milliseconds to_ms(TimestampTz time) {
  if (TIMESTAMP_NOT_FINITE(time)) return kNever;
  return now_ms() + std::max<Milliseconds>(0, (time - GetCurrentTimestamp()) / 1000) + 1;
}

Lane::Lane(int epoll_fd) : epoll_fd_(epoll_fd) {
  pg::call([&] {
    settings_memory_ = AllocSetContextCreate(TopMemoryContext, "retrysafe destination", ALLOCSET_SMALL_SIZES);
    batch_memory_ = AllocSetContextCreate(TopMemoryContext, "retrysafe batch", ALLOCSET_DEFAULT_SIZES);
  });
}

Lane::~Lane() {
  close_sink();
  MemoryContextDelete(batch_memory_);
  MemoryContextDelete(settings_memory_);
}

template <class Claim>
std::unique_ptr<Lane> Lane::make(int32 destination, int epoll_fd, Claim &&claim,
                                 std::optional<pg::StepError> *error) {
  std::unique_ptr<Lane> lane(new Lane(epoll_fd));
  *error = pg::in_transaction("claiming a shard", nullptr, [&] {
    if (!claim(&lane->claim_)) return;
    MemoryContextSwitchTo(lane->settings_memory_);
    lane->destination_ = outbox::load_destination(destination);
  });
  if (*error || !lane->destination_) return nullptr;
  if (has_recent_fatal_call(destination)) {
    const Milliseconds now = now_ms();
    lane->wary_until_ = now + kWaryFor;
    lane->rest(now + kFatalCallRest);
  }
  pg::call([] { RETRYSAFE_FAULT_POINT("worker.after_claim"); });
  return lane;
}

std::unique_ptr<Lane> Lane::claim(int32 destination, int64 lease_us, int epoll_fd,
                                  std::optional<pg::StepError> *error) {
  return make(
      destination, epoll_fd,
      [&](outbox::Claim *claim) {
        return outbox::claim(destination, outbox::this_worker(), lease_us, claim);
      },
      error);
}

std::unique_ptr<Lane> Lane::claim_neglected(int32 destination, int64 lease_us, Milliseconds free_for,
                                            int epoll_fd, std::optional<pg::StepError> *error) {
  auto lane = make(
      destination, epoll_fd,
      [&](outbox::Claim *claim) {
        return outbox::claim_neglected(destination, outbox::this_worker(), lease_us, free_for * 1000, claim);
      },
      error);
  if (lane) lane->substitute_ = true;
  return lane;
}

void Lane::wake() {
  woken_ = true;
}

void Lane::leave() {
  leaving_ = true;
}

void Lane::stop() {
  if (dispatcher_) dispatcher_->stop();
  sink_at_ = 0;
}

bool Lane::take_recorded() {
  return std::exchange(recorded_, false);
}

Milliseconds Lane::turn(Milliseconds now, const Lanes &lanes) {
  // Whoever altered the destination may have put right what made it rest.
  if (state_ == State::kResting && (now >= rest_until_ || (reload_ && !batch_ && !leaving_)))
    state_ = batch_ ? State::kRecording : State::kReading;
  if (state_ == State::kIdle && awaits_standby_ && now >= standby_at_) ask_for_standby(now);
  if (state_ == State::kIdle && (woken_ || reload_ || now >= progress_at_)) state_ = State::kReading;
  if (leaving_ && !batch_ && state_ != State::kGone && now >= leave_at_) go();

  if (state_ == State::kReading && !waits_for(lanes, now)) read(now);
  if (state_ == State::kSending) {
    keep_lease(now);
    if (state_ == State::kSending) send(now);
  } else if ((ready_ || now >= sink_at_) && dispatcher_) {
    step_sink();  // a connection was closed, say
    sink_at_ = dispatcher_->timeout_ms() < 0 ? kNever : now + dispatcher_->timeout_ms();
    if (++idle_calls_ > kIdleCallsMax && !batch_) close_sink();  // a batch is recorded from the dispatcher
  }
  ready_ = false;
  if (state_ == State::kRecording) record(now, 0);
  if (state_ == State::kCalling) call_function(now);

  switch (state_) {
    case State::kReading:
      return waits_since_ == kNever ? now : now + kPatienceLook;
    case State::kRecording:
    case State::kCalling:
    case State::kGone:
      return now;
    case State::kSending:
      return std::min(sink_at_, renew_at_);
    case State::kResting:
      return std::min(sink_at_, rest_until_);
    case State::kIdle:
      break;
  }
  return std::min({sink_at_, progress_at_, standby_at_});
}

// The call to come may end the worker, and with it what other lanes have in flight. Each of them has its
// batch recorded first; what they begin after that is not waited for, else a busy one would never let this
// lane on.
bool Lane::waits_for(const Lanes &lanes, Milliseconds now) {
  if (waits_since_ == kNever) waits_since_ = now;
  if (now < wary_until_ && now - waits_since_ < kPatience &&
      std::any_of(lanes.begin(), lanes.end(),
                  [&](const auto &lane) { return lane->in_flight_since() <= waits_since_; }))
    return true;
  waits_since_ = kNever;
  return false;
}

// The destination as it is now. False: this lane is done with it.
bool Lane::load() {
  outbox::Destination *fresh = nullptr;
  close_sink();
  const auto error = pg::in_transaction("looking up a destination", nullptr, [&] {
    MemoryContextReset(settings_memory_);
    destination_ = nullptr;
    MemoryContextSwitchTo(settings_memory_);
    fresh = outbox::load_destination(claim_.destination);
  });
  if (error || !fresh) {
    // Dropped, or not to be known: the worker claims it again if it is still there.
    go();
    return false;
  }
  destination_ = fresh;
  reload_ = false;
  if (destination_->paused) {
    go();
    return false;
  }
  return true;
}

// Reads the next batch. A claim that ran out while there was nothing to do is only made again when there is:
// an idle worker writes nothing, but for the progress over events that its destination does not want, once.
void Lane::read(Milliseconds now) {
  if (reload_ && !load()) return;
  woken_ = false;
  progress_at_ = standby_at_ = kNever;
  retrysafe_event *envelopes = nullptr;
  outbox::ResolvedOption *options = nullptr;
  int option_count = 0;
  const char *library = nullptr;
  const char *database = nullptr;
  bool lost = false;
  bool again = false;
  bool progressed = false;
  bool standby = false;
  int64 progress_due_in = -1;
  drop_batch();

  outbox::Batch *batch = nullptr;
  const auto error = pg::in_transaction("reading events for destination", name(), [&] {
    MemoryContextSwitchTo(batch_memory_);
    const int32 most =
        !is_function() ? std::max(destination_->batch_events, dispatcher_ ? dispatcher_->least_events() : 1)
        : singles_ > 0 ? 1
                       : std::min(destination_->batch_events, outbox::kMaxFunctionEvents);
    batch = outbox::read_batch(*destination_, claim_, most, destination_->batch_bytes);
    if (!batch) {
      standby = outbox::is_kept_for_standby(claim_);
      if (!standby) progress_due_in = outbox::ms_until_progress_is_due(claim_);
      return;
    }
    // Looked at after the batch was read: what was emitted after a pause or a change must not go out as
    // before it.
    if (!outbox::is_current(*destination_)) {
      batch = nullptr;
      reload_ = again = true;
      return;
    }
    const int64 lease_us = is_function() ? outbox::function_lease_us(*destination_) : destination_->lease_us;
    if (!outbox::renew(&claim_, lease_us)) {
      batch = nullptr;
      lost = !outbox::reclaim(&claim_, outbox::this_worker(), lease_us);
      again = !lost;
      return;
    }
    if (batch->event_count == 0) {
      outbox::record(*destination_, batch, nullptr, false);
      progressed = again = true;
      return;
    }
    batch->claim = claim_;
    if (is_function()) return;
    envelopes = make_envelopes(batch->events, batch->event_count);
    if (!sink_) {
      const outbox::Kind *kind = outbox::find_kind(destination_->kind);
      if (!kind || !kind->library) outbox::raise_unknown_kind(destination_->kind);
      library = pstrdup(kind->library);
      const char *own = pg::own_database_name();
      database = pg_server_to_any(own, static_cast<int>(strlen(own)), PG_UTF8);
      options = outbox::resolved_options(*destination_, outbox::SecretReader::kServer, &option_count);
    }
  });
  if (error) {
    if (error->is(kInvalidOption) || error->is(kUnknownKind)) return unreachable(error->message.c_str(), now);
    if (failures_ == 1 && !ShutdownRequestPending) show_in_status(*error);
    return failed("read events for", *error, now);
  }
  failures_ = 0;
  if (!standby || !awaits_standby_) standby_pause_ = 0;
  awaits_standby_ = standby;
  recorded_ = recorded_ || progressed;  // retention may have waited for it
  if (lost) return go();
  if (again) return;  // state kReading: next turn
  if (!batch) {
    // Without new events nobody would wake this lane, and the destination would look as if it were behind.
    if (progress_due_in >= 0) progress_at_ = now + std::max(progress_due_in, kProgressRest);
    state_ = State::kIdle;
    if (awaits_standby_) ask_for_standby(now);
    return;
  }

  if (is_function()) {
    batch_ = batch;
    state_ = State::kCalling;
    return;
  }
  if (!sink_) {
    sink::Config config;
    config.destination = name();
    for (int i = 0; i < option_count; ++i) {
      config.options.emplace_back(options[i].name, options[i].value);
      if (options[i].is_masked) config.secrets.add(options[i].value);
    }
    config.database = database;
    config.allowed_addresses = settings::allowed_addresses ? settings::allowed_addresses : "";
    config.log = log_of_sink;
    std::string reason;
    const retrysafe_sink_module *module = sink::load(library, {Dynamic_library_path, pkglib_path}, &reason);
    if (module) sink_ = sink::Sink::open(module, std::move(config), &reason);
    if (!sink_) return unreachable(reason.c_str(), now);
    epoll_event event{};
    event.events = EPOLLIN;
    event.data.ptr = this;
    (void)epoll_ctl(epoll_fd_, EPOLL_CTL_ADD, sink_->wait_fd(), &event);
    pg::call([] { ReserveExternalFD(); });
    dispatcher_.emplace(*sink_, destination_->block_when_exhausted ? Dispatcher::DeadLetters::kBlock
                                                                   : Dispatcher::DeadLetters::kStepOver);
  }
  batch_ = batch;
  items_.resize(static_cast<size_t>(batch->event_count));
  for (int32 i = 0; i < batch->event_count; ++i) items_[i] = {envelopes[i], batch->events[i].held};
  dispatcher_->begin(items_);
  begun_at_ = now;
  idle_calls_ = 0;
  note_lease(now);
  sink_at_ = now;
  state_ = State::kSending;
}

// Nobody tells when standbys confirm something, to whom does not wait for it in a commit.
void Lane::ask_for_standby(Milliseconds now) {
  if (outbox::standbys_caught_up(claim_)) {
    standby_at_ = kNever;
    state_ = State::kReading;
    return;
  }
  standby_pause_ = std::clamp<Milliseconds>(2 * standby_pause_, 1, settings::poll_interval);
  standby_at_ = now + standby_pause_;
}

void Lane::close_sink() {
  dispatcher_.reset();
  if (!sink_) return;
  (void)epoll_ctl(epoll_fd_, EPOLL_CTL_DEL, sink_->wait_fd(), nullptr);
  sink_.reset();
  ReleaseExternalFD();
  sink_at_ = kNever;
}

void Lane::step_sink() {
  const sink::SignalsBlocked quiet;
  dispatcher_->step();
}

void Lane::send(Milliseconds now) {
  if (!ready_ && now < sink_at_) return;
  step_sink();
  sink_at_ = dispatcher_->timeout_ms() < 0 ? kNever : now + dispatcher_->timeout_ms();
  if (!dispatcher_->done()) return;
  pg::call([] { RETRYSAFE_FAULT_POINT("worker.after_ack"); });
  state_ = State::kRecording;
}

void Lane::note_lease(Milliseconds now) {
  const Milliseconds lease = destination_->lease_us / 1000;
  renew_at_ = std::max(now + 100, to_ms(claim_.lease_until) - lease / 2 + 1);
}

void Lane::keep_lease(Milliseconds now) {
  if (now < renew_at_) return;
  bool kept = false;
  const auto error = pg::in_transaction("renewing the lease for destination", name(),
                                        [&] { kept = outbox::renew(&claim_, destination_->lease_us); });
  if (error) {
    renew_at_ = now + kFailureRest;
    return;
  }
  if (kept) {
    ready_ = true;  // a sink that missed its time is looked after now and then
    return note_lease(now);
  }
  // Somebody else works the shard now, or will. What is in flight is given up: it comes again from there.
  log_line("lost shard %d of destination \"%s\" while sending to it", claim_.shard, name());
  go();
}

void Lane::record(Milliseconds now, int timeout_ms) {
  const auto result = dispatcher_->outcomes();
  bool anything = false;
  bool delivered = false;
  for (size_t i = 0; i < result.size(); ++i) {
    anything = anything || items_[i].held || result[i].status != Dispatcher::Status::kNotTried;
    delivered = delivered || result[i].status == Dispatcher::Status::kDelivered;
  }
  const bool away = dispatcher_->unreachable();
  const char *away_reason = dispatcher_->unreachable_reason().c_str();
  TimestampTz retry_at = 0;
  const auto error =
      !anything && !away
          ? std::nullopt
          : pg::in_transaction(
                "recording what became of events for destination", name(),
                [&] {
                  MemoryContextSwitchTo(batch_memory_);
                  auto *outcomes =
                      static_cast<outbox::Outcome *>(palloc(sizeof(outbox::Outcome) * (result.size() + 1)));
                  for (size_t i = 0; i < result.size(); ++i)
                    outcomes[i] = {status_of(result[i].status), microseconds(result[i].retry_after_ms),
                                   text_of_sink(result[i].reason.c_str())};
                  if (anything) outbox::record(*destination_, batch_, outcomes, away);
                  if (away) {
                    away_reason = text_of_sink(away_reason);
                    retry_at =
                        outbox::record_unreachable(*destination_, claim_, away_reason,
                                                   microseconds(dispatcher_->unreachable_retry_after_ms()));
                  }
                  RETRYSAFE_FAULT_POINT("record.before_commit");
                },
                timeout_ms);
  if (error && error->is(kStaleBatch)) {
    log_line("lost shard %d of destination \"%s\" before its batch was recorded", claim_.shard, name());
    return go();
  }
  if (error) {
    if (failures_ >= kRecordTries) drop_batch();
    return failed("record what became of events for", *error, now);
  }
  failures_ = 0;
  recorded_ = recorded_ || anything;
  if (delivered && !away) note_reachable(claim_.destination, name());
  if (away) {
    note_unreachable(claim_.destination, name(), away_reason);
    rest(to_ms(retry_at));
  } else {
    state_ = State::kReading;
  }
  drop_batch();
}

bool Lane::is_function() const {
  return is_kind(destination_->kind, kinds::function);
}

// Sends and records in one: the function's effects and the progress commit together.
void Lane::call_function(Milliseconds now) {
  if (has_fatal_call(*batch_)) return count_fatal_call(now);
  outbox::FunctionRun run{};
  const auto error = pg::in_transaction("calling the function of destination", name(), [&] {
    MemoryContextSwitchTo(batch_memory_);
    outbox::call_function(*destination_, batch_, should_break_off, &run);
  });
  if (error) return call_failed(*error, run.called, now);
  failures_ = 0;
  if (singles_ > 0) --singles_;
  recorded_ = true;
  if (run.reason) {
    note_unreachable(claim_.destination, name(), run.reason);
    rest(to_ms(run.retry_at));
  } else {
    if (run.delivered) note_reachable(claim_.destination, name());
    state_ = State::kReading;
  }
  drop_batch();
}

// The function may have done it itself, by dropping its destination: that was rolled back, and is its
// failure.
bool Lane::has_lost_shard() {
  bool held = false;
  const auto error = pg::in_transaction("looking at the shard of destination", name(),
                                        [&] { held = outbox::is_held(claim_); });
  return error || !held;
}

void Lane::call_failed(const pg::StepError &error, bool called, Milliseconds now) {
  if (error.is(kStaleBatch) && has_lost_shard()) {
    log_line("lost shard %d of destination \"%s\" before its batch was recorded", claim_.shard, name());
    return go();
  }
  if (called) {
    const bool alone = batch_->event_count == 1;
    if (alone && outbox::may_be_a_calls_fault(error.sqlstate) && !blame(error.message.c_str())) return;
    singles_ = std::max(singles_, batch_->event_count);
  }
  drop_batch();
  if (error.is(kStaleBatch)) return rest_after_failure(now);  // failed() would take it for a lost shard
  failed("call the function of", error, now);
}

// When the failure of an event can be recorded at once, it is what the call did that could not be. An error:
// it cannot either, and so nothing is known of the event.
std::optional<pg::StepError> Lane::blame(const char *reason) {
  auto error = pg::in_transaction("recording what became of events for destination", name(), [&] {
    MemoryContextSwitchTo(batch_memory_);
    outbox::record_failure(*destination_, batch_, reason);
  });
  if (error) return error;
  failures_ = 0;
  if (singles_ > 0) --singles_;
  recorded_ = true;
  drop_batch();
  state_ = State::kReading;
  return std::nullopt;
}

// With nothing else in the transaction: what comes after it in the batch may end the worker as well.
void Lane::count_fatal_call(Milliseconds now) {
  if (batch_->event_count > 1) {
    singles_ = batch_->event_count;
    drop_batch();
    state_ = State::kReading;
    return;
  }
  wary_until_ = now + kWaryFor;
  const outbox::CalledEvent event = outbox::called_event(claim_.destination, batch_->events[0]);
  const bool held = batch_->events[0].held;  // it was parked behind its key, and comes once more
  if (const auto error = blame("the worker ended while the event was handled")) {
    drop_batch();
    return failed("record what became of events for", *error, now);
  }
  if (!held) forget_fatal_call(event);
}

// The destination cannot even be opened.
void Lane::unreachable(const char *reason, Milliseconds now) {
  drop_batch();
  TimestampTz retry_at = 0;
  const auto error = pg::in_transaction("noting that a destination is unreachable:", name(), [&] {
    MemoryContextSwitchTo(batch_memory_);
    reason = text_of_sink(reason);
    retry_at = outbox::record_unreachable(*destination_, claim_, reason, -1);
  });
  if (error) return failed("note the state of", *error, now);
  note_unreachable(claim_.destination, name(), reason);
  rest(to_ms(retry_at));
}

void Lane::drop_batch() {
  batch_ = nullptr;
  items_.clear();
  renew_at_ = kNever;
  MemoryContextReset(batch_memory_);
}

// An error that has come again. It may be one that keeps this from being written, too.
void Lane::show_in_status(const pg::StepError &error) {
  char text[256];
  pg::copy_message(text, error.message.c_str());
  (void)pg::in_transaction("noting an error for destination", name(),
                           [&] { outbox::record_error(claim_, text); });
}

void Lane::failed(const char *what, const pg::StepError &error, Milliseconds now) {
  if (error.is(kStaleBatch)) return go();
  // The worker says so, and drops its lanes if it is the whole extension that is gone.
  if (error.is(kNotInstalled)) return rest_after_failure(now);
  if (failures_ == 0 && !ShutdownRequestPending) {
    log_line("could not %s destination \"%s\": %s", what, name(), error.message.c_str());
    show_error(error.message.c_str());
  }
  rest_after_failure(now);
}

void Lane::rest_after_failure(Milliseconds now) {
  rest(now + std::min(kFailureRest << std::min(failures_, 10), kFailureRestMax));
  ++failures_;
}

void Lane::rest(Milliseconds until) {
  rest_until_ = until;
  state_ = State::kResting;
}

void Lane::go() {
  close_sink();
  drop_batch();
  const auto error = pg::in_transaction(
      "giving a shard back", nullptr, [&] { outbox::release(claim_, true); }, 2000);
  if (error) {
    // Somebody has its row locked, say. As long as we hold the shard nobody claims it, this worker neither.
    rest_after_failure(now_ms());
    leaving_ = true;
    leave_at_ = rest_until_;
    return;
  }
  state_ = State::kGone;
  announce_commit(News::kAnything);  // whoever wants the shard need not wait for the end of the lease
}

void Lane::wind_up(int timeout_ms) {
  if (state_ == State::kGone) return;
  if (batch_ && dispatcher_) record(now_ms(), timeout_ms);
  if (state_ != State::kGone) go();
}

}  // namespace retrysafe::runtime
