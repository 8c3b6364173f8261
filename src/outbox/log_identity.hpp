// Which log this is. Snapshots and positions mean something in one database of one cluster only; each such
// stretch of a log's life is an era, and the log's UUID goes into every event id.
#pragma once

#include "core/event_id.hpp"
#include "outbox/eras.hpp"

#include "pg/server.hpp"

namespace retrysafe::outbox {

struct Era {
  int32 era;
  Uuid log;
  int64 first_id;  // positions from here on were drawn in this era
  uint64 system_identifier;
  Oid database;
  Oid extension;
  TimeLineID timeline;
  char restore_mark[kRestoreMarkSize];  // the restore that an operator consented to; empty: none
};

// The newest era, as committed now or made by this transaction; false before the log has its identity. Reads
// the table each time: an era changes without any sign that a cache could hold on to.
bool current_era(Era *era);

// The same; makes era 1 with a new UUID at first use. For outbox_create_destination and outbox_fetch.
Era ensure_era();

// Writes a new era of this cluster and database. All writers of the log must be locked out where it has rows.
void begin_era(int32 era, const Uuid &log);
Uuid new_log_uuid();

}  // namespace retrysafe::outbox
