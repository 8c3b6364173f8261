#include "pg/row_statements.hpp"

#include <algorithm>

#include "core/error_codes.hpp"
#include "pg/error.hpp"
#include "pg/statement.hpp"

#include "pg/server.hpp"

namespace retrysafe::pg {

namespace {

const char *quoted_name(Relation table) {
  return quote_qualified_identifier(get_namespace_name(RelationGetNamespace(table)),
                                    RelationGetRelationName(table));
}

// ON CONFLICT names the index by what it is.
const char *conflict_target(Relation table, Oid index_oid) {
  Relation index = index_open(index_oid, AccessShareLock);
  const char *target = psprintf("(%s)", pg_get_indexdef_columns(index_oid, false));
  if (List *predicate = RelationGetIndexPredicate(index))
    target = psprintf(
        "%s WHERE %s", target,
        deparse_expression(reinterpret_cast<Node *>(make_ands_explicit(predicate)),
                           deparse_context_for(RelationGetRelationName(table), RelationGetRelid(table)),
                           false, false));
  index_close(index, NoLock);
  return target;
}

struct Arguments {
  int count;
  Oid *types;
  Datum *values;
  const char *nulls;  // null: none is
};

// No plan is kept: it is rarely needed, and then for a while.
uint64 execute(Relation table, const char *sql, const Arguments &arguments, int expected) {
  return spi([&] {
    const int result = SPI_execute_with_args(sql, arguments.count, arguments.types, arguments.values,
                                             arguments.nulls, false, 0);
    if (result != expected)
      raise(kRowRefused, kRowRefusedHint, "table \"%s\" does not take the statement: %s",
            RelationGetRelationName(table), SPI_result_code_string(result));
    return SPI_processed;
  });
}

}  // namespace

bool needs_insert_statement(Relation table, const NewRow &row) {
  const TriggerDesc *t = table->trigdesc;
  if (t && (t->trig_insert_before_row || t->trig_insert_after_row || t->trig_insert_before_statement ||
            t->trig_insert_after_statement))
    return true;
  for (int i = row.columns; i < RelationGetNumberOfAttributes(table); ++i) {
    const Form_pg_attribute column = TupleDescAttr(RelationGetDescr(table), i);
    if (!column->attisdropped && (column->atthasdef || column->attnotnull)) return true;
  }
  return false;
}

bool needs_delete_statement(Relation table) {
  const TriggerDesc *t = table->trigdesc;
  return t && (t->trig_delete_before_row || t->trig_delete_after_row || t->trig_delete_before_statement ||
               t->trig_delete_after_statement);
}

bool insert_by_statement(Relation table, const NewRow &row, Oid unique_index) {
  const int given = std::min<int>(row.columns, RelationGetNumberOfAttributes(table));
  auto *types = static_cast<Oid *>(palloc(sizeof(Oid) * given));
  auto *values = static_cast<Datum *>(palloc(sizeof(Datum) * given));
  auto *nulls = static_cast<char *>(palloc(given));
  int count = 0;
  StringInfoData columns, numbers;
  initStringInfo(&columns);
  initStringInfo(&numbers);
  for (int i = 0; i < given; ++i) {
    const Form_pg_attribute column = TupleDescAttr(RelationGetDescr(table), i);
    if (column->attisdropped || column->attgenerated != '\0') continue;
    types[count] = column->atttypid;
    values[count] = row.values[i];
    nulls[count++] = row.nulls[i] ? 'n' : ' ';
    const char *separator = count == 1 ? "" : ", ";
    appendStringInfo(&columns, "%s%s", separator, quote_identifier(NameStr(column->attname)));
    appendStringInfo(&numbers, "%s$%d", separator, count);
  }
  const char *sql =
      psprintf("INSERT INTO %s (%s) VALUES (%s)", quoted_name(table), columns.data, numbers.data);
  if (OidIsValid(unique_index))
    sql = psprintf("%s ON CONFLICT %s DO NOTHING", sql, conflict_target(table, unique_index));
  const bool inserted = execute(table, sql, {count, types, values, nulls}, SPI_OK_INSERT) == 1;
  if (!inserted && !OidIsValid(unique_index))
    raise(kRowRefused, kRowRefusedHint, "table \"%s\" does not take a row", RelationGetRelationName(table));
  return inserted;
}

void delete_by_statement(Relation table, ItemPointer tid) {
  Oid type = TIDOID;
  Datum value = PointerGetDatum(tid);
  (void)execute(table, psprintf("DELETE FROM ONLY %s WHERE ctid = $1", quoted_name(table)),
                {1, &type, &value, nullptr}, SPI_OK_DELETE);
}

}  // namespace retrysafe::pg
