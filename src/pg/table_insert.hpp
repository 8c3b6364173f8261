// Inserting a row into one of our tables without planner and executor.
#pragma once

#include "pg/server.hpp"

namespace retrysafe::pg {

// The first columns of a row; those that somebody added to the table stay null.
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
// ended; then the row was taken back. Waits for nobody. Jumpable; locks the table and its indexes until the
// end of the (sub)transaction, like a statement.
bool insert_row(Oid table, const NewRow &row, Oid unique_index);

}  // namespace retrysafe::pg
