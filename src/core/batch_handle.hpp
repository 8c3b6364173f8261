// The name of a fetched batch, as clients of the pull API carry it. It holds all that is needed to find the
// same events again, so any session may acknowledge: behind a transaction pooler it is often another one.
#pragma once

#include <cstdint>
#include <string_view>

#include "core/event_id.hpp"

namespace retrysafe {

// A parked event of the batch. Its turn has passed when it failed again or was given back since: then it is
// no longer the batch's to settle.
struct ParkedItem {
  std::int64_t id;
  std::uint32_t turn;  // counted from first_number of the event's id
};

struct BatchHandle {
  static constexpr int kMaxParked = 64;
  static constexpr int kMaxLength = 64 + 8 * 21 + kMaxParked * 32;

  std::int32_t destination;
  std::int32_t shard;
  std::int64_t token;  // fencing token of the lease, counted from first_token
  std::int64_t window_no;
  std::int64_t from, to;  // positions in the window
  std::uint32_t check;    // over positions and ids of the events when they were fetched
  std::int32_t parked_count;
  ParkedItem parked[kMaxParked];
  std::uint64_t transaction = 0;  // that fetched it, where rolling that back takes something back; 0: none
};

// "destination.shard.token.window.from.to.check", ":transaction" where there is one, and, after another dot,
// "id~turn" joined by "-".
// Writes at most kMaxLength bytes, closing NUL included, and returns the length.
int format_handle(const BatchHandle &handle, char *out);

// False for anything that format_handle would not have written.
bool parse_handle(std::string_view text, BatchHandle *handle);

// Tokens and turns come again: in the log of an extension that was made anew or of a fork, and after a
// failover that lost WAL. What is counted from here is not taken for that of another log or event.
std::uint32_t first_number(const Uuid &id);

// Where the tokens of a log are counted from. A server that was promoted or recovered to a point in time may
// have lost what was recorded before or after a batch was handed out, and has a timeline of its own: no batch
// of before is known there.
std::uint32_t first_token(const Uuid &log, std::uint32_t timeline);

// The sum over what tells the events of a batch, one number at a time; starts from 0.
std::uint32_t add_to_check(std::uint32_t check, std::int64_t number);

}  // namespace retrysafe
