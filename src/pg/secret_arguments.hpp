// The arguments of some functions are secrets, and the server logs the statement of every error.
#pragma once

#include "pg/server.hpp"

namespace retrysafe::pg {

namespace detail {

inline void hide_statement(void *) {
  errhidestmt(true);
  errhidecontext(true);  // where the statement may stand as well, when a function runs it
}

}  // namespace detail

// What is raised or logged while the jumpable `body` runs comes without the statement in the server's log.
template <class Body>
void with_secret_arguments(Body &&body) {
  ErrorContextCallback context{error_context_stack, detail::hide_statement, nullptr};
  error_context_stack = &context;
  body();
  error_context_stack = context.previous;
}

}  // namespace retrysafe::pg
