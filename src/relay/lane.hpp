// One connection that publishes to one destination: it fetches a batch, sends it, records what became of it,
// and asks for the next one in the same breath.
//
//   state        meaning                                          next
//   waiting      for the connection                               loading; recording, when a batch is at hand
//   loading      asks how the destination is to be published to   fetching; resting
//   fetching                                                      sending; idle when there is nothing
//   sending      no statement is under way, the lease is renewed  recording; loading when the lease is lost
//   recording    the outcomes, and mostly the next fetch          fetching; resting, then recording again
//   idle         until woken                                      fetching
//   resting      after an error of the server                     where it was
//   releasing    gives its shards back                            ended
//
// A connection that breaks takes nothing with it: what is being sent goes on, and the next connection records
// it, if it comes before the lease ends.
#pragma once

#include <deque>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "core/dispatcher.hpp"
#include "core/reachability.hpp"
#include "relay/clock.hpp"
#include "relay/configuration.hpp"
#include "relay/destination_options.hpp"
#include "relay/event_batch.hpp"
#include "relay/session.hpp"
#include "relay/statistics.hpp"
#include "sink/host.hpp"

namespace retrysafe::relay {

class Lane {
 public:
  enum class End {
    kNone,
    kDone,           // as it was asked to
    kConfiguration,  // what it was told cannot work
    kDatabase,       // could not be reached, or refuses
  };

  Lane(const Configuration &configuration, const DestinationSection &section, const Hosts &hosts,
       Statistics *statistics);

  void turn(Milliseconds now);
  // Adds its descriptors; afterwards, which of them have something.
  void wait_for(std::vector<pollfd> *descriptors);
  void heard(const std::vector<pollfd> &descriptors);
  Milliseconds wakes_at() const;

  // There may be something to send.
  void wake() { woken_ = true; }
  bool idle() const { return state_ == State::kIdle; }
  bool loading() const { return state_ == State::kLoading; }
  // Its sink is open, so that it does what it fetches for.
  bool publishes() const { return sink_ != nullptr; }
  // The version of the destination, as it is now: another one than was loaded is loaded before the next
  // batch.
  void notice(const std::string &version);
  // Options and secrets are to be read again.
  void reload() { reload_ = true; }
  // Finishes what is in flight, until `give_up_at` at the latest, records it, and gives its shards back.
  void stop(Milliseconds give_up_at);

  End end() const { return end_; }
  bool opened() const { return opened_; }
  const std::string &destination() const { return section_.name; }

 private:
  enum class State {
    kWaiting,
    kLoading,
    kFetching,
    kSending,
    kRecording,
    kIdle,
    kResting,
    kReleasing,
    kEnded
  };

  void connected();
  void connection_failed(const std::string &reason, bool nowhere);
  void load();
  void load_option_list();
  void load_options();
  void open_sink(Options options);
  LibraryPath library_path() const;
  void close_sink();
  void fetch();
  void ask_for_events();
  void fetched(Answer answer);
  void nothing_to_do(bool got_on);
  void send(Milliseconds now);
  void step_idle_sink(Milliseconds now);
  void keep_lease(Milliseconds now);
  void lose_batch(const char *why);
  void record();
  void send_record();
  void recorded(const Answer &answer);
  void count_outcomes();
  void note_reachability();
  void release();
  void give_back(const std::string &handle);
  void leave_shards();
  void finish(End end);
  // Errors of the server.
  void refused(const char *what, const Answer &answer, State again);
  void configuration_is_wrong(const std::string &what);
  void set_aside(const std::string &what);
  bool goes_on() const { return !stopping_ && !reload_ && configuration_.mode != Mode::kOnce; }
  bool runs_on() const { return configuration_.mode == Mode::kService; }

  const Configuration &configuration_;
  const DestinationSection &section_;
  Statistics *statistics_;
  Session session_;
  State state_ = State::kWaiting;
  State again_ = State::kWaiting;  // after resting
  End end_ = End::kNone;

  // The destination as it was loaded.
  std::string version_, kind_, library_, database_;
  std::string schema_;  // of the extension: in another one the extension may be another as well
  bool in_database_ = false;
  std::deque<std::string> option_texts_;  // what option_list_ views
  std::vector<OptionDescription> option_list_;
  std::int32_t batch_events_ = 0, batch_bytes_ = 0;
  Milliseconds lease_ = 0;
  Dispatcher::DeadLetters dead_letters_ = Dispatcher::DeadLetters::kStepOver;

  std::unique_ptr<sink::Sink> sink_;
  std::map<int, Dispatcher> dispatchers_;  // of each shard: they remember what fails again and again
  std::optional<EventBatch> batch_;
  Dispatcher *dispatcher_ = nullptr;
  std::map<int, std::string> handles_;  // the last batch of each shard

  std::string outcomes_;
  std::optional<std::string> away_;  // why the destination could not be reached
  std::optional<std::string> away_for_;
  int fetches_ = 0;  // answers to earlier ones are not for us any more

  bool woken_ = true;
  bool reload_ = false;
  bool stopping_ = false;
  bool renewing_ = false;
  bool asked_ahead_ = false;
  int given_back_ = 0;   // shards of which the answer is not there yet
  bool opened_ = false;  // a sink, once
  bool connected_ = false;
  bool connection_missed_ = false;  // that was logged
  Reachability reachability_;
  int errors_ = 0;  // in a row
  std::string last_error_;
  size_t session_descriptor_ = 0, sink_descriptor_ = 0;  // their places in the list; 0: none
  bool session_ready_ = true, sink_ready_ = false;
  int idle_calls_ = 0;
  Milliseconds give_up_at_ = kNever;
  Milliseconds look_at_ = 0;
  Milliseconds rest_until_ = 0;
  Milliseconds sink_at_ = kNever;
  Milliseconds renew_at_ = kNever;
  Milliseconds lease_ends_at_ = kNever;
};

}  // namespace retrysafe::relay
