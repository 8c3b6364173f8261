#include "pg/boundary.hpp"

namespace retrysafe::pg::detail {

void raise_failure(sigjmp_buf *entry_stack, const Failure &failure) {
  if (PG_exception_stack != entry_stack) {
    // A C++ exception left a PG_TRY section: the pointer would dangle into a dead frame.
    PG_exception_stack = entry_stack;
    ereport(WARNING, (errcode(ERRCODE_INTERNAL_ERROR),
                      errmsg_internal("retrysafe: an exception left a section that catches server errors")));
  }
  if (failure.pg) {
    // ReThrowError jumps without errfinish, which is what would have cleared these.
    InterruptHoldoffCount = 0;
    QueryCancelHoldoffCount = 0;
    ReThrowError(failure.pg);
  }
  ereport(ERROR, (errcode(failure.sqlstate), errmsg_internal("%s", failure.text)));
  pg_unreachable();
}

}  // namespace retrysafe::pg::detail
