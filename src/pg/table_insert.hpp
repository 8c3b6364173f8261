// Inserting a row into one of our tables without planner and executor.
#pragma once

#include "pg/server.hpp"

namespace retrysafe::pg {

// `values` and `nulls` have one entry for each column. False: `unique_index` (InvalidOid: none) holds that
// key already, or gets it from a transaction that has not ended; then the row was taken back. Waits for
// nobody. Jumpable; locks the table and its indexes until the end of the (sub)transaction, like a statement.
bool insert_row(Oid table, const Datum *values, const bool *nulls, Oid unique_index);

}  // namespace retrysafe::pg
