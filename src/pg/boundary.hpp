// The inbound border: from the server into C++. Every function whose address the server gets runs its body
// here.
#pragma once

#include <cstring>
#include <exception>
#include <new>

#include "pg/error.hpp"
#include "pg/server.hpp"

namespace retrysafe::pg {

namespace detail {

// What is left of an exception after its handler has ended. Trivially destructible: raising jumps over it.
struct Failure {
  ErrorData *pg;
  int sqlstate;
  char text[512];
};

inline void note(Failure &failure, int state, const char *text) noexcept {
  failure.sqlstate = state;
  std::strncpy(failure.text, text, sizeof failure.text - 1);
}

[[noreturn]] void raise_failure(sigjmp_buf *entry_stack, const Failure &failure);

}  // namespace detail

// Runs `body`, whose frames are jumpable, and turns C++ exceptions into errors of the server. The error is
// raised after the handler has ended: a jump out of a handler would leave the exception object alive for
// ever.
template <class Body>
Datum boundary(Body &&body) {
  sigjmp_buf *const entry_stack = PG_exception_stack;
  ErrorContextCallback *const entry_context = error_context_stack;
  detail::Failure failure{};
  try {
    return body();
  } catch (const PgError &error) {
    failure.pg = error.data();
    detail::note(failure, ERRCODE_OUT_OF_MEMORY, error.what());
  } catch (const std::bad_alloc &) {
    detail::note(failure, ERRCODE_OUT_OF_MEMORY, "out of memory");
  } catch (const std::exception &error) {
    detail::note(failure, ERRCODE_INTERNAL_ERROR, error.what());
  } catch (...) {
    detail::note(failure, ERRCODE_INTERNAL_ERROR, "unknown C++ exception");
  }
  error_context_stack = entry_context;  // what was put there stood in frames that are gone
  detail::raise_failure(entry_stack, failure);
}

}  // namespace retrysafe::pg

// Defines the SQL-callable function `name`; the body follows and sees `fcinfo`.
//   RETRYSAFE_SQL_FUNCTION(retrysafe_idem_peek) { …; PG_RETURN_NULL(); }
#define RETRYSAFE_SQL_FUNCTION(name)                                     \
  extern "C" {                                                           \
  PG_FUNCTION_INFO_V1(name);                                             \
  PGDLLEXPORT Datum name(PG_FUNCTION_ARGS);                              \
  }                                                                      \
  static Datum name##_body(FunctionCallInfo fcinfo);                     \
  Datum name(PG_FUNCTION_ARGS) {                                         \
    return retrysafe::pg::boundary([&] { return name##_body(fcinfo); }); \
  }                                                                      \
  static Datum name##_body([[maybe_unused]] FunctionCallInfo fcinfo)
