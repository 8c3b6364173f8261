#include "pg/database_name.hpp"

#include <algorithm>
#include <cstring>

#include "pg/server.hpp"

namespace retrysafe::pg {

namespace {

// Never raises for what the name holds, as the server's own conversion does.
bool has_form_in_utf8(char *name) {
  const int size = static_cast<int>(strlen(name));
  const int encoding = GetDatabaseEncoding();
  if (encoding == PG_UTF8 || encoding == PG_SQL_ASCII) return pg_verify_mbstr(PG_UTF8, name, size, true);
  const Oid conversion = FindDefaultConversionProc(encoding, PG_UTF8);
  if (!OidIsValid(conversion)) return false;
  unsigned char out[NAMEDATALEN * MAX_CONVERSION_GROWTH + 1];
  return pg_do_encoding_conversion_buf(conversion, encoding, PG_UTF8, reinterpret_cast<unsigned char *>(name),
                                       size, out, sizeof out, true) == size;
}

}  // namespace

const char *own_database_name() {
  char *name = get_database_name(MyDatabaseId);
  if (!name) return "";  // it is being dropped
  if (!has_form_in_utf8(name))
    std::replace_if(
        name, name + strlen(name), [](char c) { return IS_HIGHBIT_SET(c); }, '?');
  return name;
}

}  // namespace retrysafe::pg
