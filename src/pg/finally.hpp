// What has to happen at the end of jumpable code, also when an error jumps out of it.
#pragma once

#include "pg/server.hpp"

namespace retrysafe::pg {

// Runs `body` and then `end`, which must not raise. Neither may own anything.
template <class Body, class End>
void finally(Body &&body, End &&end) {
  PG_TRY();
  { body(); }
  PG_FINALLY();
  { end(); }
  PG_END_TRY();
}

}  // namespace retrysafe::pg
