#include "pg/table_insert.hpp"

#include <algorithm>

namespace retrysafe::pg {

namespace {

// Indexes that an administrator added may have a predicate or expressions.
bool is_in_index(IndexInfo *info, TupleTableSlot *slot, EState **estate) {
  if (info->ii_Predicate == NIL && info->ii_Expressions == NIL) return true;
  if (!*estate) *estate = CreateExecutorState();
  GetPerTupleExprContext(*estate)->ecxt_scantuple = slot;
  if (info->ii_Predicate == NIL) return true;
  return ExecQual(ExecPrepareQual(info->ii_Predicate, *estate), GetPerTupleExprContext(*estate));
}

}  // namespace

// ON CONFLICT makes room for a row by a speculative insertion: a lock and a WAL record more for every row, so
// that those who lose a race can step back without a trace. Here the loser deletes its row again. Checking a
// unique index and entering the row is one step under the lock of the page, so of two rows with one key
// exactly one sees the other.
bool insert_row(Oid oid, const Datum *values, const bool *nulls, Oid unique_index) {
  Relation table = table_open(oid, RowExclusiveLock);
  const int columns = RelationGetNumberOfAttributes(table);
  TupleTableSlot *slot = MakeSingleTupleTableSlot(RelationGetDescr(table), &TTSOpsVirtual);
  std::copy_n(values, columns, slot->tts_values);
  std::copy_n(nulls, columns, slot->tts_isnull);
  ExecStoreVirtualTuple(slot);
  table_tuple_insert(table, slot, GetCurrentCommandId(true), 0, nullptr);

  bool conflict = false;
  EState *estate = nullptr;
  List *indexes = RelationGetIndexList(table);
  ListCell *cell;
  foreach (cell, indexes) {
    Relation index = index_open(lfirst_oid(cell), RowExclusiveLock);
    IndexInfo *info = BuildIndexInfo(index);
    if (info->ii_ReadyForInserts && is_in_index(info, slot, &estate)) {
      Datum keys[INDEX_MAX_KEYS];
      bool null_keys[INDEX_MAX_KEYS];
      FormIndexDatum(info, slot, estate, keys, null_keys);
      const IndexUniqueCheck check = !info->ii_Unique                          ? UNIQUE_CHECK_NO
                                     : RelationGetRelid(index) == unique_index ? UNIQUE_CHECK_PARTIAL
                                                                               : UNIQUE_CHECK_YES;
      const bool entered = index_insert(index, keys, null_keys, &slot->tts_tid, table, check, false, info);
      if (check == UNIQUE_CHECK_PARTIAL && !entered) conflict = true;
    }
    index_close(index, NoLock);
  }
  list_free(indexes);
  if (estate) FreeExecutorState(estate);
  if (conflict) {
    CommandCounterIncrement();  // a command does not see, and so cannot delete, what it inserted itself
    simple_table_tuple_delete(table, &slot->tts_tid, GetActiveSnapshot());
  }
  ExecDropSingleTupleTableSlot(slot);
  table_close(table, NoLock);
  return !conflict;
}

}  // namespace retrysafe::pg
