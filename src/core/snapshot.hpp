// The arithmetic of stored snapshots: what a snapshot sees, what a window holds, and where the late rows are.
//
// A *window* is everything that one snapshot sees and that was not done before. Rows of the log get their id
// before they commit, so a small id can appear after a larger one; two snapshots tell apart what "id > last"
// cannot. src/outbox/README.md explains the reader; this file holds what can be reasoned about without a
// server.
#pragma once

#include <cstdint>

namespace retrysafe {

// A snapshot of the server and three numbers read around it, in the order floor, snapshot, next, ceiling.
// Trivial: it lies in memory of the server, and so does its list.
struct StoredSnapshot {
  std::int32_t era;
  std::int64_t first_id;     // of the era: the txid of a row with a smaller id belongs to another cluster
  std::int64_t floor;        // last id drawn before the snapshot
  std::uint64_t xmin, xmax;  // below xmin all have ended; none from xmax on has
  std::uint64_t next;        // the next transaction id, read after the snapshot
  std::int64_t ceiling;      // last id drawn after the snapshot
  std::int32_t xip_count;
  const std::uint64_t *xip;  // running ones in [xmin, xmax), ascending; the taker's own is among them

  // Had this transaction ended when the snapshot was taken?
  bool ended(std::uint64_t txid) const;

  // Is a committed row in it? Whatever it sees was drawn before it, so the ceiling excludes nothing of its
  // own era; rows from before the era (all of them committed then) are told apart by their id alone.
  bool sees(std::int64_t id, std::uint64_t txid) const {
    return id <= ceiling && (id < first_id || ended(txid));
  }

  // Could this transaction have drawn an id at or below the floor without having ended? A transaction gets
  // its number before it draws an id, so one numbered `next` or above has only ids above the floor. The range
  // [xmax, next) matters: transactions in it may well be running, and xip does not list them.
  bool may_be_late(std::uint64_t txid) const { return txid < next && !ended(txid); }
};

// What was done before a window was opened: all that `snapshot` sees. Or the window of `snapshot` was left
// half read, because the era changed or because its rest could not be sent alone: then only what it holds up
// to `position`, and what was done before it.
struct Done {
  const StoredSnapshot *snapshot;
  const Done *before;  // null: everything the snapshot sees
  std::int64_t position;

  // As the window that comes after it is stored; -1: nothing was left.
  std::int64_t resumed_at() const { return before ? position : -1; }

  bool contains(std::int64_t id, std::uint64_t txid) const {
    return snapshot->sees(id, txid) && (!before || id <= position || before->contains(id, txid));
  }
};

struct Window {
  const Done *done;
  const StoredSnapshot *now;

  bool holds(std::int64_t id, std::uint64_t txid) const {
    return now->sees(id, txid) && !done->contains(id, txid);
  }

  // Within an era the rows fall into two parts: late ones, at or below the floor, which are found by txid,
  // and the rest, which is read by id. Across eras transaction ids do not compare, and everything is read by
  // id.
  bool crosses_eras() const { return done->snapshot->era != now->era; }

  // Reading by id starts above this. What a window left is above the position that it was left at.
  std::int64_t scan_floor() const {
    if (crosses_eras()) return 0;
    return done->before && done->position < done->snapshot->floor ? done->position : done->snapshot->floor;
  }

  // Is this transaction's part at or below the floor due in this window?
  bool is_late(std::uint64_t txid) const {
    return !crosses_eras() && done->snapshot->may_be_late(txid) && now->ended(txid);
  }
};

// The start of a destination that wants the log from `first` on: what is before it is done, whoever wrote it,
// and nothing from there on.
constexpr StoredSnapshot start_at(std::int32_t era, std::int64_t first_id, std::int64_t first) {
  // No transaction gets there. Of an epoch of its own it is the first number that is valid.
  constexpr std::uint64_t kBehindAll = (std::uint64_t{1} << 61) + 3;
  return {era, first_id, first - 1, kBehindAll, kBehindAll, kBehindAll, first - 1, 0, nullptr};
}

}  // namespace retrysafe
