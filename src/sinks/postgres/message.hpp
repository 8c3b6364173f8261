// What the far side said, as a reason: one line of good UTF-8. Only the primary message: detail and context
// can hold whole rows.
#pragma once

#include <string>
#include <string_view>

// Of libpq-fe.h.
typedef struct pg_conn PGconn;
typedef struct pg_result PGresult;

namespace retrysafe::sink {

// Control characters become spaces and bytes that are not UTF-8 question marks: before a session is set up,
// or from something that is no server at all, anything can come.
std::string one_line(std::string_view text);

std::string sqlstate_of(const PGresult *result);  // empty: the error is libpq's own
std::string message_of(const PGresult *result);
std::string message_of(const PGconn *connection);

}  // namespace retrysafe::sink
