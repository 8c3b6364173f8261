#include "runtime/wakeup.hpp"

namespace retrysafe::runtime {

void announce_commit() noexcept {}

}  // namespace retrysafe::runtime
