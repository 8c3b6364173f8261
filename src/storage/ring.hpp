// Rings: a table that only grows at one end and is emptied at the other, without DELETE.
//
// A ring is a fixed number of pieces, which are tables of one shape. One is active and takes the new rows; it
// is followed by the next when it is old or large enough (rotation.hpp), and the oldest is emptied by
// TRUNCATE when nothing in it is needed any more. Look-ups go through all pieces in use.
//
// Whoever inserts a row holds the ring lock while it reads which piece is active, looks for the row's key in
// the others and inserts. Rotation excludes that lock. So all rows of a piece, with their positions, are
// older than all rows of the next one, and of two transactions that insert one key the later sees what the
// earlier has inserted, or meets it in the unique index of the one active piece.
#pragma once

#include "pg/extension.hpp"
#include "pg/table_insert.hpp"

#include "pg/server.hpp"

namespace retrysafe::storage {

enum class RingName : uint8 { kRecords, kLog, kProgress };
inline constexpr int kRings = 3;
const char *name_of(RingName ring);

// The tables that turn together.
struct RingTables {
  int count;
  const Oid (*pieces[2])[pg::kRingPieces];
};
RingTables tables_of(RingName ring);

struct Ring {
  bool begun;                   // has a row in ring_pieces
  int count;                    // of pieces in use, 1 at least; retired ones are not
  int pieces[pg::kRingPieces];  // numbers from 0 on, oldest first
  int64 waiting_position;       // the oldest piece waits for all progress to pass this position; 0: none does

  int active() const { return pieces[count - 1]; }
  int newest(int i) const { return pieces[count - 1 - i]; }
};

// As it is now, but for rotations that come while it is being read; under the ring lock there are none. A
// transaction that was committed before the call has its rows in one of these pieces.
const Ring &ring(RingName name);

// The pieces together with a snapshot that sees no row outside of them. Ended by close_view.
struct RingView {
  Ring ring;
  Snapshot snapshot;
};
RingView open_view(RingName name);
void close_view(const RingView &view);

// The ring lock, shared by all who insert. Never held while waiting for another transaction.
void lock_rings();
void unlock_rings();

// The piece that a row is to be inserted into; under the ring lock.
int active_piece(RingName ring);

// Inserts into the active piece of tables `pieces`, under the ring lock, which it takes and releases. False:
// a unique index of `unique` has the key there already; without one the row is in or an error is raised.
bool insert_into_ring(RingName ring, const Oid (&pieces)[pg::kRingPieces], const pg::NewRow &row,
                      const Oid (*unique)[pg::kRingPieces] = nullptr);

}  // namespace retrysafe::storage
