// What the far side said, as a reason: one printable line. Before a session is set up, or from something that
// is no server at all, anything can come. Only the primary message: detail and context can hold whole rows.
#pragma once

#include <string>

#include <libpq-fe.h>

namespace retrysafe::sink {

std::string sqlstate_of(const PGresult *result);  // empty: the error is libpq's own
std::string message_of(const PGresult *result);
std::string message_of(const PGconn *connection);

}  // namespace retrysafe::sink
