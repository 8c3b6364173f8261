// Eras: whether this database is the one that its stored snapshots and positions were made in.
//
// A copy must not publish to the destinations of the original by itself. Restores into another cluster and
// clones by CREATE DATABASE … TEMPLATE are told by system identifier and database oid. A physical copy has
// both in common with its original; what tells it is how it was started: the postmaster looks for the files
// that start recovery from a backup, and leaves a mark in the data directory. The era holds the mark that an
// operator consented to.
#pragma once

#include "pg/server.hpp"

namespace retrysafe::outbox {

constexpr int kRestoreMarkSize = 33;  // 32 hexadecimal digits and NUL

// Called from _PG_init.
void note_restore_at_start();

// The mark of this data directory; empty when it was never restored.
const char *restore_mark();

// Raises kPublishingSuspended where positions and snapshots of this database cannot be continued without
// consent.
void check_identity();

}  // namespace retrysafe::outbox
