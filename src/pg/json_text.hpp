// jsonb values as text.
#pragma once

#include <string_view>

#include "pg/server.hpp"

namespace retrysafe::pg {

// Appends the text, byte for byte as the server writes it, which takes several times as long.
void append_json(StringInfo out, Jsonb *json);

// The same as palloc'd text that ends with NUL.
std::string_view json_text(Jsonb *json);

// By the text, so that 1.5 and 1.50 differ: who reads it sees every digit. Null is like null only.
bool same_json(Jsonb *a, Jsonb *b);

// Whether the text has more than `limit` bytes. Takes memory for one number at most, and time for so many
// bytes.
bool json_exceeds(Jsonb *json, int limit);

// Whether arrays and objects are within one another in more than `levels` levels.
bool json_is_deeper(Jsonb *json, int levels);

}  // namespace retrysafe::pg
