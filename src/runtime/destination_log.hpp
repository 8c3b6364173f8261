// One line in the server's log per change of a destination's state, not per attempt.
#pragma once

#include <cstdint>

#include "pg/error.hpp"
#include "pg/server.hpp"

namespace retrysafe::runtime {

// For this worker's lanes of a destination: it did not answer, or it did again. Owning; never throws.
void note_unreachable(int32 destination, const char *name, const char *reason) noexcept;
void note_reachable(int32 destination, const char *name) noexcept;

// One line, from owning frames; never throws.
void log_line(const char *format, ...) noexcept RETRYSAFE_PRINTF(1, 2);

}  // namespace retrysafe::runtime
