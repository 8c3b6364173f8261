#include "pg/table_insert.hpp"

#include <algorithm>

#include "pg/extension.hpp"
#include "pg/index_scan.hpp"
#include "pg/row_statements.hpp"

#include "pg/server.hpp"

namespace retrysafe::pg {

namespace {

// What an insertion has to know of an index. An index that an administrator added may be of any kind: it is
// entered as the executor would, with everything looked up each time.
struct IndexShape {
  Oid oid;
  bool plain;  // a btree over columns, of all rows or of those where a column is not null
  bool unique;
  int key_count;
  AttrNumber columns[4];
  AttrNumber not_null;  // it holds the rows where this column is not null; 0: all
};

struct TableShape {
  Oid oid;
  uint64 generation;  // of the extension, which changes with every change of the table
  int index_count;    // -1: too many, it takes a statement
  IndexShape indexes[8];
};

constexpr int kShapes = 16;  // tables that are inserted into at the same time; more only cost time
constinit TableShape shapes[kShapes]{};
constinit int next_shape = 0;

// The column of a predicate `column IS NOT NULL`; 0 when it says something else.
AttrNumber not_null_column(List *predicate) {
  if (list_length(predicate) != 1 || !IsA(linitial(predicate), NullTest)) return 0;
  const auto *test = linitial_node(NullTest, predicate);
  if (test->nulltesttype != IS_NOT_NULL || test->argisrow || !IsA(test->arg, Var)) return 0;
  const AttrNumber column = reinterpret_cast<const Var *>(test->arg)->varattno;
  return std::max<AttrNumber>(column, 0);
}

IndexShape shape_of_index(Oid oid) {
  Relation index = index_open(oid, RowExclusiveLock);
  IndexShape shape{};
  shape.oid = oid;
  const Form_pg_index form = index->rd_index;
  shape.unique = form->indisunique;
  shape.key_count = form->indnatts;
  List *predicate = RelationGetIndexPredicate(index);
  shape.not_null = not_null_column(predicate);
  shape.plain = index->rd_rel->relam == BTREE_AM_OID && form->indisready &&
                form->indnatts <= static_cast<int>(lengthof(shape.columns)) &&
                RelationGetIndexExpressions(index) == NIL && (predicate == NIL || shape.not_null > 0);
  for (int i = 0; shape.plain && i < shape.key_count; ++i) shape.columns[i] = form->indkey.values[i];
  index_close(index, NoLock);
  return shape;
}

const TableShape &shape_of(Relation table) {
  const Oid oid = RelationGetRelid(table);
  const uint64 generation = extension().generation;
  for (const TableShape &known : shapes)
    if (known.oid == oid && known.generation == generation) return known;

  TableShape shape{};
  List *indexes = RelationGetIndexList(table);
  const bool fits = list_length(indexes) <= static_cast<int>(lengthof(shape.indexes));
  if (!fits) shape.index_count = -1;
  for (; fits && shape.index_count < list_length(indexes); ++shape.index_count)
    shape.indexes[shape.index_count] = shape_of_index(list_nth_oid(indexes, shape.index_count));
  list_free(indexes);
  shape.oid = oid;
  shape.generation = generation;
  TableShape &place = shapes[next_shape];
  next_shape = (next_shape + 1) % kShapes;
  return place = shape;
}

// The lock on the table does not do for its indexes: ALTER INDEX … SET TABLESPACE takes that of the index
// alone, and an entry that is made while it copies is lost.
bool enter_plain(Relation table, const IndexShape &shape, TupleTableSlot *slot, IndexUniqueCheck check) {
  Datum keys[lengthof(shape.columns)];
  bool nulls[lengthof(shape.columns)];
  for (int i = 0; i < shape.key_count; ++i) {
    keys[i] = slot->tts_values[shape.columns[i] - 1];
    nulls[i] = slot->tts_isnull[shape.columns[i] - 1];
  }
  Relation index = index_open(shape.oid, RowExclusiveLock);
  IndexInfo unused{};  // btree does not look at it
  const bool entered = index_insert(index, keys, nulls, &slot->tts_tid, table, check, false, &unused);
  index_close(index, NoLock);
  return entered;
}

bool enter_any(Relation table, const IndexShape &shape, TupleTableSlot *slot, IndexUniqueCheck check) {
  Relation index = index_open(shape.oid, RowExclusiveLock);
  IndexInfo *info = BuildIndexInfo(index);
  EState *estate = CreateExecutorState();
  ExprContext *context = GetPerTupleExprContext(estate);
  context->ecxt_scantuple = slot;
  bool entered = true;
  if (info->ii_ReadyForInserts &&
      (info->ii_Predicate == NIL || ExecQual(ExecPrepareQual(info->ii_Predicate, estate), context))) {
    Datum keys[INDEX_MAX_KEYS];
    bool nulls[INDEX_MAX_KEYS];
    FormIndexDatum(info, slot, estate, keys, nulls);
    entered = index_insert(index, keys, nulls, &slot->tts_tid, table, check, false, info);
    end_index_insert(index, info);
  }
  FreeExecutorState(estate);
  index_close(index, NoLock);
  return entered;
}

// Whether another row has the key of this one, which is in the index. Those that were taken back do not
// count, so that nobody has to wait for the end of a transaction that only lost a race.
bool is_taken(Relation table, const IndexShape &shape, TupleTableSlot *row) {
  if (!shape.plain) return true;
  Relation index = index_open(shape.oid, RowExclusiveLock);
  ScanKeyData keys[lengthof(shape.columns)];
  const int count = IndexRelationGetNumberOfKeyAttributes(index);
  for (int i = 0; i < count; ++i) {
    const Oid type = index->rd_opcintype[i];
    const Oid equals = get_opfamily_member(index->rd_opfamily[i], type, type, BTEqualStrategyNumber);
    ScanKeyEntryInitialize(&keys[i], 0, static_cast<AttrNumber>(i + 1), BTEqualStrategyNumber, InvalidOid,
                           index->rd_indcollation[i], get_opcode(equals),
                           row->tts_values[shape.columns[i] - 1]);
  }
  index_close(index, NoLock);
  SnapshotData dirty;
  InitDirtySnapshot(dirty);
  IndexScan scan = begin_scan(RelationGetRelid(table), shape.oid, &dirty, keys, count);
  bool taken = false;
  while (!taken && scan.next())
    taken = !ItemPointerEquals(&scan.slot->tts_tid, &row->tts_tid) && !scan.is_taken_back();
  scan.end();
  return taken;
}

}  // namespace

// ON CONFLICT makes room for a row by a speculative insertion: a lock and a WAL record more for every row, so
// that those who lose a race can step back without a trace. Here the loser deletes its row again. Checking a
// unique index and entering the row is one step under the lock of the page, so of two rows with one key the
// later sees the earlier, and does so again when it looks whether that was taken back. Beside a third one
// that was, the earlier may look again as well and see the later: then both are taken back, and tried again.
bool insert_row(Oid oid, const NewRow &row, Oid unique_index) {
  Relation table = table_open(oid, RowExclusiveLock);
  const TableShape shape = shape_of(table);  // a copy: functions of an index may insert elsewhere
  if (shape.index_count < 0 || needs_insert_statement(table, row)) {
    const bool inserted = insert_by_statement(table, row, unique_index);
    table_close(table, NoLock);
    return inserted;
  }
  const int columns = RelationGetNumberOfAttributes(table);
  const int given = std::min(row.columns, columns);
  TupleTableSlot *slot = MakeSingleTupleTableSlot(RelationGetDescr(table), &TTSOpsVirtual);
  std::copy_n(row.values, given, slot->tts_values);
  std::copy_n(row.nulls, given, slot->tts_isnull);
  std::fill(slot->tts_isnull + given, slot->tts_isnull + columns, true);
  ExecStoreVirtualTuple(slot);
  table_tuple_insert(table, slot, GetCurrentCommandId(true), 0, nullptr);

  const auto enter = [&](const IndexShape &index, IndexUniqueCheck check) {
    if (index.plain && index.not_null > 0 && slot->tts_isnull[index.not_null - 1]) return true;
    return index.plain ? enter_plain(table, index, slot, check) : enter_any(table, index, slot, check);
  };
  const IndexShape *const end = shape.indexes + shape.index_count;
  const IndexShape *const unique = std::find_if(static_cast<const IndexShape *>(shape.indexes), end,
                                                [&](const IndexShape &i) { return i.oid == unique_index; });
  // It comes first: while it is being replaced (REINDEX CONCURRENTLY) there is another one that would raise.
  const bool conflict =
      unique != end && !enter(*unique, UNIQUE_CHECK_PARTIAL) && is_taken(table, *unique, slot);
  for (const IndexShape *index = shape.indexes; !conflict && index != end; ++index)
    if (index != unique) (void)enter(*index, index->unique ? UNIQUE_CHECK_YES : UNIQUE_CHECK_NO);
  if (conflict) {
    CommandCounterIncrement();  // a command does not see, and so cannot delete, what it inserted itself
    simple_table_tuple_delete(table, &slot->tts_tid, GetActiveSnapshot());
  }
  ExecDropSingleTupleTableSlot(slot);
  table_close(table, NoLock);
  return !conflict;
}

void delete_row(Relation table, ItemPointer tid) {
  if (needs_delete_statement(table))
    delete_by_statement(table, tid);
  else
    simple_table_tuple_delete(table, tid, GetActiveSnapshot());
}

}  // namespace retrysafe::pg
