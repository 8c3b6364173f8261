#include "sinks/postgres/message.hpp"

#include "core/printable.hpp"
#include "sink/abi.h"

namespace retrysafe::sink {

namespace {

constexpr size_t kMaxBytes = sizeof(retrysafe_outcome::reason) - 1;

std::string one_line(const char *text) {
  return printable(text, kMaxBytes);
}

}  // namespace

std::string sqlstate_of(const PGresult *result) {
  const char *state = PQresultErrorField(result, PG_DIAG_SQLSTATE);
  return state ? one_line(state) : std::string();
}

std::string message_of(const PGresult *result) {
  const char *primary = PQresultErrorField(result, PG_DIAG_MESSAGE_PRIMARY);
  if (!primary) return one_line(PQresultErrorMessage(result));
  return sqlstate_of(result) + ": " + one_line(primary);
}

std::string message_of(const PGconn *connection) {
  return one_line(PQerrorMessage(connection));
}

}  // namespace retrysafe::sink
