// Changing rows of our tables by statements, for the sake of what somebody has put there. Tools that copy a
// table while it is written to learn by triggers what changes: without them pg_repack loses the row. And a
// column may have a default, or not be null.
#pragma once

#include "pg/table_insert.hpp"

#include "pg/server.hpp"

namespace retrysafe::pg {

bool needs_insert_statement(Relation table, const NewRow &row);
bool needs_delete_statement(Relation table);

// False: `unique_index` (InvalidOid: none) holds that key already. Waits for a transaction that is about to
// put it there, or to take it away.
bool insert_by_statement(Relation table, const NewRow &row, Oid unique_index);

void delete_by_statement(Relation table, ItemPointer tid);

}  // namespace retrysafe::pg
