// Whether a call is all that the client's statement does.
#pragma once

#include "pg/server.hpp"

namespace retrysafe::pg {

// SELECT f(…) or SELECT * FROM f(…): the statement is over when the function returns. Not so within another
// function, a cursor, a DO block or a longer statement, which may take long to come to their end.
bool is_whole_statement(FunctionCallInfo fcinfo);

}  // namespace retrysafe::pg
