// The loop: lanes, the watcher, signals and statistics, all in one thread.
#pragma once

#include <memory>
#include <vector>

#include "relay/configuration.hpp"
#include "relay/lane.hpp"
#include "relay/statistics.hpp"
#include "relay/watcher.hpp"

namespace retrysafe::relay {

// As the shell sees them; docs/relay.md explains them to users.
enum ExitCode {
  kExitDone = 0,
  kExitFault = 1,
  kExitConfiguration = 2,
  kExitDatabase = 3,
  kExitUndelivered = 4
};

class Relay {
 public:
  // `signals`: a descriptor that becomes readable when the relay is to stop.
  Relay(const Configuration &configuration, const Hosts &hosts, int signals);
  int run();

 private:
  void turn(Milliseconds now);
  void stop(Milliseconds now);
  bool anybody_idle() const;
  bool ended() const;
  void wait();
  void report_in_time(Milliseconds now);
  void report();
  int exit_code() const;

  const Configuration &configuration_;
  const int signals_;
  Statistics statistics_, reported_;
  std::vector<std::unique_ptr<Lane>> lanes_;
  std::unique_ptr<Watcher> watcher_;
  bool stopping_ = false;
  bool ready_ = false;
  Milliseconds reported_at_;
};

}  // namespace retrysafe::relay
