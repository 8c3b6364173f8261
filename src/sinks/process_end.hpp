// The end of a process that leaves threads behind.
//
// At its end a process takes its libraries down, the TLS library among them. A thread that still runs then
// may be in one of them, if only at its own end, and crash there. So nothing is taken down: text in the
// buffers of stdio is written, and the exit code stays.
#pragma once

#include <unistd.h>

#include <cstdio>

namespace retrysafe::sink {

// For a handler that on_exit() calls: handlers that were registered earlier do not run any more.
inline void end_process([[maybe_unused]] int exit_code) noexcept {
  (void)std::fflush(nullptr);
#ifndef RETRYSAFE_COVERAGE  // whose counters are written by what is left out here
  ::_exit(exit_code);
#endif
}

}  // namespace retrysafe::sink
