// The lock that makes a transaction the owner of a key.
#pragma once

#include "idempotency/key.hpp"

namespace retrysafe::idempotency {

enum class Wait : bool { kNo, kYes };

// Held until the current (sub)transaction ends, or until unlock(). False: another transaction holds it
// (Wait::kNo).
bool lock(const Key &key, Wait wait);
void unlock(const Key &key);

// Looks without touching the lock. Says nothing about transactions on the primary when asked on a standby.
bool locked_by_another(const Key &key);

}  // namespace retrysafe::idempotency
