// Parked events: those that failed at a destination, and those that wait behind them for the sake of order.
//
// Within an ordering key the order is that of the positions. Of the events of a key that wait (state retry or
// blocked), only the first is `retry` and has a time; the others are `blocked`. Where a destination blocks on
// exhausted events, a `dead` event holds back all later ones of its key. Events without an ordering key are
// independent of each other. Everything changes under the lock of the shard row only.
#pragma once

#include "outbox/engine.hpp"
#include "outbox/log_identity.hpp"
#include "outbox/window.hpp"
#include "pg/server.hpp"

namespace retrysafe::outbox {

// --- reading: by index, under a snapshot of now ------------------------------------------------------------

// Parked events that may be sent now: each due head of a key and those behind it, in order, up to one that
// has failed and waits for its own time; at most `most`, and no more than `bytes` of payloads and headers
// unless it is one event. Of a key only those that the shard, which stands at `open`, has got past: before
// others the log may still have events of the key. Returns how many.
int32 read_due_parked(const Destination &destination, int32 shard, const OpenWindow &open, const Uuid &log,
                      int32 most, int64 bytes, Event *events);

// One that waits, by its position; false when it does not, or does not exist.
bool read_waiting(int32 destination, int32 shard, const Uuid &log, int64 id, Event *event);

// Whether any event of the shard holds back others. Spares the look-ups per key.
bool any_key_is_held(const Destination &destination, int32 shard);

// Whether an earlier event of the key holds this one back.
bool is_held(const Destination &destination, int32 shard, const char *ordering_key, int64 id);

// Which of these events of the log are parked, whatever became of them: a flag for each. Returns how many.
// The events are ascending. Costs one look-up where none is, as is usual, however many events were parked
// before.
int32 find_parked(int32 destination, int32 shard, const Event *events, int32 count, bool *parked);

// When the next one of the shard comes due; infinity when none waits.
TimestampTz next_parked_due(int32 destination, int32 shard);

// --- writing: inside pg::spi, under the lock of the shard row ----------------------------------------------

struct FailedAttempt {
  bool final;     // no later attempt can succeed
  int64 wait_us;  // until the next attempt
  const char *reason;
};

// The destination's back-off for an event that has failed once more.
int64 backoff_of(const Destination &destination, const Event &event);

// Both return whether the event holds back later ones of its key: it waits for its next attempt, or is dead
// where that blocks. The first is for an event of the log, the second for a parked one.
bool park_failed(const Destination &destination, int32 shard, const Event &event,
                 const FailedAttempt &attempt);
bool fail_again(const Destination &destination, int32 shard, const Event &event,
                const FailedAttempt &attempt);

// An event of the log waits behind an earlier one of its key.
void park_blocked(int32 destination, int32 shard, const Event &event);

// An event of the log that was not tried, in front of others that were: it is due at once.
void park_untried(int32 destination, int32 shard, const Event &event);

// A parked event that was handed out is given back untried, behind an earlier one of its key.
void give_back(int32 destination, int32 shard, int64 id);

void settle_delivered(int32 destination, int32 shard, int64 id);

// Restores the rule of the first paragraph after anything of the key changed: its first waiting event becomes
// due, unless something holds it back. Nothing to do without a key.
void restore_head(const Destination &destination, int32 shard, const char *ordering_key);

// The same for all keys with a dead event, after it was changed whether those hold back others. Under the
// locks of all shard rows.
void restore_heads_behind_dead(const Destination &destination);

}  // namespace retrysafe::outbox
