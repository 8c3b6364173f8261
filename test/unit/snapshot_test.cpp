#include "core/snapshot.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <deque>
#include <map>
#include <memory>
#include <random>
#include <set>
#include <vector>

namespace retrysafe {
namespace {

StoredSnapshot snapshot(std::uint64_t xmin, std::uint64_t xmax, const std::vector<std::uint64_t> &xip,
                        std::int64_t floor = 100, std::uint64_t next = 0, std::int64_t ceiling = 100) {
  return {1,         0, floor, xmin, xmax, next ? next : xmax, ceiling, static_cast<std::int32_t>(xip.size()),
          xip.data()};
}

TEST(Snapshot, TellsWhichTransactionsHadEnded) {
  const std::vector<std::uint64_t> running{12, 15};
  const StoredSnapshot s = snapshot(12, 20, running);
  EXPECT_TRUE(s.ended(11));
  EXPECT_FALSE(s.ended(12));
  EXPECT_TRUE(s.ended(14));
  EXPECT_FALSE(s.ended(15));
  EXPECT_TRUE(s.ended(19));
  EXPECT_FALSE(s.ended(20));
}

TEST(Snapshot, WorksBeyondThirtyTwoBits) {
  const std::uint64_t epoch = std::uint64_t{7} << 32;
  const std::vector<std::uint64_t> running{epoch + 3};
  const StoredSnapshot s = snapshot(epoch + 3, epoch + 9, running);
  EXPECT_TRUE(s.ended(epoch - 1));
  EXPECT_FALSE(s.ended(epoch + 3));
  EXPECT_FALSE(s.ended(epoch + (std::uint64_t{1} << 32)));
}

TEST(Snapshot, LateOnesAreTheListedAndTheRangeUpToNext) {
  const std::vector<std::uint64_t> running{12};
  const StoredSnapshot s = snapshot(12, 20, running, 100, 23);
  EXPECT_TRUE(s.may_be_late(12));
  EXPECT_FALSE(s.may_be_late(13));
  EXPECT_TRUE(s.may_be_late(20));
  EXPECT_TRUE(s.may_be_late(22));
  EXPECT_FALSE(s.may_be_late(23));
}

TEST(Snapshot, RowsFromBeforeTheEraGoByTheirPosition) {
  StoredSnapshot s = snapshot(5, 5, {}, 200, 0, 200);
  s.first_id = 150;
  EXPECT_TRUE(s.sees(149, 999999));  // a number of the old cluster that this one has not reached
  EXPECT_FALSE(s.sees(150, 999999));
  const StoredSnapshot earliest = start_at(2, 150, 1);
  EXPECT_FALSE(earliest.sees(149, 999999));
  EXPECT_FALSE(earliest.sees(1, 1));
}

TEST(Snapshot, AStartAtAPositionSkipsWhatIsBelow) {
  const StoredSnapshot start = start_at(1, 0, 10);
  const StoredSnapshot now = snapshot(50, 50, {});
  const Done done{&start, nullptr, 0};
  const Window window{&done, &now};
  EXPECT_EQ(window.scan_floor(), 9);
  EXPECT_TRUE(window.holds(10, 7));
  EXPECT_FALSE(window.is_late(7));
  EXPECT_FALSE(window.holds(9, 7));
  StoredSnapshot next_era = now;
  next_era.era = 2;
  const Window across{&done, &next_era};
  EXPECT_FALSE(across.holds(9, 7));
  EXPECT_TRUE(across.holds(10, 7));
}

// --- a model of the server and of a reader
// ----------------------------------------------------------------------------

struct Row {
  std::int64_t id;
  std::uint64_t txid;
};

struct Transaction {
  std::uint64_t txid = 0;
  std::vector<std::int64_t> ids;
};

// Transactions that take numbers, draw ids and end, one step at a time; a snapshot is four steps of its own.
class Model {
 public:
  explicit Model(unsigned seed) : random_(seed) { open_.resize(6); }

  int below(int n) { return static_cast<int>(random_() % static_cast<unsigned>(n)); }

  void step() {
    Transaction &t = open_[static_cast<std::size_t>(below(static_cast<int>(open_.size())))];
    if (t.txid == 0) {
      t.txid = next_xid_++;
      running_.insert(t.txid);
    } else if (t.ids.size() < 4 && below(3) != 0) {
      t.ids.push_back(++last_id_);
    } else if (below(4) != 0 || t.ids.size() == 4) {
      end(&t, below(5) != 0);
    }
  }

  void steps(int most) {
    for (int n = below(most + 1); n > 0; --n) step();
  }

  void end_all() {
    for (Transaction &t : open_)
      if (t.txid != 0) end(&t, true);
  }

  StoredSnapshot take(bool interrupted = true) {
    const int gap = interrupted ? 4 : 0;
    StoredSnapshot s{};
    s.era = era_;
    s.first_id = first_id_;
    s.floor = last_id_;
    steps(gap);
    s.xmax = latest_completed_ + 1;
    auto &xip = lists_.emplace_back();
    for (const std::uint64_t x : running_)
      if (x < s.xmax) xip.push_back(x);
    s.xmin = xip.empty() ? s.xmax : xip.front();
    s.xip = xip.data();
    s.xip_count = static_cast<std::int32_t>(xip.size());
    steps(gap);
    s.next = next_xid_;
    steps(gap);
    s.ceiling = last_id_;
    return s;
  }

  // The database now lives in another cluster, younger or older, and an operator consents.
  StoredSnapshot move_to_another_cluster() {
    for (Transaction &t : open_)
      if (t.txid != 0) end(&t, false);
    next_xid_ = static_cast<std::uint64_t>(3 + below(static_cast<int>(2 * next_xid_)));
    latest_completed_ = next_xid_ - 1;
    // Events may be written before the consent; the first one was not waited for.
    steps(10);
    end_all();
    ++era_;
    first_id_ = ++last_id_;
    return take(false);
  }

  const std::map<std::int64_t, std::uint64_t> &committed() const { return committed_; }
  StoredSnapshot start() const { return start_at(era_, first_id_, 1); }

 private:
  void end(Transaction *t, bool commit) {
    if (commit)
      for (const std::int64_t id : t->ids) committed_[id] = t->txid;
    running_.erase(t->txid);
    latest_completed_ = std::max(latest_completed_, t->txid);
    *t = {};
  }

  std::mt19937 random_;
  std::vector<Transaction> open_;
  std::set<std::uint64_t> running_;
  std::deque<std::vector<std::uint64_t>> lists_;
  std::map<std::int64_t, std::uint64_t> committed_;
  std::int64_t last_id_ = 0;
  std::uint64_t next_xid_ = 10;
  std::uint64_t latest_completed_ = 9;
  std::int32_t era_ = 1;
  std::int64_t first_id_ = 0;
};

class Reader {
 public:
  explicit Reader(Model *model) : model_(model) {
    windows_.push_back(std::make_unique<StoredSnapshot>(model->start()));
    done_.push_back(std::make_unique<Done>(Done{windows_.back().get(), nullptr, 0}));
  }

  void open(const StoredSnapshot &now) {
    windows_.push_back(std::make_unique<StoredSnapshot>(now));
    position_ = 0;
  }

  // A window that sees all that is there now; what the open one has left goes with it.
  void leave_for(const StoredSnapshot &now) {
    const StoredSnapshot *left = windows_.back().get();
    const bool half_read = windows_.size() > 1 && position_ < left->ceiling;
    done_.push_back(std::make_unique<Done>(Done{left, half_read ? done_.back().get() : nullptr, position_}));
    open(now);
  }

  // Reads up to `most` rows of the open window; false when it is used up.
  bool read(int most) {
    const Window window{done_.back().get(), windows_.back().get()};
    for (const Row &row : rows_of(window)) {
      if (most-- == 0) return true;
      EXPECT_TRUE(delivered_.insert(row.id).second) << "row " << row.id << " came twice";
      position_ = row.id;
    }
    position_ = window.now->ceiling;
    done_.push_back(std::make_unique<Done>(Done{windows_.back().get(), nullptr, 0}));
    return false;
  }

  const std::set<std::int64_t> &delivered() const { return delivered_; }

 private:
  // As the reader finds them: late ones by txid, then the others by id. Both ways of telling must agree.
  std::vector<Row> rows_of(const Window &window) const {
    std::vector<Row> found;
    for (const auto &[id, txid] : model_->committed()) {
      if (id <= position_ || id > window.now->ceiling) continue;
      const bool late =
          id <= window.scan_floor() && id >= window.done->snapshot->first_id && window.is_late(txid);
      const bool main = id > window.scan_floor() && window.holds(id, txid);
      EXPECT_EQ(late || main, window.holds(id, txid)) << "row " << id;
      if (late || main) found.push_back({id, txid});
    }
    return found;
  }

  Model *model_;
  std::vector<std::unique_ptr<StoredSnapshot>> windows_;
  std::vector<std::unique_ptr<Done>> done_;
  std::int64_t position_ = 0;
  std::set<std::int64_t> delivered_;
};

std::set<std::int64_t> ids_of(const std::map<std::int64_t, std::uint64_t> &rows) {
  std::set<std::int64_t> ids;
  for (const auto &[id, txid] : rows) ids.insert(id);
  return ids;
}

TEST(Windows, HoldEveryCommittedRowExactlyOnce) {
  for (unsigned seed = 0; seed < 400; ++seed) {
    Model model(seed);
    Reader reader(&model);
    for (int round = 0; round < 30; ++round) {
      model.steps(20);
      reader.open(model.take());
      while (reader.read(1 + model.below(5))) model.steps(5);
    }
    model.end_all();
    reader.open(model.take(false));
    while (reader.read(3)) {
    }
    ASSERT_EQ(reader.delivered(), ids_of(model.committed())) << "seed " << seed;
  }
}

TEST(Windows, KeepThatPromiseWhereTheyAreLeftHalfRead) {
  for (unsigned seed = 0; seed < 400; ++seed) {
    Model model(seed);
    Reader reader(&model);
    reader.open(model.take());
    for (int round = 0; round < 60; ++round) {
      const bool any_left = reader.read(1 + model.below(5));
      model.steps(10);
      if (!any_left || model.below(3) == 0) reader.leave_for(model.take());
    }
    model.end_all();
    reader.leave_for(model.take(false));
    while (reader.read(3)) {
    }
    ASSERT_EQ(reader.delivered(), ids_of(model.committed())) << "seed " << seed;
  }
}

TEST(Windows, KeepThatPromiseAcrossEras) {
  for (unsigned seed = 0; seed < 400; ++seed) {
    Model model(seed);
    Reader reader(&model);
    for (int era = 0; era < 4; ++era) {
      for (int round = model.below(6); round > 0; --round) {
        model.steps(20);
        reader.open(model.take());
        while (reader.read(1 + model.below(5))) model.steps(5);
      }
      // Leaves a window half read now and then, also the first one of an era.
      if (model.below(2) == 0) {
        reader.open(model.take());
        reader.read(model.below(4));
      }
      reader.leave_for(model.move_to_another_cluster());
      if (model.below(2) == 0)
        while (reader.read(1 + model.below(5))) model.steps(5);
    }
    while (reader.read(3)) {
    }
    model.end_all();
    reader.open(model.take(false));
    while (reader.read(3)) {
    }
    ASSERT_EQ(reader.delivered(), ids_of(model.committed())) << "seed " << seed;
  }
}

}  // namespace
}  // namespace retrysafe
