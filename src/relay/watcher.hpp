// The connection on which a relay sleeps: tells when there may be something to send, and when a destination
// was altered.
#pragma once

#include <functional>
#include <set>
#include <string>
#include <vector>

#include "relay/session.hpp"

namespace retrysafe::relay {

class Watcher {
 public:
  // `news`: there may be something to send. `versions`: of a destination, as it is now. `published`: whether
  // this relay can publish to it.
  Watcher(const Hosts &hosts, std::vector<std::string> destinations, std::function<void()> news,
          std::function<void(const std::string &, const std::string &)> versions,
          std::function<bool(const std::string &)> published);

  // `anybody_idle`: somebody wants to be woken.
  void turn(Milliseconds now, bool anybody_idle);
  void wait_for(std::vector<pollfd> *descriptors) const;
  Milliseconds wakes_at(bool anybody_idle) const;

 private:
  void look();
  void wait_for_news(Milliseconds wait);
  // A destination that is not there must not keep the others from being watched.
  void note_presence(const std::string &name, const Answer &answer);

  const std::vector<std::string> names_;
  std::set<std::string> missing_;  // of those: dropped, or never made
  std::function<void()> news_;
  std::function<void(const std::string &, const std::string &)> versions_;
  std::function<bool(const std::string &)> published_;
  Session session_;
  size_t under_way_ = 0;      // statements
  bool look_wanted_ = true;   // something was committed since: versions may be others
  Milliseconds look_at_ = 0;  // for those
  Milliseconds ask_at_ = 0;   // after an error
};

}  // namespace retrysafe::relay
