// A result that tells of COPY, which nothing here asks for. libpq gives it again for as long as results are
// asked for, whatever else the server sends: whoever takes results until there are none must leave then.
#pragma once

#include <libpq-fe.h>

namespace retrysafe::sink {

inline bool is_copy(ExecStatusType status) {
  return status == PGRES_COPY_IN || status == PGRES_COPY_OUT || status == PGRES_COPY_BOTH;
}

}  // namespace retrysafe::sink
