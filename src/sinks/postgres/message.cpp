#include "sinks/postgres/message.hpp"

#include <libpq-fe.h>

namespace retrysafe::sink {

namespace {

// The length of the character of UTF-8 that `text` begins with; 0: it is none.
size_t character_length(std::string_view text) {
  const auto byte = [&](size_t i) { return static_cast<unsigned char>(text[i]); };
  const unsigned char first = byte(0);
  if (first < 0x80) return 1;
  const size_t length = first >= 0xc2 && first < 0xe0   ? 2
                        : first >= 0xe0 && first < 0xf0 ? 3
                        : first >= 0xf0 && first < 0xf5 ? 4
                                                        : 0;
  if (length == 0 || text.size() < length) return 0;
  for (size_t i = 1; i < length; ++i)
    if ((byte(i) & 0xc0) != 0x80) return 0;
  const bool overlong = (first == 0xe0 && byte(1) < 0xa0) || (first == 0xf0 && byte(1) < 0x90);
  const bool no_character = (first == 0xed && byte(1) >= 0xa0) || (first == 0xf4 && byte(1) >= 0x90);
  return overlong || no_character ? 0 : length;
}

}  // namespace

std::string one_line(std::string_view text) {
  std::string line;
  line.reserve(text.size());
  while (!text.empty()) {
    const size_t length = character_length(text);
    const auto first = static_cast<unsigned char>(text.front());
    if (length == 0)
      line += '?';
    else if (first < 0x20 || first == 0x7f)
      line += ' ';
    else
      line.append(text.substr(0, length));
    text.remove_prefix(length == 0 ? 1 : length);
  }
  while (line.ends_with(' ')) line.pop_back();
  return line;
}

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
