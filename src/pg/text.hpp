// Looking into the server's text.
#pragma once

#include <string_view>

#include "pg/server.hpp"

namespace retrysafe::pg {

// The bytes of a detoasted text, as long as that lives.
inline std::string_view bytes_of(const text *value) {
  return {VARDATA_ANY(value), static_cast<size_t>(VARSIZE_ANY_EXHDR(value))};
}

// Text of the server in UTF-8: itself, or a palloc'd copy. Raises where the text has no form in UTF-8.
inline std::string_view to_utf8(std::string_view text) {
  const char *converted = pg_server_to_any(text.data(), static_cast<int>(text.size()), PG_UTF8);
  return converted == text.data() ? text : std::string_view(converted);
}

// Copies into an array, cut short at a whole character if need be. (Not strlcpy: it cuts anywhere, and
// whether it comes from the server or from the C library differs from system to system.) Never raises.
template <size_t N>
void copy_text(char (&to)[N], const char *from) noexcept {
  const auto length = static_cast<int>(strlen(from));
  const int kept = pg_mbcliplen(from, length, static_cast<int>(N) - 1);
  memcpy(to, from, static_cast<size_t>(kept));
  to[kept] = '\0';
}

}  // namespace retrysafe::pg
