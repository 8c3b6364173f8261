#include "pg/error.hpp"

namespace retrysafe::pg {

namespace {

// vsnprintf into palloc'd memory of the right size.
RETRYSAFE_PRINTF(1, 0) char *format_text(const char *format, va_list args) {
  StringInfoData text;
  initStringInfo(&text);
  for (;;) {
    va_list copy;
    va_copy(copy, args);
    const int needed = appendStringInfoVA(&text, format, copy);
    va_end(copy);
    if (needed == 0) return text.data;
    enlargeStringInfo(&text, needed);
  }
}

}  // namespace

int sqlstate(const ErrorCode &code) {
  const char *s = code.sqlstate;
  return MAKE_SQLSTATE(s[0], s[1], s[2], s[3], s[4]);
}

void raise(const ErrorCode &code, const char *hint, const char *format, ...) {
  va_list args;
  va_start(args, format);
  const char *message = format_text(format, args);
  va_end(args);
  ereport(ERROR, (errcode(sqlstate(code)), errmsg_internal("%s", message), errhint("%s", hint)));
  pg_unreachable();
}

void raise_detailed(const ErrorCode &code, const char *detail, const char *hint, const char *format, ...) {
  va_list args;
  va_start(args, format);
  const char *message = format_text(format, args);
  va_end(args);
  ereport(ERROR, (errcode(sqlstate(code)), errmsg_internal("%s", message),
                  detail ? errdetail("%s", detail) : 0, errhint("%s", hint)));
  pg_unreachable();
}

void raise_serialization_failure(const char *message, const char *hint) {
  ereport(ERROR,
          (errcode(ERRCODE_T_R_SERIALIZATION_FAILURE), errmsg_internal("%s", message), errhint("%s", hint)));
  pg_unreachable();
}

void raise_insufficient_privilege(const char *hint, const char *format, ...) {
  va_list args;
  va_start(args, format);
  const char *message = format_text(format, args);
  va_end(args);
  ereport(ERROR,
          (errcode(ERRCODE_INSUFFICIENT_PRIVILEGE), errmsg_internal("%s", message), errhint("%s", hint)));
  pg_unreachable();
}

void require_read_committed(const char *function) {
  if (IsolationUsesXactSnapshot())
    raise(kWrongIsolation, "Begin the transaction with ISOLATION LEVEL READ COMMITTED.",
          "%s needs isolation level READ COMMITTED", function);
}

void warn(const ErrorCode &code, const char *hint, const char *format, ...) {
  va_list args;
  va_start(args, format);
  const char *message = format_text(format, args);
  va_end(args);
  ereport(WARNING, (errcode(sqlstate(code)), errmsg_internal("%s", message), errhint("%s", hint)));
}

void log(const char *format, ...) {
  va_list args;
  va_start(args, format);
  const char *message = format_text(format, args);
  va_end(args);
  ereport(LOG, (errmsg_internal("%s", message)));
}

void log_with_hint(const char *hint, const char *format, ...) {
  va_list args;
  va_start(args, format);
  const char *message = format_text(format, args);
  va_end(args);
  ereport(LOG, (errmsg_internal("%s", message), errhint("%s", hint)));
}

}  // namespace retrysafe::pg
