#include "relay/lane.hpp"

#include <algorithm>
#include <utility>

#include "core/error_codes.hpp"
#include "core/kinds/kinds.hpp"
#include "relay/log.hpp"

namespace retrysafe::relay {

namespace {

constexpr const char *kInsufficientPrivilege = "42501";
constexpr Milliseconds kStatementTimeout = 30'000;
constexpr Milliseconds kRest = 1000;
constexpr Milliseconds kRestMax = 60'000;
// What is recorded is not sent again, also after a crash. Progress that a failover loses is made again, so
// nobody waits for a standby.
constexpr const char *kDurably = " FROM pg_catalog.set_config('synchronous_commit', 'local', true)";
// A boolean in its binary form.
constexpr std::string_view kTrue("\1", 1);
// Outcomes that could not be recorded are kept for so many tries.
constexpr int kRecordTries = 8;
// Commits may come by the thousand; for events of others a lane looks no more often than this.
constexpr Milliseconds kLookInterval = 2;
// A sink whose descriptor stays readable without anything to do would keep the relay awake for ever.
constexpr int kIdleCallsMax = 1000;

std::string milliseconds(Milliseconds ms) {
  return std::to_string(ms) + " ms";
}

// Those that a relay can publish to.
std::string built_in_names() {
  std::string names;
  for (const BuiltInKind *kind : built_in_kinds())
    if (kind->library) names.append(names.empty() ? "" : ", ").append(kind->name);
  return names;
}

void log_of_sink(const char *message) {
  log(Level::kWarning, message);
}

}  // namespace

Lane::Lane(const Configuration &configuration, const DestinationSection &section, const Hosts &hosts,
           Statistics *statistics)
    : configuration_(configuration),
      section_(section),
      statistics_(statistics),
      session_(
          hosts, [this] { connected(); },
          [this](const std::string &reason, bool nowhere) { connection_failed(reason, nowhere); }) {}

void Lane::turn(Milliseconds now) {
  if (state_ == State::kEnded) return;
  if (session_ready_ || now >= session_.wakes_at()) session_.turn(now);
  session_ready_ = false;
  if (state_ == State::kEnded) return;
  // It could not be recorded in time: the batch comes again when its lease ends.
  if (stopping_ && now >= give_up_at_ + kRest) return finish(End::kDone);
  // Whoever altered the destination may have put right what made it rest.
  if (state_ == State::kResting && (now >= rest_until_ || stopping_ || (reload_ && !batch_))) {
    state_ = again_;
    if (state_ == State::kRecording) return send_record();
    if (state_ == State::kLoading) return load();
    if (state_ == State::kFetching) return fetch();
  }
  if (state_ == State::kIdle && stopping_) return release();
  if (state_ == State::kIdle && (woken_ || reload_) && now >= look_at_) fetch();
  if (state_ == State::kSending || (batch_ && state_ == State::kWaiting && outcomes_.empty())) {
    keep_lease(now);
    if (batch_) send(now);
  } else if (sink_ && (sink_ready_ || now >= sink_at_)) {
    step_idle_sink(now);
  }
  sink_ready_ = false;
}

void Lane::wait_for(std::vector<pollfd> *descriptors) {
  session_descriptor_ = sink_descriptor_ = 0;
  if (state_ == State::kEnded) return;
  if (const auto descriptor = session_.waits_for()) {
    session_descriptor_ = descriptors->size();
    descriptors->push_back(*descriptor);
  }
  if (sink_) {
    sink_descriptor_ = descriptors->size();
    descriptors->push_back({sink_->wait_fd(), POLLIN, 0});
  }
}

void Lane::heard(const std::vector<pollfd> &descriptors) {
  session_ready_ = session_descriptor_ > 0 && descriptors[session_descriptor_].revents != 0;
  sink_ready_ = sink_descriptor_ > 0 && descriptors[sink_descriptor_].revents != 0;
}

Milliseconds Lane::wakes_at() const {
  if (state_ == State::kEnded) return kNever;
  Milliseconds at = std::min({session_.wakes_at(), sink_at_, renew_at_});
  if (state_ == State::kResting) at = std::min(at, reload_ && !batch_ ? 0 : rest_until_);
  if (state_ == State::kIdle && (woken_ || reload_)) at = std::min(at, look_at_);
  if (batch_) at = std::min(at, lease_ends_at_);
  if (stopping_) at = std::min(at, state_ == State::kSending ? give_up_at_ : give_up_at_ + kRest);
  return at;
}

void Lane::notice(const std::string &version) {
  if (opened_ && version != version_) reload_ = true;
}

void Lane::stop(Milliseconds give_up_at) {
  if (stopping_) return;
  stopping_ = true;
  give_up_at_ = give_up_at;
  if (dispatcher_) dispatcher_->stop();
  sink_at_ = 0;
  if (state_ == State::kIdle || (state_ == State::kResting && !batch_)) return release();
  if (!batch_ && !session_.ready()) finish(End::kDone);
}

// --- the connection ----------------------------------------------------------------------------------------

void Lane::connected() {
  if (connection_missed_)
    log(Level::kInfo, "connected to the database again", {{"destination", destination()}});
  connection_missed_ = false;
  connected_ = true;
  // Leases go by the session: those of the one before would stand in the way until they end.
  // Recording does so for that of the batch.
  std::map<int, std::string>::node_type of_batch;
  if (batch_) of_batch = handles_.extract(batch_->shard());
  leave_shards();
  if (of_batch) handles_.insert(std::move(of_batch));
  if (state_ != State::kWaiting) return;
  if (!batch_) return stopping_ ? finish(End::kDone) : load();
  if (outcomes_.empty() && !dispatcher_->done()) {
    state_ = State::kSending;
    return;
  }
  record();
}

void Lane::connection_failed(const std::string &reason, bool nowhere) {
  statistics_->connections += std::exchange(connected_, false);
  if (state_ == State::kEnded) return;
  if (nowhere && !connection_missed_) {
    log(runs_on() ? Level::kWarning : Level::kError, "no connection to the database",
        {{"destination", destination()}, {"reason", reason}});
    connection_missed_ = true;
  }
  ++fetches_;
  renewing_ = false;
  state_ = State::kWaiting;
  if (nowhere && !runs_on()) return finish(End::kDatabase);
  if (stopping_ && !batch_) finish(End::kDone);
}

// --- loading -----------------------------------------------------------------------------------------------

void Lane::load() {
  state_ = State::kLoading;
  reload_ = false;
  close_sink();
  session_.send(
      "SELECT kind, library, version, batch_events, batch_bytes, lease_ms, on_exhausted, database"
      " FROM @outbox_relay_destination($1)",
      {destination()}, false, kStatementTimeout, [this](const Answer &answer) {
        if (answer.lost()) return;
        if (!answer.good()) return refused("look the destination up", answer, State::kLoading);
        const auto number = [&](int column) { return std::stoll(answer.text(0, column)); };
        kind_ = answer.text(0, 0);
        library_ = answer.text(0, 1);
        version_ = answer.text(0, 2);
        batch_events_ = static_cast<std::int32_t>(number(3));
        batch_bytes_ = static_cast<std::int32_t>(number(4));
        lease_ = number(5);
        dead_letters_ = answer.text(0, 6) == "block" ? Dispatcher::DeadLetters::kBlock
                                                     : Dispatcher::DeadLetters::kStepOver;
        database_ = answer.text(0, 7);
        schema_ = session_.schema();
        in_database_ = kind_ != "pull";
        load_option_list();
      });
}

void Lane::load_option_list() {
  if (!in_database_) {
    if (section_.kind.empty())
      return configuration_is_wrong(
          "it is of kind \"pull\": the configuration file must tell which kind to publish to, as in \"kind = "
          "http\"");
    kind_ = section_.kind;
    library_.clear();
  } else if (!section_.kind.empty() && section_.kind != kind_) {
    return configuration_is_wrong("it is of kind \"" + kind_ + "\" in the database");
  }
  if (!section_.library.empty()) library_ = section_.library;
  option_list_.clear();
  option_texts_.clear();
  if (const BuiltInKind *built_in = find_built_in_kind(kind_)) {
    if (!built_in->library) return configuration_is_wrong("a relay cannot publish to kind \"" + kind_ + "\"");
    if (library_.empty()) library_ = built_in->library;
    option_list_.assign(built_in->options.begin(), built_in->options.end());
    return load_options();
  }
  if (library_.empty()) library_ = "retrysafe_" + kind_;
  session_.send(
      "SELECT option, type, required, \"default\", min, max, choices FROM @outbox_options_of_kind($1)",
      {kind_}, false, kStatementTimeout, [this](const Answer &answer) {
        if (answer.lost()) return;
        if (!answer.good()) return refused("look the options of its kind up", answer, State::kLoading);
        const auto kept = [&](int row, int column) -> std::string_view {
          if (answer.is_null(row, column)) return {};
          return option_texts_.emplace_back(answer.text(row, column));
        };
        for (int i = 0; i < answer.rows(); ++i) {
          OptionDescription option;
          option.name = kept(i, 0);
          option.type = option_type(answer.text(i, 1)).value_or(OptionType::kString);
          option.required = answer.text(i, 2) == "t";
          option.default_value = kept(i, 3);
          if (!answer.is_null(i, 4)) option.min = std::stoll(answer.text(i, 4));
          if (!answer.is_null(i, 5)) option.max = std::stoll(answer.text(i, 5));
          option.choices = kept(i, 6);
          option_list_.push_back(option);
        }
        std::string reason;
        if (answer.rows() == 0 && !sink::load(library_, library_path(), &reason))
          return configuration_is_wrong("kind \"" + kind_ + "\" is unknown: " + reason +
                                        "; the kinds that come with the extension are " + built_in_names());
        if (answer.rows() == 0 && !section_.options.empty())
          return configuration_is_wrong(
              "kind \"" + kind_ +
              "\" takes no options, as far as the database knows; a kind of your own is "
              "registered there with outbox_register_kind");
        load_options();
      });
}

void Lane::load_options() {
  Options own;
  try {
    own = options_of_section(section_, option_list_, !in_database_, configuration_);
  } catch (const ConfigurationError &error) {
    return configuration_is_wrong(error.what());
  }
  if (!in_database_) {
    // The operator of this machine has written them.
    if (kind_ == "postgres") own.emplace_back("require_password", "false");
    return open_sink(std::move(own));
  }
  session_.send(
      "SELECT option, value, source FROM @outbox_relay_options($1)", {destination()}, false,
      kStatementTimeout, [this, over = std::move(own)](const Answer &answer) mutable {
        if (answer.lost()) return;
        if (!answer.good()) return refused("look its options up", answer, State::kLoading);
        Options options;
        try {
          for (int i = 0; i < answer.rows(); ++i) {
            const std::string name = answer.text(i, 0);
            const bool given_here =
                std::any_of(over.begin(), over.end(), [&](const auto &o) { return o.first == name; });
            if (given_here) continue;
            const OptionName known = find_option(option_list_, name);
            const bool secret = known.description && known.description->type == OptionType::kSecret;
            options.emplace_back(
                name, option_of_database(name, answer.text(i, 1), answer.text(i, 2), secret, configuration_));
          }
        } catch (const ConfigurationError &error) {
          return configuration_is_wrong(error.what());
        }
        merge(std::move(over), &options);
        open_sink(std::move(options));
      });
}

void Lane::open_sink(Options options) {
  sink::Config config;
  config.destination = destination();
  config.database = database_;
  for (const auto &[name, value] : options) {
    const OptionName known = find_option(option_list_, std::string_view(name).substr(0, name.find('.')));
    if (known.description && is_masked(known.description->type)) config.secrets.add(value);
  }
  config.options = std::move(options);
  config.allowed_addresses = configuration_.allowed_addresses;
  config.log = log_of_sink;
  std::string reason;
  const retrysafe_sink_module *module = sink::load(library_, library_path(), &reason);
  if (module) sink_ = sink::Sink::open(module, std::move(config), &reason);
  if (!sink_) return configuration_is_wrong(reason);
  errors_ = 0;
  opened_ = true;
  if (configuration_.mode == Mode::kCheck) {
    log(Level::kInfo, "the destination can be published to",
        {{"destination", destination()}, {"kind", kind_}, {"database", database_}});
    return finish(End::kDone);
  }
  fetch();
}

LibraryPath Lane::library_path() const {
  return {configuration_.library_path, RETRYSAFE_LIBDIR};
}

void Lane::close_sink() {
  dispatcher_ = nullptr;
  dispatchers_.clear();
  sink_.reset();
  sink_at_ = kNever;
}

void Lane::configuration_is_wrong(const std::string &what) {
  if (what != last_error_)
    log(Level::kError, "the destination cannot be published to",
        {{"destination", destination()}, {"reason", what}});
  last_error_ = what;
  if (!runs_on() || !opened_) return finish(End::kConfiguration);
  // Whoever altered it may put it right again.
  again_ = State::kLoading;
  state_ = State::kResting;
  rest_until_ = now_ms() + kRest;
  leave_shards();
  set_aside(what);
}

// For others, or for the next session of this lane.
void Lane::leave_shards() {
  std::map<int, std::string> handles;
  handles.swap(handles_);
  for (const auto &[shard, handle] : handles) {
    if (!session_.ready()) return;
    session_.send("SELECT @outbox_release($1)", {handle}, false, kStatementTimeout, [](const Answer &) {});
  }
}

// What cannot be sent is recorded as what cannot be reached: its shard rests, and outbox_status has the
// reason. Then it is left to others as well.
void Lane::set_aside(const std::string &what) {
  session_.send(std::string("SELECT ") + kEventColumns + " FROM @outbox_fetch($1, 1, $2, $3::interval)",
                {destination(), std::to_string(batch_bytes_), milliseconds(lease_)}, true, kStatementTimeout,
                [this, reason = storable(what, session_.utf8())](Answer answer) {
                  if (!answer.good() || answer.rows() == 0) return;
                  const EventBatch batch(std::move(answer.result), database_);
                  if (state_ == State::kReleasing) return give_back(batch.handle());
                  handles_[batch.shard()] = batch.handle();
                  const std::string id(batch.event_id(0));
                  const std::string not_tried = "{\"" + id + "\":{\"status\":\"not tried\"}}";
                  session_.send("SELECT @outbox_record($1, $2::jsonb, $3)",
                                {batch.handle(), not_tried, reason}, false, kStatementTimeout,
                                [](const Answer &) {});
                  leave_shards();
                });
}

// --- events ------------------------------------------------------------------------------------------------

void Lane::fetch() {
  if (stopping_) return release();
  if (reload_) return load();
  state_ = State::kFetching;
  ask_for_events();
}

void Lane::ask_for_events() {
  woken_ = false;
  const int number = ++fetches_;
  std::int32_t most = batch_events_;
  for (const auto &[shard, dispatcher] : dispatchers_) most = std::max(most, dispatcher.least_events());
  // One row without a batch where there is no event. If that fetch has written nevertheless, it has got past
  // some that are not to be sent, or moved some that came due: the next one may have events.
  session_.send(std::string("SELECT ") + kEventColumns +
                    ", pg_catalog.pg_current_xact_id_if_assigned() IS NOT NULL"
                    " FROM (VALUES (1)) AS one LEFT JOIN @outbox_fetch($1, $2, $3, $4::interval) ON true",
                {destination(), std::to_string(most), std::to_string(batch_bytes_), milliseconds(lease_)},
                true, kStatementTimeout, [this, number, asked_at = now_ms()](Answer answer) {
                  if (answer.lost() || number != fetches_) return;
                  if (state_ == State::kReleasing && answer.good() && !answer.is_null(0, 0))
                    return give_back(answer.text(0, 0));
                  if (state_ != State::kFetching) {
                    asked_ahead_ = false;  // what was to be recorded before it was not yet
                    return;
                  }
                  if (!answer.good()) return refused("fetch events", answer, State::kFetching);
                  // What is left of a lease that was not renewed is half of it, at least.
                  lease_ends_at_ = asked_at + lease_ / 2;
                  renew_at_ = asked_at + lease_ / 4;
                  fetched(std::move(answer));
                });
}

void Lane::fetched(Answer answer) {
  errors_ = 0;
  last_error_.clear();
  if (answer.is_null(0, 0)) return nothing_to_do(answer.text(0, kEventColumnCount) == kTrue);
  batch_.emplace(std::move(answer.result), database_);
  handles_[batch_->shard()] = batch_->handle();
  reload_ = reload_ || session_.schema() != schema_;
  if (stopping_ || reload_) {  // not acknowledged, it comes again
    batch_.reset();
    lease_ends_at_ = renew_at_ = kNever;
    return fetch();
  }
  dispatcher_ = &dispatchers_.try_emplace(batch_->shard(), *sink_, dead_letters_).first->second;
  dispatcher_->begin(batch_->items());
  state_ = State::kSending;
  sink_at_ = 0;
  send(now_ms());
}

void Lane::nothing_to_do(bool got_on) {
  lease_ends_at_ = renew_at_ = kNever;
  if (got_on) return fetch();
  if (stopping_ || !runs_on()) return release();
  state_ = State::kIdle;
  look_at_ = now_ms() + kLookInterval;
}

void Lane::send(Milliseconds now) {
  if (sink_ready_ || now >= sink_at_) {
    const sink::SignalsBlocked quiet;
    dispatcher_->step();
    sink_at_ = dispatcher_->timeout_ms() < 0 ? kNever : now + dispatcher_->timeout_ms();
    idle_calls_ = 0;
  }
  if (dispatcher_->done() || (stopping_ && now >= give_up_at_)) record();
}

// Nothing is in flight: a connection was closed, say.
void Lane::step_idle_sink(Milliseconds now) {
  retrysafe_outcome outcomes[1];
  int timeout = -1;
  (void)sink_->collect(outcomes, &timeout);
  sink_at_ = timeout < 0 ? kNever : now + timeout;
  if (++idle_calls_ <= kIdleCallsMax || batch_) return;
  idle_calls_ = 0;
  close_sink();
  reload_ = true;
}

void Lane::keep_lease(Milliseconds now) {
  if (now >= lease_ends_at_) return lose_batch("its lease ended while it was being sent");
  if (now < renew_at_ || renewing_ || !session_.ready()) return;
  renewing_ = true;
  renew_at_ = kNever;
  session_.send(
      "SELECT (1000 * extract(epoch FROM @outbox_renew($1, $2::interval) - "
      "pg_catalog.clock_timestamp()))::bigint",
      {batch_->handle(), milliseconds(lease_)}, false, kStatementTimeout,
      [this, asked_at = now](const Answer &answer) {
        renewing_ = false;
        if (answer.lost() || state_ != State::kSending) return;
        if (answer.sqlstate == kStaleBatch.sqlstate) return lose_batch("somebody else has its shard");
        renew_at_ = now_ms() + kRest;
        if (!answer.good()) return;
        sink_at_ = 0;  // a sink that missed its time is looked after now and then
        const Milliseconds left = std::stoll(answer.text(0, 0));
        lease_ends_at_ = asked_at + left;
        renew_at_ = std::max(now_ms() + 100, asked_at + left - lease_ / 2 + 1);
      });
}

// What is in flight is given up: it comes again, from whoever has the shard.
void Lane::lose_batch(const char *why) {
  ++statistics_->lost;
  log(Level::kWarning, "a batch was lost", {{"destination", destination()}, {"reason", why}});
  if (session_.ready()) leave_shards();  // also of the batch: a crash may have taken nothing but its window
  close_sink();                          // it may still look at the events
  batch_.reset();
  outcomes_.clear();
  away_.reset();
  away_for_.reset();
  lease_ends_at_ = renew_at_ = kNever;
  ++fetches_;
  if (stopping_) return release();
  if (!session_.ready()) {
    state_ = State::kWaiting;
    return;
  }
  load();
}

// --- recording ---------------------------------------------------------------------------------------------

void Lane::record() {
  const auto outcomes = dispatcher_->outcomes();
  outcomes_ = outcomes_json(*batch_, outcomes, session_.utf8());
  if (outcomes_.empty()) outcomes_ = "{}";
  if (dispatcher_->unreachable()) {
    away_ = storable(dispatcher_->unreachable_reason(), session_.utf8());
    const int wait = dispatcher_->unreachable_retry_after_ms();
    if (wait >= 0) away_for_ = milliseconds(wait);
  }
  lease_ends_at_ = renew_at_ = kNever;
  if (!session_.ready()) {
    state_ = State::kWaiting;
    return;
  }
  send_record();
}

// The next batch is asked for in the same breath.
void Lane::send_record() {
  state_ = State::kRecording;
  const auto done = [this](const Answer &answer) {
    if (!answer.lost())
      recorded(answer);  // else the next connection asks again: recording twice records nothing
  };
  if (outcomes_ == "{}" && !away_)
    session_.send(std::string("SELECT @outbox_ack($1)") + kDurably, {batch_->handle()}, false,
                  kStatementTimeout, done);
  else
    session_.send(std::string("SELECT @outbox_record($1, $2::jsonb, $3, $4::interval)") + kDurably,
                  {batch_->handle(), outcomes_, away_, away_for_}, false, kStatementTimeout, done);
  asked_ahead_ = session_.ready() && goes_on();
  if (asked_ahead_) ask_for_events();
}

void Lane::recorded(const Answer &answer) {
  if (answer.sqlstate == kStaleBatch.sqlstate) return lose_batch("its lease ended before it was recorded");
  if (!answer.good()) {
    ++fetches_;  // what was asked for ahead may be this very batch
    if (errors_ >= kRecordTries) return lose_batch("it could not be recorded");
    return refused("record what became of events", answer, State::kRecording);
  }
  errors_ = 0;
  ++statistics_->batches;
  count_outcomes();
  note_reachability();
  if (dispatcher_->in_flight() > 0) close_sink();  // given up at the end; it may still look at the events
  batch_.reset();
  dispatcher_ = nullptr;
  outcomes_.clear();
  away_.reset();
  away_for_.reset();
  if (stopping_ || configuration_.mode == Mode::kOnce) return release();
  if (!asked_ahead_) return fetch();
  state_ = State::kFetching;
}

void Lane::count_outcomes() {
  for (const Dispatcher::Outcome &outcome : dispatcher_->outcomes()) {
    statistics_->delivered += outcome.status == Dispatcher::Status::kDelivered;
    statistics_->failed += outcome.status == Dispatcher::Status::kFailedRetry;
    statistics_->dead += outcome.status == Dispatcher::Status::kFailedFinal;
  }
  if (away_) ++statistics_->unreachable;
}

void Lane::note_reachability() {
  const Milliseconds now = now_ms();
  if (away_) {
    if (reachability_.lost(now))
      log(Level::kWarning, "the destination is unreachable",
          {{"destination", destination()}, {"reason", away_->empty() ? "no reason given" : *away_}});
  } else if (const auto away_for = reachability_.back(now)) {
    log(Level::kInfo, "the destination is back",
        {{"destination", destination()}, {"after_ms", std::to_string(*away_for), true}});
  }
}

// --- the end -----------------------------------------------------------------------------------------------

void Lane::release() {
  if (!session_.ready() || handles_.empty()) return finish(End::kDone);
  state_ = State::kReleasing;
  stopping_ = true;
  give_up_at_ = std::min(give_up_at_, now_ms());
  for (const auto &[shard, handle] : handles_) give_back(handle);
}

void Lane::give_back(const std::string &handle) {
  ++given_back_;
  session_.send("SELECT @outbox_release($1)", {handle}, false, kStatementTimeout,
                [this](const Answer &answer) {
                  // Refused where the lease has ended anyway.
                  if (--given_back_ == 0 && !answer.lost()) finish(End::kDone);
                });
}

void Lane::finish(End end) {
  close_sink();
  batch_.reset();
  state_ = State::kEnded;
  end_ = end;
}

void Lane::refused(const char *what, const Answer &answer, State again) {
  if (answer.message != last_error_) {
    std::string reason = answer.message;
    if (answer.sqlstate == kInsufficientPrivilege)
      reason +=
          " (Give the role the access: SELECT " + session_.schema() + "retrysafe_grant('ROLE', 'relay').)";
    log(Level::kError, std::string("could not ").append(what),
        {{"destination", destination()}, {"sqlstate", answer.sqlstate}, {"reason", reason}});
  }
  last_error_ = answer.message;
  const bool unknown =
      answer.sqlstate == kUnknownDestination.sqlstate || answer.sqlstate == kNotFetchable.sqlstate;
  if (!runs_on() || (unknown && !opened_)) return finish(unknown ? End::kConfiguration : End::kDatabase);
  again_ = unknown ? State::kLoading : again;  // the next one of that name is another
  state_ = State::kResting;
  rest_until_ = now_ms() + std::min(kRest << std::min(errors_, 10), kRestMax);
  ++errors_;
}

}  // namespace retrysafe::relay
