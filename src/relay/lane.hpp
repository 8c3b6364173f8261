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
  void wait_for(std::vector<pollfd> *descriptors) const;
  Milliseconds wakes_at() const;

  // There may be something to send.
  void wake() { woken_ = true; }
  bool idle() const { return state_ == State::kIdle; }
  // The destination is of another version than the one that was loaded.
  void notice(const std::string &version);
  // Finishes what is in flight, until `give_up_at` at the latest, records it, and gives its shards back.
  void stop(Milliseconds give_up_at);

  End end() const { return end_; }
  bool loaded() const { return !version_.empty(); }
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
  void connection_failed(const std::string &reason);
  void load();
  void load_option_list();
  void load_options();
  void open_sink(Options options);
  void close_sink();
  void fetch();
  void fetched(Answer answer);
  void nothing_to_do();
  void send(Milliseconds now);
  void keep_lease(Milliseconds now);
  void lose_batch(const char *why);
  void record();
  void send_record();
  void recorded(const Answer &answer);
  void count_outcomes();
  void note_reachable(bool reachable, const std::string &reason);
  void release();
  void finish(End end);
  // Errors of the server.
  void refused(const char *what, const Answer &answer, State again);
  void configuration_is_wrong(const std::string &what);
  bool runs_on() const { return configuration_.mode == Mode::kService; }

  const Configuration &configuration_;
  const DestinationSection &section_;
  Statistics *statistics_;
  Session session_;
  State state_ = State::kWaiting;
  State again_ = State::kWaiting;  // after resting
  End end_ = End::kNone;

  // The destination as it was loaded.
  std::string version_, kind_, library_;
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
  bool record_under_way_ = false;
  int fetches_ = 0;  // answers to earlier ones are not for us any more

  bool woken_ = true;
  bool reload_ = false;
  bool stopping_ = false;
  bool renewing_ = false;
  bool reachable_ = true;
  Milliseconds away_logged_at_ = -60'000;
  bool connection_logged_ = false;
  int errors_ = 0;  // in a row
  std::string last_error_;
  Milliseconds give_up_at_ = kNever;
  Milliseconds look_at_ = 0;
  Milliseconds rest_until_ = 0;
  Milliseconds sink_at_ = kNever;
  Milliseconds renew_at_ = kNever;
  Milliseconds lease_ends_at_ = kNever;
};

}  // namespace retrysafe::relay
