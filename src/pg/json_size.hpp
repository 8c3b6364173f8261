// How long a jsonb value is as text, which is what limits are about.
#pragma once

#include "pg/server.hpp"

namespace retrysafe::pg {

// Whether the text has more than `limit` bytes; then `size` is how many. Does not write the text for a value
// that is far below the limit, as most are.
bool json_exceeds(Jsonb *json, int limit, int *size);

}  // namespace retrysafe::pg
