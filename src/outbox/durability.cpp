#include "outbox/durability.hpp"

#include "core/wal_position.hpp"
#include "outbox/snapshot.hpp"
#include "pg/boundary.hpp"
#include "pg/fault_point.hpp"
#include "pg/latch.hpp"
#include "settings.hpp"

#include "pg/server.hpp"

namespace retrysafe::outbox {

namespace {

struct KeptWindow {
  ShardKey key;
  uint64 generation;  // of the extension
  int64 window_no;
  StoredSnapshot *window;
  StoredSnapshot *done;  // that it comes after; null: the window has its row
  XLogRecPtr awaited;    // that the standbys have to have; invalid since they had it
  bool published;        // somebody was let publish from it
};

HTAB *kept_windows() {
  static constinit HTAB *table = nullptr;
  if (!table) {
    HASHCTL control{};
    control.keysize = sizeof(ShardKey);
    control.entrysize = sizeof(KeptWindow);
    control.hcxt = TopMemoryContext;
    table =
        hash_create("retrysafe windows and standbys", 16, &control, HASH_ELEM | HASH_BLOBS | HASH_CONTEXT);
  }
  return table;
}

KeptWindow *find(const ShardKey &key) {
  auto *kept = static_cast<KeptWindow *>(hash_search(kept_windows(), &key, HASH_FIND, nullptr));
  return kept && kept->window ? kept : nullptr;
}

bool is_wanted() {
  return settings::publish_after == static_cast<int>(settings::PublishAfter::kSynchronousStandby);
}

bool is_of(const KeptWindow &kept, const OpenWindow &open) {
  return kept.generation == pg::extension().generation && kept.window_no == open.window_no &&
         same_snapshot(*kept.window, *open.window.now);
}

// Whether reopen_window would make this window of `open`.
bool comes_from(const KeptWindow &kept, const OpenWindow &open) {
  if (!kept.done || kept.generation != pg::extension().generation) return false;
  return (kept.window_no == open.window_no + 1 && same_snapshot(*kept.done, *open.window.now)) ||
         (kept.window_no == open.window_no && same_snapshot(*kept.done, *open.window.done->snapshot));
}

bool has_arrived(KeptWindow *kept) {
  if (kept->awaited != InvalidXLogRecPtr && standbys_have(kept->awaited)) kept->awaited = InvalidXLogRecPtr;
  return kept->awaited == InvalidXLogRecPtr;
}

KeptWindow *keep(const ShardKey &key, const OpenWindow &open) {
  StoredSnapshot *window = copy_snapshot(*open.window.now, TopMemoryContext);
  StoredSnapshot *done = open.stored ? nullptr : copy_snapshot(*open.window.done->snapshot, TopMemoryContext);
  const uint64 generation = pg::extension().generation;  // may raise, and must not from here on
  bool found;
  auto *kept = static_cast<KeptWindow *>(hash_search(kept_windows(), &key, HASH_ENTER, &found));
  if (found && kept->window) pfree(kept->window);
  if (found && kept->done) pfree(kept->done);
  kept->generation = generation;
  kept->window_no = open.window_no;
  kept->window = window;
  kept->done = done;
  kept->published = false;
  kept->awaited = PG_UINT64_MAX;
  kept->awaited = flush_wal();
  return kept;
}

}  // namespace

XLogRecPtr flush_wal() {
  const WalLayout layout{XLOG_BLCKSZ, static_cast<uint64>(wal_segment_size), SizeOfXLogShortPHD,
                         SizeOfXLogLongPHD};
  const XLogRecPtr end = end_of_wal(GetXLogInsertRecPtr(), layout);
  XLogFlush(end);
  return end;
}

const StoredSnapshot *window_kept_back(const ShardKey &key, int64 window_no, const StoredSnapshot &done) {
  const KeptWindow *kept = find(key);
  const bool good = kept && kept->done && !kept->published &&
                    kept->generation == pg::extension().generation && kept->window_no == window_no &&
                    same_snapshot(*kept->done, done);
  return good ? kept->window : nullptr;
}

bool is_kept_for_standby(const ShardKey &key, const OpenWindow &open) {
  KeptWindow *kept = find(key);
  if (!kept) return false;
  if (is_wanted() && is_of(*kept, open)) return !has_arrived(kept);
  if (is_wanted() && comes_from(*kept, open)) return false;  // it is asked about when it is read
  kept->awaited = InvalidXLogRecPtr;  // it was about another window, or was not wanted any more
  return false;
}

bool may_publish(const ShardKey &key, const OpenWindow &open) {
  if (!is_wanted() || RETRYSAFE_FAULT("reader.ahead_of_standby")) return true;
  KeptWindow *kept = find(key);
  if (!kept || !is_of(*kept, open)) kept = keep(key, open);
  kept->published = has_arrived(kept);
  return kept->published;
}

bool is_kept_for_standby(const Claim &claim) {
  const KeptWindow *kept = find({claim.destination, claim.shard});
  return kept && kept->awaited != InvalidXLogRecPtr;
}

bool standbys_caught_up(const Claim &claim) {
  KeptWindow *kept = find({claim.destination, claim.shard});
  return !kept || !is_wanted() || has_arrived(kept);
}

bool let_standby_catch_up(int32 destination, long timeout_ms) {
  const TimestampTz until = GetCurrentTimestamp() + timeout_ms * 1000;
  for (;;) {
    bool any = false;
    bool arrived = false;
    HASH_SEQ_STATUS all;
    hash_seq_init(&all, kept_windows());
    while (auto *kept = static_cast<KeptWindow *>(hash_seq_search(&all))) {
      if (destination != 0 && kept->key.destination != destination) continue;
      if (!kept->window || kept->awaited == InvalidXLogRecPtr) continue;
      any = true;
      arrived = has_arrived(kept) || arrived;
    }
    if (arrived) return true;
    if (!any || GetCurrentTimestamp() >= until) return false;
    pg::pause(1, pg::Wait::kStandby);
  }
}

XLogRecPtr position_to_catch_up() {
  if (!is_wanted() || RecoveryInProgress()) return InvalidXLogRecPtr;
  const XLogRecPtr end = GetFlushRecPtr(nullptr);
  return standbys_have(end) ? InvalidXLogRecPtr : end;
}

// As the server tells it to commits that wait: where none are named, none are waited for.
bool standbys_have(XLogRecPtr position) {
  const bool named = SyncRepStandbyNames && SyncRepStandbyNames[0] != '\0';
  if (max_wal_senders == 0 || !named) return true;
  LWLockAcquire(SyncRepLock, LW_SHARED);
  const XLogRecPtr confirmed = WalSndCtl->lsn[SYNC_REP_WAIT_FLUSH];
  LWLockRelease(SyncRepLock);
  return position <= confirmed;
}

}  // namespace retrysafe::outbox

using namespace retrysafe;
using namespace retrysafe::outbox;

RETRYSAFE_SQL_FUNCTION(retrysafe_outbox_awaits_standby) {
  PG_RETURN_BOOL(position_to_catch_up() != InvalidXLogRecPtr);
}
