#include "core/handler_error.hpp"

namespace retrysafe {

HandlerError handler_error(std::string_view sqlstate) {
  using enum HandlerError;
  const std::string_view error_class = sqlstate.substr(0, 2);

  // A handler that takes too long is its own fault, and one that cannot get a lock met another transaction.
  if (sqlstate == "57014") return kRetry;
  if (sqlstate == "55P03" || error_class == "40") return kConflict;
  // A primary that became a standby, and sessions that the far side ended for being idle in a transaction.
  if (sqlstate == "25006" || sqlstate == "25P03") return kUnreachable;

  if (error_class == "22") return kFinal;
  if (error_class == "08" || error_class == "28" || error_class == "53" || error_class == "57" ||
      error_class == "58")
    return kUnreachable;
  // Undefined or forbidden objects, schemas and databases; plans and prepared statements that went stale.
  if (error_class == "42" || error_class == "3F" || error_class == "3D" || error_class == "0A" ||
      error_class == "26")
    return kMisconfigured;
  return kRetry;
}

}  // namespace retrysafe
