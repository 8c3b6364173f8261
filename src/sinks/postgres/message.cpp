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
  if (primary) return sqlstate_of(result) + ": " + one_line(primary);
  const std::string text = one_line(PQresultErrorMessage(result));
  // It may be an answer to something that was never asked.
  return text.empty() ? std::string("the server answered with ") + PQresStatus(PQresultStatus(result)) : text;
}

std::string message_of(const PGconn *connection) {
  return one_line(PQerrorMessage(connection));
}

}  // namespace retrysafe::sink
