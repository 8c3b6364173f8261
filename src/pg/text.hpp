// Looking into the server's text.
#pragma once

#include <algorithm>
#include <string_view>

#include "core/printable.hpp"

#include "pg/server.hpp"

namespace retrysafe::pg {

// The bytes of a detoasted text, as long as that lives.
inline std::string_view bytes_of(const text *value) {
  return {VARDATA_ANY(value), static_cast<size_t>(VARSIZE_ANY_EXHDR(value))};
}

// Appends to text of the server; for writers that take anything with such an `append`.
struct ServerText {
  StringInfo text;

  void append(std::string_view more) {
    const auto size = static_cast<int>(more.size());
    if (text->maxlen - text->len <= size) enlargeStringInfo(text, size);
    memcpy(text->data + text->len, more.data(), more.size());
    text->len += size;
    text->data[text->len] = '\0';
  }
};

// Text of the server in UTF-8: itself, or a palloc'd copy. Raises where the text has no form in UTF-8.
inline std::string_view to_utf8(std::string_view text) {
  const char *converted = pg_server_to_any(text.data(), static_cast<int>(text.size()), PG_UTF8);
  return converted == text.data() ? text : std::string_view(converted);
}

// For messages: what was given as a name can be of any length.
inline const char *shown_name(const char *name) {
  const int size = static_cast<int>(strlen(name));
  const int kept = pg_mbcliplen(name, size, NAMEDATALEN - 1);
  return kept == size ? name : psprintf("%.*s...", kept, name);
}

// Makes the message of an error fit to be stored and shown: valid in the encoding of the database, which
// nobody has seen to when a function raises it, on one line, and cut between characters. Never raises.
template <size_t N>
void copy_message(char (&to)[N], const char *message) noexcept {
  const int encoding = GetDatabaseEncoding();
  const size_t size = strlen(message);
  if (encoding == PG_UTF8) {
    to[printable({message, size}, to, N - 1)] = '\0';
    return;
  }
  const bool readable =
      encoding != PG_SQL_ASCII && pg_verify_mbstr(encoding, message, static_cast<int>(size), true);
  const size_t kept = readable ? static_cast<size_t>(pg_mbcliplen(message, static_cast<int>(size), N - 1))
                               : std::min(size, N - 1);
  // Encodings of databases keep ASCII bytes out of longer characters.
  std::transform(message, message + kept, to, [&](char c) {
    const auto byte = static_cast<unsigned char>(c);
    return byte < 0x20 || byte == 0x7f ? ' ' : byte < 0x80 || readable ? c : '?';
  });
  to[kept] = '\0';
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
