#include "core/routing.hpp"

namespace retrysafe {

namespace {

// The finalizer of MurmurHash3: every bit of the input reaches every bit of the output.
std::uint64_t mix(std::uint64_t h) {
  h ^= h >> 33;
  h *= 0xff51afd7ed558ccdULL;
  h ^= h >> 33;
  h *= 0xc4ceb9fe1a85ec53ULL;
  h ^= h >> 33;
  return h;
}

}  // namespace

bool type_matches(std::string_view pattern, std::string_view type) {
  if (pattern.empty() || pattern.back() != '*') return pattern == type;
  pattern.remove_suffix(1);
  return type.substr(0, pattern.size()) == pattern;
}

std::uint32_t shard_of(std::string_view ordering_key, std::uint32_t shards) {
  std::uint64_t h = 0xcbf29ce484222325ULL;  // FNV-1a
  for (const char c : ordering_key) h = (h ^ static_cast<unsigned char>(c)) * 0x100000001b3ULL;
  return static_cast<std::uint32_t>(mix(h) % shards);
}

std::uint32_t shard_of(std::int64_t id, std::uint32_t shards) {
  return static_cast<std::uint32_t>(mix(static_cast<std::uint64_t>(id)) % shards);
}

}  // namespace retrysafe
