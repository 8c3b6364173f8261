// A batch as outbox_fetch hands it out, as sinks get it: bit for bit what a worker of the server would send.
#pragma once

#include <deque>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "core/dispatcher.hpp"
#include "core/event_id.hpp"
#include "core/event_time.hpp"
#include "relay/session.hpp"

namespace retrysafe::relay {

// The columns to select, in this order, in binary form.
inline constexpr const char *kEventColumns =
    "batch, event_id, attempt, event_type, event_key, scope, ordering_key, payload, headers, created_at";
inline constexpr int kEventColumnCount = 10;

class EventBatch {
 public:
  // Keeps the rows: events view them.
  EventBatch(Result rows, std::string_view database);

  std::span<Dispatcher::Item> items() { return items_; }
  // The name of the batch for the other functions.
  const std::string &handle() const { return handle_; }
  std::string_view event_id(size_t i) const { return view(written_[i].id); }
  int shard() const { return shard_; }

 private:
  struct Written {
    UuidText id;
    char time[kEventTimeSize];
  };

  Result rows_;
  std::string handle_;
  int shard_ = 0;
  std::vector<Written> written_;
  std::vector<retrysafe_pair> headers_;
  std::deque<std::string> texts_;  // sources, and headers that were escaped
  std::vector<Dispatcher::Item> items_;
};

// What a sink gives as a reason, as the database can store it: on one line, and where its encoding is not
// UTF-8, in ASCII.
std::string storable(std::string_view reason, bool utf8);

// What outbox_record is told of the events that were not delivered, each id named once. Empty: all were.
std::string outcomes_json(const EventBatch &batch, std::span<const Dispatcher::Outcome> outcomes, bool utf8);

}  // namespace retrysafe::relay
