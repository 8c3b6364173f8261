// Which window a shard reads now, and its rows in the order of their ids. Jumpable; needs a transaction.
#pragma once

#include "core/snapshot.hpp"
#include "outbox/cursor.hpp"
#include "outbox/engine.hpp"
#include "outbox/log_identity.hpp"
#include "pg/index_scan.hpp"
#include "storage/ring.hpp"
#include "pg/server.hpp"

namespace retrysafe::outbox {

struct OpenWindow {
  Window window;
  int64 window_no;
  bool stored;     // has its row in outbox_windows
  int64 position;  // all up to here is done

  bool is_done(int64 id, uint64 txid) const {
    return window.done->contains(id, txid) || (id <= position && window.holds(id, txid));
  }
};

// The window of a cursor: the stored one while there is something left of it, else a new one that begins now.
OpenWindow open_window(const Destination &destination, int32 shard, const Cursor &cursor, const Era &era);

// What is left of a stored window, together with all that was committed since: a new window, or the same one
// opened anew when nothing of it was recorded.
OpenWindow reopen_window(const Destination &destination, int32 shard, const Cursor &cursor,
                         const OpenWindow &open, const Era &era);

// False for a window that was to take over what another one had left, if that was read on in the meantime.
bool goes_on_from(const OpenWindow &open, const Cursor &cursor);

// A window that has its row; false when it has not.
bool load_open_window(int32 destination, int32 shard, int64 window_no, OpenWindow *open);

// A window without (more) events for the shard is not worth a row in outbox_batches: this process remembers
// that it is done, and the next open_window for the same cursor and the same event types begins behind it.
void pass_over(const Destination &destination, int32 shard, const Cursor &cursor, const OpenWindow &open);

// What was passed over and should be stored now, so that another process need not read it again, and
// retention sees that it is done. False: nothing, or not yet.
bool progress_is_due(const Destination &destination, int32 shard, const Cursor &cursor, OpenWindow *done);

// The rows of a window above a position, by id.
class WindowScan {
 public:
  enum class Step { kRow, kPause, kEnd };

  // Looks at no more than `bound` rows. `window` is at least as old as the call.
  void begin(const Window &window, int64 after, int64 up_to, int64 bound);
  // kPause: the bound is reached. The slot is good until the next call.
  Step next();
  void end();

  int64 id() const { return id_; }  // of the row, after kRow
  TupleTableSlot *slot() const { return slot_; }
  int64 position() const { return position_; }  // all of the window up to here was returned

 private:
  struct LateWriter {
    pg::IndexScan scan;
    int64 id;
  };

  void find_late_writers();
  void find_late_writers_in(int piece);
  void add_late_writer(uint64 txid);
  void add_late_writer_in(int piece, uint64 txid);
  bool next_of_main();
  bool advance(LateWriter *writer);

  Window window_;
  storage::RingView log_;
  int64 after_;
  int64 up_to_;
  int64 bound_;
  LateWriter *late_;
  int late_count_;
  int late_capacity_;
  int current_late_;
  pg::IndexScan main_;
  bool main_open_;
  int main_piece_;  // index into the ring: positions grow from piece to piece
  int64 id_;
  TupleTableSlot *slot_;
  int64 position_;
  int64 looked_at_;
};

}  // namespace retrysafe::outbox
