// Raising errors of our own, and carrying an error of the server through C++ frames.
#pragma once

#include <exception>

#include "core/error_codes.hpp"
#include "pg/server.hpp"

namespace retrysafe::pg {

// An error that the server raised inside pg::call, as a C++ exception. The ErrorData lives in the memory
// context that was current at the call; null when even the copy did not fit into memory.
class PgError : public std::exception {
 public:
  explicit PgError(ErrorData *data) noexcept : data_(data) {}
  ErrorData *data() const noexcept { return data_; }
  const char *what() const noexcept override {
    return data_ && data_->message ? data_->message : "out of memory";
  }

 private:
  ErrorData *data_;
};

int sqlstate(const ErrorCode &code);

// Not pg_attribute_printf: from 16 on that is what the compiler of the server's build called it, which
// another compiler need not know.
#define RETRYSAFE_PRINTF(format, arguments) __attribute__((__format__(__printf__, format, arguments)))

// Jumps. Message style is the server's: lower case, no full stop; the hint is a sentence that says what to
// do.
[[noreturn]] void raise(const ErrorCode &code, const char *hint, const char *format, ...)
    RETRYSAFE_PRINTF(3, 4);

// The same with a detail (a sentence, or null) made by the caller.
[[noreturn]] void raise_detailed(const ErrorCode &code, const char *detail, const char *hint,
                                 const char *format, ...) RETRYSAFE_PRINTF(4, 5);

// With kRowRefused.
inline constexpr const char *kRowRefusedHint =
    "Look for a trigger that returns null, or a rule, on the tables of retrysafe.";

// The transaction cannot see what it would have to answer with: SQLSTATE 40001, which clients retry.
[[noreturn]] void raise_serialization_failure(const char *message, const char *hint);

// The caller lacks a right: SQLSTATE 42501.
[[noreturn]] void raise_insufficient_privilege(const char *hint, const char *format, ...)
    RETRYSAFE_PRINTF(2, 3);

// For functions that must see what was committed while they waited for a lock: SQLSTATE of kWrongIsolation.
void require_read_committed(const char *function);

void warn(const ErrorCode &code, const char *hint, const char *format, ...) RETRYSAFE_PRINTF(3, 4);

// One line in the server's log; the other form adds a hint.
void log(const char *format, ...) RETRYSAFE_PRINTF(1, 2);
void log_with_hint(const char *hint, const char *format, ...) RETRYSAFE_PRINTF(2, 3);

}  // namespace retrysafe::pg
