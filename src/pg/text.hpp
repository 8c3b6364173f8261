// Looking into the server's text.
#pragma once

#include <string_view>

#include "pg/server.hpp"

namespace retrysafe::pg {

// The bytes of a detoasted text, as long as that lives.
inline std::string_view bytes_of(const text *value) {
  return {VARDATA_ANY(value), static_cast<size_t>(VARSIZE_ANY_EXHDR(value))};
}

}  // namespace retrysafe::pg
