// The outbound border: from C++ that owns things into the server.
//
// Two kinds of frames exist in this project.
//   * Owning frames hold C++ objects with destructors. An error of the server must not pass them.
//   * Jumpable frames hold only trivially destructible locals (views, palloc'd memory). An error of the
//   server
//     may jump through them. Nearly all SQL-callable code is written this way, so that it costs nothing.
// An owning frame reaches jumpable code through pg::call, and only through it.
#pragma once

#include <csetjmp>
#include <type_traits>

#include "pg/error.hpp"
#include "pg/server.hpp"

namespace retrysafe::pg {

namespace detail {

// Copies the pending error. That allocates, so it can raise as well: then there is no data (out of memory).
inline ErrorData *copy_pending_error() {
  ErrorData *volatile copy = nullptr;
  sigjmp_buf *outer = PG_exception_stack;
  sigjmp_buf here;
  if (sigsetjmp(here, 0) == 0) {
    PG_exception_stack = &here;
    copy = CopyErrorData();
  }
  PG_exception_stack = outer;
  FlushErrorState();
  return copy;
}

}  // namespace detail

// Runs the jumpable `body`; an error of the server comes back as PgError. The transaction is then as broken
// as it was at the raise: let the exception go to the inbound boundary, or abort the transaction.
template <class Body>
auto call(Body &&body) -> std::invoke_result_t<Body> {
  using Result = std::invoke_result_t<Body>;
  static_assert(std::is_void_v<Result> || std::is_trivially_destructible_v<Result>,
                "a jump would skip the destructor of the result");

  sigjmp_buf *const outer_stack = PG_exception_stack;
  ErrorContextCallback *const outer_context = error_context_stack;
  MemoryContext const memory = CurrentMemoryContext;
  // errfinish zeroes these before it jumps; an LWLock held further out would then be released below zero.
  const uint32 interrupts_held = InterruptHoldoffCount;
  const uint32 cancels_held = QueryCancelHoldoffCount;

  sigjmp_buf here;
  if (sigsetjmp(here, 0) == 0) {
    PG_exception_stack = &here;
    if constexpr (std::is_void_v<Result>) {
      body();
      PG_exception_stack = outer_stack;
      error_context_stack = outer_context;
      return;
    } else {
      Result result = body();
      PG_exception_stack = outer_stack;
      error_context_stack = outer_context;
      return result;
    }
  }
  PG_exception_stack = outer_stack;
  error_context_stack = outer_context;
  InterruptHoldoffCount = interrupts_held;
  QueryCancelHoldoffCount = cancels_held;
  MemoryContextSwitchTo(memory);
  throw PgError(detail::copy_pending_error());
}

}  // namespace retrysafe::pg
