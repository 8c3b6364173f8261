// Inserting a row into one of our tables, or taking one away, without planner and executor. But where
// somebody has put a trigger on the table, or a column with a default, it is done by a statement
// (row_statements.hpp).
#pragma once

#include "pg/server.hpp"

namespace retrysafe::pg {

// The first columns of a row; those that somebody added to the table get their defaults.
struct NewRow {
  const Datum *values;
  const bool *nulls;
  int columns;
};

template <int kColumns>
NewRow new_row(const Datum (&values)[kColumns], const bool (&nulls)[kColumns]) {
  return {values, nulls, kColumns};
}

// False: `unique_index` (InvalidOid: none) holds that key already, or gets it from a transaction that has not
// ended; then the row was taken back. Waits for nobody, unless it takes a statement. Jumpable; locks the
// table and its indexes until the end of the (sub)transaction, like a statement.
bool insert_row(Oid table, const NewRow &row, Oid unique_index);

void delete_row(Relation table, ItemPointer tid);

}  // namespace retrysafe::pg
