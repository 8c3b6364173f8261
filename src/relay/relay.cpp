#include "relay/relay.hpp"

#include <signal.h>
#include <sys/signalfd.h>
#include <unistd.h>

#include <algorithm>

#include "relay/log.hpp"
#include "relay/service_manager.hpp"

namespace retrysafe::relay {

Relay::Relay(const Configuration &configuration, const Hosts &hosts, int signals)
    : configuration_(configuration), signals_(signals), reported_at_(now_ms()) {
  std::vector<std::string> names;
  for (const DestinationSection &section : configuration.destinations) {
    names.push_back(section.name);
    const int wanted = section.connections > 0 ? section.connections : configuration.connections;
    const int count = configuration.mode == Mode::kCheck ? 1 : wanted;
    for (int i = 0; i < count; ++i)
      lanes_.push_back(std::make_unique<Lane>(configuration, section, hosts, &statistics_));
  }
  if (configuration.mode != Mode::kService) return;
  watcher_ = std::make_unique<Watcher>(
      hosts, names,
      [this] {
        for (const auto &lane : lanes_) lane->wake();
      },
      [this](const std::string &name, const std::string &version) {
        for (const auto &lane : lanes_)
          if (lane->destination() == name) lane->notice(version);
      },
      [this](const std::string &name) {
        return std::any_of(lanes_.begin(), lanes_.end(), [&](const auto &lane) {
          return lane->destination() == name && lane->publishes();
        });
      });
}

int Relay::run() {
  for (;;) {
    const Milliseconds now = now_ms();
    turn(now);
    report_in_time(now);
    if (ended()) break;
    wait();
  }
  if (configuration_.mode != Mode::kCheck) report();
  return exit_code();
}

void Relay::turn(Milliseconds now) {
  signalfd_siginfo signal;
  if (read(signals_, &signal, sizeof signal) == sizeof signal) {
    const bool reload = signal.ssi_signo == SIGHUP;
    log(Level::kInfo, reload ? "options and secrets are read again" : "stopping",
        {{"signal", std::to_string(signal.ssi_signo), true}});
    if (!reload) stop(now);
    if (reload)
      for (const auto &lane : lanes_) lane->reload();
  }
  if (watcher_ && !stopping_) watcher_->turn(now, anybody_idle());
  for (const auto &lane : lanes_) {
    lane->turn(now);
    if (lane->end() == Lane::End::kConfiguration && !stopping_) stop(now);
  }
  const bool all_opened =
      std::all_of(lanes_.begin(), lanes_.end(), [](const auto &lane) { return lane->opened(); });
  if (!ready_ && all_opened) {
    ready_ = true;
    notify_service_manager("READY=1");
    if (configuration_.mode != Mode::kCheck)
      log(Level::kInfo, "publishing", {{"connections", std::to_string(lanes_.size()), true}});
  }
}

void Relay::stop(Milliseconds now) {
  if (stopping_) return;
  stopping_ = true;
  notify_service_manager("STOPPING=1");
  for (const auto &lane : lanes_) lane->stop(now + configuration_.stop_timeout_ms);
}

// Whoever loads its destination may publish to it in a moment, or may not: until then there is no telling
// what to wait for.
bool Relay::anybody_idle() const {
  if (std::any_of(lanes_.begin(), lanes_.end(), [](const auto &lane) { return lane->loading(); }))
    return false;
  return std::any_of(lanes_.begin(), lanes_.end(), [](const auto &lane) { return lane->idle(); });
}

bool Relay::ended() const {
  return std::all_of(lanes_.begin(), lanes_.end(),
                     [](const auto &lane) { return lane->end() != Lane::End::kNone; });
}

void Relay::wait() {
  std::vector<pollfd> descriptors{{signals_, POLLIN, 0}};
  Milliseconds at = configuration_.statistics_interval_ms > 0
                        ? reported_at_ + configuration_.statistics_interval_ms
                        : kNever;
  for (const auto &lane : lanes_) {
    lane->wait_for(&descriptors);
    at = std::min(at, lane->wakes_at());
  }
  if (watcher_ && !stopping_) {
    watcher_->wait_for(&descriptors);
    at = std::min(at, watcher_->wakes_at(anybody_idle()));
  }
  const auto timeout = static_cast<int>(std::clamp<Milliseconds>(at - now_ms(), 0, 60'000));
  (void)poll(descriptors.data(), descriptors.size(), timeout);
  for (const auto &lane : lanes_) lane->heard(descriptors);
}

void Relay::report_in_time(Milliseconds now) {
  if (configuration_.statistics_interval_ms == 0 ||
      now < reported_at_ + configuration_.statistics_interval_ms)
    return;
  reported_at_ = now;
  report();
}

void Relay::report() {
  const auto since = [&](std::int64_t Statistics::*count) {
    return std::to_string(statistics_.*count - reported_.*count);
  };
  log(Level::kInfo, "statistics",
      {{"delivered", since(&Statistics::delivered), true},
       {"failed", since(&Statistics::failed), true},
       {"dead", since(&Statistics::dead), true},
       {"unreachable", since(&Statistics::unreachable), true},
       {"batches", since(&Statistics::batches), true},
       {"lost_batches", since(&Statistics::lost), true},
       {"broken_connections", since(&Statistics::connections), true},
       {"delivered_in_all", std::to_string(statistics_.delivered), true}});
  reported_ = statistics_;
}

int Relay::exit_code() const {
  const auto any = [&](Lane::End end) {
    return std::any_of(lanes_.begin(), lanes_.end(), [&](const auto &lane) { return lane->end() == end; });
  };
  if (any(Lane::End::kConfiguration)) return kExitConfiguration;
  if (any(Lane::End::kDatabase)) return kExitDatabase;
  const bool undelivered =
      statistics_.failed + statistics_.dead + statistics_.unreachable + statistics_.lost > 0;
  return configuration_.mode != Mode::kService && undelivered ? kExitUndelivered : kExitDone;
}

}  // namespace retrysafe::relay
