// How a ring turns: a new piece becomes active, and the oldest is emptied when nothing in it is needed any
// more.
//
// One step at a time, each in a transaction of its own that is committed soon:
//   active ── rotate ──> filled ── seal ──> sealed ── retire ──> retired ── empty ──> free
//
// rotate  The next piece takes the new rows from now on. Not before that piece is free: until then the active
//         one grows on.
// seal    The last transaction that wrote to it has ended, prepared ones included: the ring lock kept it from
//         being chosen since it was filled, and a lock on its tables that conflicts with a writer's could be
//         had.
// retire  Nothing in it is needed any more, and nobody looks into it from now on. There is no way back: a
//         piece retired too early hides a record that is alive, and its work is done twice.
// empty   TRUNCATE. A dump that has not come to the table yet finds it empty then, whatever its snapshot is.
//
// No step waits for a lock that others could queue behind.
#pragma once

#include "storage/ring.hpp"

#include "pg/server.hpp"

namespace retrysafe::storage {

enum class Turn {
  kNothing,  // is due
  kDone,     // a step; there may be another one
  kBlocked,  // a step is due, but somebody uses what it needs
};

struct SealedPiece {
  int piece;
  TimestampTz sealed_at;     // its last writer was gone by then
  int64 sealed_position;     // a snapshot of the log whose floor is not below was taken after that
  TimestampTz needed_until;  // as the keeper said when it was sealed
};

// What rotation has to know of a ring.
struct RingKeeper {
  RingName ring;
  int64 max_age_us;
  int64 max_bytes;
  // Snapshots do not see TRUNCATE as of their time. True: a piece is emptied when all see that it is retired.
  bool old_snapshots_need_it;
  // Infinity in the past: nothing is known that would keep it.
  TimestampTz (*needed_until)(int piece);
  // kDone: the piece can be retired. May copy what is still needed into the active piece. If the piece
  // is not retired then, it is asked again.
  Turn (*release)(const SealedPiece &piece);
};

// Takes the next step that is due; none (kBlocked) in a transaction that has written to the ring. READ
// COMMITTED only, in a transaction that is committed soon: those who insert wait for that.
Turn turn(const RingKeeper &keeper);

// Whether the transaction ends with this call of an SQL function. Warns where it does not.
bool may_turn_in(FunctionCallInfo fcinfo);

// The last position that was drawn before any row was written that is still in the log ring, emptied pieces
// excepted.
int64 position_before_log();

// Size on disk of the pieces in use, with their indexes.
int64 bytes_in_use(RingName ring);

}  // namespace retrysafe::storage
