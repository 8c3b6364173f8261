// What the SQLSTATE of a failed handler, or of the statement around it, says about the event.
#pragma once

#include <string_view>

namespace retrysafe {

enum class HandlerError {
  kRetry,          // the event failed; a later try may succeed
  kFinal,          // the event can never be handled: class 22, its content is not fit
  kConflict,       // another transaction was in the way: the same again, soon
  kMisconfigured,  // something named by the destination may be missing or closed to it, or the handler is
                   // faulty
  kUnreachable,    // the server as a whole: out of resources, shutting down, read-only
};

HandlerError handler_error(std::string_view sqlstate);

}  // namespace retrysafe
