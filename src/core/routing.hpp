// Which events a destination wants, and which of its shards an event belongs to.
#pragma once

#include <cstdint>
#include <string_view>

namespace retrysafe {

// A pattern is an event type, or a prefix of event types followed by `*`.
bool type_matches(std::string_view pattern, std::string_view type);

// Events of one ordering key belong to one shard. The hash is our own, since a shard's progress outlives the
// machine: a dump may be restored where the server's hash functions give other values.
std::uint32_t shard_of(std::string_view ordering_key, std::uint32_t shards);
std::uint32_t shard_of(std::int64_t id, std::uint32_t shards);

}  // namespace retrysafe
