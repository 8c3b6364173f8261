// Every difference between the supported server versions (15 to 19), and no other file tests PG_VERSION_NUM
// (server.hpp excepted, for a header that moved).
#pragma once

#include "pg/server.hpp"

namespace retrysafe::pg {

// How a callback of the system caches is told which one.
#if PG_VERSION_NUM >= 190000
using SyscacheNumber = SysCacheIdentifier;
#else
using SyscacheNumber = int;
#endif

// The form of a signal handler, which wakes the process besides what `body` does.
template <void (*body)()>
#if PG_VERSION_NUM >= 190000
void signal_handler(int, const pg_signal_info *) {
#else
void signal_handler(int) {
#endif
  const int saved = errno;
  body();
  SetLatch(MyLatch);
  errno = saved;
}

inline void reserve_setting_prefix(const char *prefix) {
  MarkGUCPrefixReserved(prefix);
}

inline IndexScanDesc begin_index_scan(Relation heap, Relation index, Snapshot snapshot, int keys) {
#if PG_VERSION_NUM >= 190000
  return index_beginscan(heap, index, snapshot, nullptr, keys, 0, SO_NONE);
#elif PG_VERSION_NUM >= 180000
  return index_beginscan(heap, index, snapshot, nullptr, keys, 0);
#else
  return index_beginscan(heap, index, snapshot, keys, 0);
#endif
}

// What an index keeps from insertion to insertion, until the statement ends.
inline void end_index_insert([[maybe_unused]] Relation index, [[maybe_unused]] IndexInfo *info) {
#if PG_VERSION_NUM >= 170000
  index_insert_cleanup(index, info);
#endif
}

// Whether this transaction has locked the table in that mode.
inline bool has_locked(Oid table, LOCKMODE mode) {
  LOCKTAG tag;
  SET_LOCKTAG_RELATION(tag, MyDatabaseId, table);
#if PG_VERSION_NUM >= 170000
  return LockHeldByMe(&tag, mode, false);
#else
  return LockHeldByMe(&tag, mode);
#endif
}

inline TableScanDesc begin_table_scan(Relation table, Snapshot snapshot) {
#if PG_VERSION_NUM >= 190000
  return table_beginscan(table, snapshot, 0, nullptr, SO_NONE);
#else
  return table_beginscan(table, snapshot, 0, nullptr);
#endif
}

// Counts the transactions with an id that have ended, COMMIT PREPARED included. A plain read: an old value
// only makes a poll come one turn later.
inline uint64 transactions_completed() {
#if PG_VERSION_NUM >= 170000
  return TransamVariables->xactCompletionCount;
#else
  return ShmemVariableCache->xactCompletionCount;
#endif
}

inline bool may_execute(Oid function, Oid role) {
#if PG_VERSION_NUM >= 160000
  return object_aclcheck(ProcedureRelationId, function, role, ACL_EXECUTE) == ACLCHECK_OK;
#else
  return pg_proc_aclcheck(function, role, ACL_EXECUTE) == ACLCHECK_OK;
#endif
}

inline bool owns_database(Oid database, Oid role) {
#if PG_VERSION_NUM >= 160000
  return object_ownercheck(DatabaseRelationId, database, role);
#else
  return pg_database_ownercheck(database, role);
#endif
}

// The number of this process in the array of processes, and the latch that belongs to such a number.
inline int own_proc_number() {
#if PG_VERSION_NUM >= 170000
  return MyProcNumber;
#else
  return MyProc->pgprocno;
#endif
}

inline Latch *latch_of(int proc_number) {
  return &ProcGlobal->allProcs[proc_number].procLatch;
}

// For the life of the process.
inline WaitEventSet *create_wait_event_set(int events) {
#if PG_VERSION_NUM >= 170000
  return CreateWaitEventSet(nullptr, events);
#else
  return CreateWaitEventSet(TopMemoryContext, events);
#endif
}

// After so many milliseconds the server ends a session whose transaction is not over; 0: never.
inline int transaction_timeout() {
#if PG_VERSION_NUM >= 170000
  return TransactionTimeout;
#else
  return 0;
#endif
}

inline uint32 custom_wait_event([[maybe_unused]] const char *name) {
#if PG_VERSION_NUM >= 170000
  return WaitEventExtensionNew(name);
#else
  return PG_WAIT_EXTENSION;
#endif
}

}  // namespace retrysafe::pg
