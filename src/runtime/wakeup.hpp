// Telling the workers of this database, and the sessions that wait in outbox_wait, that something was
// committed for them; and whether there are workers.
#pragma once

namespace retrysafe::runtime {

// Events concern workers that hold a shard; anything else (a destination was made, say) concerns all.
enum class News { kEvents, kAnything };

// Called by an emitting backend after its commit record is written: must not raise, allocate or throw. A hint
// only: workers find everything by polling as well.
void announce_commit(News news) noexcept;

// Whether a worker has shards here: it stays, and does by itself what comes due.
bool has_worker() noexcept;

}  // namespace retrysafe::runtime
