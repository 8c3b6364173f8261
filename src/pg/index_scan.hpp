// Reading our tables by index under a snapshot of our choice, without the planner.
#pragma once

#include "pg/server.hpp"

namespace retrysafe::pg {

// Jumpable: on an error the resource owner lets go of everything. Usage:
//   ScanKeyData key;
//   text_equals(&key, 1, name);
//   IndexScan scan = begin_scan(table, index, SnapshotSelf, &key, 1);
//   while (scan.next()) … scan.datum(column, &null) …
//   scan.end();
struct IndexScan {
  Relation table;
  Relation index;
  IndexScanDesc scan;
  TupleTableSlot *slot;

  bool next(ScanDirection direction = ForwardScanDirection) {
    return index_getnext_slot(scan, direction, slot);
  }

  Datum datum(AttrNumber column, bool *null) { return slot_getattr(slot, column, null); }

  // The transaction that wrote the current row.
  TransactionId writer() {
    bool null;
    return DatumGetTransactionId(slot_getsysattr(slot, MinTransactionIdAttributeNumber, &null));
  }

  // Whether the current row is in the snapshot of a REPEATABLE READ or SERIALIZABLE transaction, or its own.
  // Always true in READ COMMITTED, where the next statement sees everything that is committed now.
  bool transaction_can_see() {
    if (!IsolationUsesXactSnapshot()) return true;
    return TransactionIdIsCurrentTransactionId(writer()) ||
           table_tuple_satisfies_snapshot(table, slot, GetActiveSnapshot());
  }

  // Whether the (sub)transaction that inserted the current row has deleted it again. Others see such a row
  // in the index, as one that is being inserted, until the transaction ends; but it never comes back.
  bool is_taken_back() {
    const HeapTupleHeader header = ExecFetchSlotHeapTuple(slot, false, nullptr)->t_data;
    return !(header->t_infomask & (HEAP_XMAX_INVALID | HEAP_XMAX_IS_MULTI)) &&
           !HEAP_XMAX_IS_LOCKED_ONLY(header->t_infomask) &&
           HeapTupleHeaderGetRawXmax(header) == HeapTupleHeaderGetRawXmin(header);
  }

  // Locks stay until the end of the transaction, as the executor's do.
  void end() {
    index_endscan(scan);
    ExecDropSingleTupleTableSlot(slot);
    index_close(index, NoLock);
    table_close(table, NoLock);
  }
};

// `keys` count their columns within the index, not the table.
inline IndexScan begin_scan(Oid table, Oid index, Snapshot snapshot, ScanKey keys, int key_count) {
  IndexScan s;
  s.table = table_open(table, AccessShareLock);
  s.index = index_open(index, AccessShareLock);
  s.slot = table_slot_create(s.table, nullptr);
  s.scan = begin_index_scan(s.table, s.index, snapshot, key_count);
  index_rescan(s.scan, keys, key_count, nullptr, 0);
  return s;
}

// Shows what is committed now; to be unregistered. A table that is written anew (ALTER TABLE, pg_repack)
// looks empty to snapshots from before. So its lock comes first, which whoever does that holds until the end.
inline Snapshot latest_snapshot_of(Oid table) {
  LockRelationOid(table, AccessShareLock);
  return RegisterSnapshot(GetLatestSnapshot());
}

// Whether a look-up can be left out: nothing was ever put into the table since it was last emptied. Whoever
// is just inserting a row has made the table larger before.
inline bool is_untouched(Oid table) {
  Relation relation = table_open(table, AccessShareLock);
  const bool untouched = RelationGetNumberOfBlocks(relation) == 0;
  table_close(relation, NoLock);
  return untouched;
}

// Byte-wise equality with a text column of COLLATE "C".
inline void text_equals(ScanKey key, AttrNumber index_column, Datum text_value) {
  ScanKeyEntryInitialize(key, 0, index_column, BTEqualStrategyNumber, InvalidOid, C_COLLATION_OID, F_TEXTEQ,
                         text_value);
}

inline void int4_equals(ScanKey key, AttrNumber index_column, int32 number) {
  ScanKeyEntryInitialize(key, 0, index_column, BTEqualStrategyNumber, InvalidOid, InvalidOid, F_INT4EQ,
                         Int32GetDatum(number));
}

inline void int8_compares(ScanKey key, AttrNumber index_column, StrategyNumber strategy,
                          RegProcedure procedure, int64 number) {
  ScanKeyEntryInitialize(key, 0, index_column, strategy, InvalidOid, InvalidOid, procedure,
                         Int64GetDatum(number));
}

inline void xid8_compares(ScanKey key, AttrNumber index_column, StrategyNumber strategy,
                          RegProcedure procedure, uint64 txid) {
  ScanKeyEntryInitialize(key, 0, index_column, strategy, InvalidOid, InvalidOid, procedure,
                         UInt64GetDatum(txid));
}

}  // namespace retrysafe::pg
