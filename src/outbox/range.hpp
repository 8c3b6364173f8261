// The events of a stretch of a window that are for one shard of a destination.
#pragma once

#include "outbox/engine.hpp"
#include "outbox/log_identity.hpp"
#include "outbox/window.hpp"
#include "pg/server.hpp"

namespace retrysafe::outbox {

struct Limits {
  int32 events;
  int64 bytes;     // of payloads and headers
  int64 rows;      // to look at
  bool bodies;     // read payloads and headers too
  int32 at_least;  // so many events are taken whatever their size
};

struct Range {
  int32 count;
  Event *events;  // without those that are parked already
  int32 parked_count;
  Event *parked;   // those, by position
  uint32 check;    // over all of them, see core/batch_handle.hpp
  int64 to;        // everything up to here was looked at
  bool exhausted;  // so was all of the window (up to `up_to`)
};

Range read_range(const Destination &destination, int32 shard, const OpenWindow &open, int64 up_to,
                 const Uuid &log, const Limits &limits);

}  // namespace retrysafe::outbox
