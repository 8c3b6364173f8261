#include "core/supervisor.hpp"

#include <algorithm>

namespace retrysafe {

namespace {

Supervisor::Milliseconds doubled(Supervisor::Milliseconds first, int times, Supervisor::Milliseconds most) {
  while (times-- > 0 && first < most) first *= 2;
  return std::min(first, most);
}

}  // namespace

void Supervisor::catalog(std::span<const Row> rows) {
  std::map<Database, Entry> kept;
  for (const Row &row : rows) {
    Entry entry;
    if (const auto old = entries_.find(row.database); old != entries_.end()) entry = old->second;
    if (entry.version != row.version && entry.state == State::kAbsent) entry.state = State::kUnknown;
    entry.version = row.version;
    entry.open = row.open;
    kept.emplace(row.database, entry);
  }
  entries_ = std::move(kept);
}

void Supervisor::announced(Database database) {
  // A database that the catalog does not show yet is looked at anyway once it does.
  const auto entry = entries_.find(database);
  if (entry == entries_.end()) return;
  entry->second.announced = true;
  entry->second.failures = 0;
  entry->second.not_before = 0;
  if (entry->second.state == State::kAbsent) entry->second.state = State::kUnknown;
}

void Supervisor::everything_announced() {
  for (auto &[database, entry] : entries_) announced(database);
}

void Supervisor::found(Database database, Milliseconds now) {
  const auto found = entries_.find(database);
  if (found == entries_.end()) return;
  Entry &entry = found->second;
  entry.state = State::kPresent;
  entry.announced = false;
  entry.found_at = now;
}

void Supervisor::ended(Database database, Ending ending, Milliseconds now) {
  const auto found = entries_.find(database);
  if (found == entries_.end()) return;
  Entry &entry = found->second;
  switch (ending) {
    case Ending::kNothingToDo:
      // Announced while the worker was looking: it may have looked too early.
      entry.state = entry.announced ? State::kUnknown : State::kAbsent;
      entry.announced = false;
      entry.failures = 0;
      break;
    case Ending::kAsked:
      entry.failures = 0;
      entry.not_before = now + kRestartDelay;
      break;
    case Ending::kFailed:
      if (entry.state == State::kPresent && now - entry.found_at > kFailureDelayMax) entry.failures = 0;
      entry.not_before = now + doubled(kRestartDelay, entry.failures++, kFailureDelayMax);
      break;
  }
}

bool Supervisor::start_failed(Milliseconds now) {
  no_start_before_ = now + doubled(kNoSlotDelay, start_failures_, kNoSlotDelayMax);
  return start_failures_++ == 0;
}

bool Supervisor::start_succeeded() {
  const bool news = start_failures_ > 0;
  start_failures_ = 0;
  no_start_before_ = 0;
  return news;
}

Supervisor::Decision Supervisor::decide(Milliseconds now, std::span<const Worker> workers,
                                        std::span<const Database> held, int workers_per_database) const {
  Decision decision;
  int starting = 0;
  std::map<Database, int> present;
  for (const Worker &worker : workers) {
    if (worker.starting) ++starting;
    if (worker.stopping) {
      // Its successor waits until it is gone.
      ++present[worker.database];
      continue;
    }
    if (++present[worker.database] > workers_per_database) decision.stop.push_back(worker.slot);
  }

  const auto wake_at = [&](Milliseconds time) {
    decision.wait = decision.wait < 0 ? time - now : std::min(decision.wait, time - now);
  };
  // Databases that are known to need a worker, then those where something changed, then the rest.
  for (int pass = 0; pass < 3; ++pass) {
    for (const auto &[database, entry] : entries_) {
      const int rank = entry.state == State::kPresent ? 0 : entry.announced ? 1 : 2;
      if (rank != pass || !entry.open || entry.state == State::kAbsent) continue;
      if (std::find(held.begin(), held.end(), database) != held.end()) continue;
      // One worker looks, the others follow when there is work for them.
      const int wanted =
          entry.state == State::kPresent ? workers_per_database : std::min(workers_per_database, 1);
      for (int running = present[database]; running < wanted; ++running) {
        const Milliseconds ready = std::max(entry.not_before, no_start_before_);
        if (ready > now) {
          wake_at(ready);
          break;
        }
        if (starting >= kStartingAtOnce) break;
        ++starting;
        decision.start.push_back(database);
      }
    }
  }
  return decision;
}

}  // namespace retrysafe
