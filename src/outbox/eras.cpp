#include "outbox/eras.hpp"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstring>

#include "outbox/emit.hpp"
#include "outbox/engine.hpp"
#include "outbox/log_identity.hpp"
#include "outbox/snapshot.hpp"
#include "pg/boundary.hpp"
#include "pg/statement.hpp"
#include "settings.hpp"

#include "pg/server.hpp"

namespace retrysafe::outbox {

namespace {

constexpr const char *kMarkFile = "retrysafe_restore_mark";
constexpr const char *kNewMarkFile = "retrysafe_restore_mark.new";

// Inherited by every process of a preloaded server.
constinit char mark[kRestoreMarkSize]{};

bool file_exists(const char *path) {
  struct stat status;
  return stat(path, &status) == 0;
}

[[noreturn]] void cannot_mark() {
  ereport(FATAL, (errcode_for_file_access(), errmsg("retrysafe: could not write file \"%s\": %m", kMarkFile),
                  errdetail("Without it a restored server would publish events a second time.")));
  pg_unreachable();
}

// A standby replays its primary and is no copy; both other files mean that this server continues from a
// backup.
bool starts_from_backup() {
  return !file_exists(STANDBY_SIGNAL_FILE) &&
         (file_exists(RECOVERY_SIGNAL_FILE) || file_exists(BACKUP_LABEL_FILE));
}

// A server that cannot keep the mark must not start: after recovery nothing else would tell.
void write_new_mark() {
  unsigned char bits[kRestoreMarkSize / 2];
  if (!pg_strong_random(bits, sizeof bits)) cannot_mark();
  constexpr char digits[] = "0123456789abcdef";
  for (size_t i = 0; i < sizeof bits; ++i) {
    mark[2 * i] = digits[bits[i] >> 4];
    mark[2 * i + 1] = digits[bits[i] & 15];
  }
  const int file = BasicOpenFile(kNewMarkFile, O_WRONLY | O_CREAT | O_TRUNC);
  if (file < 0 || write(file, mark, kRestoreMarkSize - 1) != kRestoreMarkSize - 1 || close(file) != 0)
    cannot_mark();
  durable_rename(kNewMarkFile, kMarkFile, FATAL);
}

void read_mark() {
  const int file = BasicOpenFile(kMarkFile, O_RDONLY);
  if (file < 0) return;
  const ssize_t length = read(file, mark, kRestoreMarkSize - 1);
  mark[length > 0 ? length : 0] = '\0';
  close(file);
}

bool identity_differs(const Era &era, const char **why) {
  if (era.system_identifier != GetSystemIdentifier())
    *why = "the database was restored or upgraded from another cluster";
  else if (era.database != MyDatabaseId)
    *why = "the database is a clone of another one";
  else if (era.extension != pg::extension().oid)
    *why = "a dump was restored over the database";
  else if (std::strcmp(era.restore_mark, mark) != 0)
    *why = "the server was restored from a backup";
  else if (settings::on_timeline_change == static_cast<int>(settings::OnTimelineChange::kSuspend) &&
           !RecoveryInProgress() && era.timeline != GetWALInsertionTimeLine())
    *why = "the server was promoted, and retrysafe.on_timeline_change is suspend";
  else
    return false;
  return true;
}

constinit pg::Statement lock_shards{
    "SELECT destination, shard FROM @.outbox_shards ORDER BY destination, shard FOR UPDATE", {}};

// Back-off is about the network of the original.
constinit pg::Statement end_backoff{
    "UPDATE @.outbox_shards SET lease_until = NULL, failures = 0, retry_at = NULL", {}};

struct ShardNumber {
  int32 destination, shard;
};

void begin_era_for_all_shards() {
  Era era;
  if (!current_era(&era)) elog(ERROR, "retrysafe: the new era is not there");
  const StoredSnapshot now = take_snapshot(era.era, era.first_id);
  MemoryContext memory = CurrentMemoryContext;
  uint64 count = 0;
  auto *shards = pg::spi([&] {
    count = lock_shards.run({});
    auto *list = static_cast<ShardNumber *>(MemoryContextAlloc(memory, (count + 1) * sizeof(ShardNumber)));
    for (uint64 i = 0; i < count; ++i) list[i] = {pg::Row(i).int32_at(1), pg::Row(i).int32_at(2)};
    end_backoff.run({});
    return list;
  });
  for (uint64 i = 0; i < count; ++i) begin_era_for_shard(shards[i].destination, shards[i].shard, now);
}

}  // namespace

void note_restore_at_start() {
  if (!IsUnderPostmaster && process_shared_preload_libraries_in_progress && starts_from_backup())
    write_new_mark();
  else
    read_mark();
}

const char *restore_mark() {
  return mark;
}

bool publishing_suspended(const char **why) {
  Era era;
  if (!settings::publish) {
    *why = "retrysafe.publish is off";
    return true;
  }
  return current_era(&era) && identity_differs(era, why);
}

void check_identity() {
  Era era;
  const char *why;
  if (current_era(&era) && identity_differs(era, &why))
    pg::raise_detailed(kPublishingSuspended, psprintf("Reason: %s.", why),
                       "Decide with outbox_consent whether this is the same log or a fork of it.",
                       "publishing is suspended in this database");
}

}  // namespace retrysafe::outbox

using namespace retrysafe;
using namespace retrysafe::outbox;

RETRYSAFE_SQL_FUNCTION(retrysafe_outbox_suspended_reason) {
  const char *why;
  if (!publishing_suspended(&why)) PG_RETURN_NULL();
  PG_RETURN_TEXT_P(cstring_to_text(why));
}

// No session writes events while an era begins: the locks wait for running and prepared ones, and hold off
// new ones, so that every row of the log belongs to one era by its position.
RETRYSAFE_SQL_FUNCTION(retrysafe_outbox_consent) {
  PreventCommandIfReadOnly("outbox_consent()");
  const char *log = PG_ARGISNULL(0) ? "" : text_to_cstring(PG_GETARG_TEXT_PP(0));
  const bool fork = std::strcmp(log, "fork") == 0;
  if (!fork && std::strcmp(log, "same") != 0)
    pg::raise(kInvalidParameter,
              "\"same\": this database takes over from the original, which must not publish any "
              "more. \"fork\": both live on, events get new ids here.",
              "log must be \"same\" or \"fork\"");
  pg::require_read_committed("outbox_consent()");
  const pg::Extension &e = pg::extension();
  LockRelationOid(e.outbox_log, ShareRowExclusiveLock);
  LockRelationOid(e.outbox_eras, ShareRowExclusiveLock);
  Era era;
  const char *why;
  const bool known = current_era(&era);
  if (!known || (!fork && !identity_differs(era, &why)))
    pg::raise(kConsentRefused, "The view outbox_status shows whether publishing is suspended.",
              "there is nothing to consent to");
  begin_era(era.era + 1, fork ? new_log_uuid() : era.log);
  begin_era_for_all_shards();
  announce_at_commit();
  PG_RETURN_VOID();
}
