#include "relay/watcher.hpp"

#include <algorithm>

#include "core/error_codes.hpp"
#include "relay/log.hpp"

namespace retrysafe::relay {

namespace {

constexpr Milliseconds kWait = 30'000;
constexpr Milliseconds kGrace = 15'000;
constexpr Milliseconds kVersionInterval = 1000;
// Without a connection to sleep on, those that are idle look by themselves.
constexpr Milliseconds kPollInterval = 1000;

std::string array_of(const std::vector<std::string> &names) {
  std::string text = "{";
  for (const std::string &name : names) {
    if (text.size() > 1) text += ',';
    text += '"';
    for (const char c : name) {
      if (c == '"' || c == '\\') text += '\\';
      text += c;
    }
    text += '"';
  }
  return text += '}';
}

}  // namespace

Watcher::Watcher(const Hosts &hosts, std::vector<std::string> destinations, std::function<void()> news,
                 std::function<void(const std::string &, const std::string &)> versions,
                 std::function<bool(const std::string &)> published)
    : names_(std::move(destinations)),
      news_(std::move(news)),
      versions_(std::move(versions)),
      published_(std::move(published)),
      session_(
          hosts,
          [this] {
            under_way_ = 0;
            ask_at_ = 0;  // no need to poll any more
          },
          [](const std::string &, bool) {}) {}

void Watcher::turn(Milliseconds now, bool anybody_idle) {
  session_.turn(now);
  if (!session_.ready()) {
    if (now >= ask_at_) {
      ask_at_ = now + kPollInterval;
      news_();
    }
    return;
  }
  if (under_way_ > 0 || now < ask_at_) return;
  if (now >= look_at_ && (look_wanted_ || !anybody_idle)) {
    look_at_ = now + kVersionInterval;
    look_wanted_ = false;
    look();
    // Workers leave shards to those only who come back to outbox_wait.
    if (!anybody_idle && session_.ready()) wait_for_news(0);
    return;
  }
  if (anybody_idle) wait_for_news(look_wanted_ ? std::max<Milliseconds>(look_at_ - now, 1) : kWait);
}

void Watcher::look() {
  for (const std::string &name : names_) {
    ++under_way_;
    session_.send("SELECT version FROM @outbox_relay_destination($1)", {name}, false, kGrace,
                  [this, name](const Answer &answer) {
                    if (answer.lost()) return;
                    --under_way_;
                    note_presence(name, answer);
                    if (answer.good()) versions_(name, answer.text(0, 0));
                  });
    if (!session_.ready()) return;
  }
}

void Watcher::note_presence(const std::string &name, const Answer &answer) {
  if (answer.sqlstate == kUnknownDestination.sqlstate) {
    if (missing_.insert(name).second)
      log(Level::kWarning, "the destination was dropped", {{"destination", name}});
  } else if (answer.good() && missing_.erase(name) > 0) {
    log(Level::kInfo, "the destination is there again", {{"destination", name}});
  }
}

// Workers leave shards to those who wait for a destination, so nobody waits here for one that cannot be
// published to now. That may be over any time, and nothing wakes for it.
void Watcher::wait_for_news(Milliseconds wait) {
  std::vector<std::string> wanted;
  for (const std::string &name : names_) {
    if (missing_.contains(name)) continue;
    if (published_(name))
      wanted.push_back(name);
    else
      wait = std::min(wait, kPollInterval);
  }
  if (wanted.empty()) {
    ask_at_ = now_ms() + kPollInterval;
    look_wanted_ = true;
    return;
  }
  ++under_way_;
  session_.send("CALL @outbox_wait($1::text[], $2::interval)",
                {array_of(wanted), std::to_string(wait) + " ms"}, false, kWait + kGrace,
                [this](const Answer &answer) {
                  if (answer.lost()) return;
                  --under_way_;
                  if (!answer.good()) ask_at_ = now_ms() + kPollInterval;
                  look_wanted_ = true;
                  news_();
                });
}

void Watcher::wait_for(std::vector<pollfd> *descriptors) const {
  if (const auto descriptor = session_.waits_for()) descriptors->push_back(*descriptor);
}

Milliseconds Watcher::wakes_at(bool anybody_idle) const {
  if (!session_.ready()) return std::min(session_.wakes_at(), std::max(ask_at_, now_ms()));
  if (under_way_ > 0) return session_.wakes_at();
  return std::max(ask_at_, anybody_idle ? 0 : look_at_);
}

}  // namespace retrysafe::relay
