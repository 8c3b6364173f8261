#include "idempotency/lock.hpp"

#include "pg/lock_owner.hpp"

#include "pg/server.hpp"

namespace retrysafe::idempotency {

namespace {

// A class of advisory locks of our own: users' locks have 1 or 2 in the fourth field, so that neither theirs
// nor ours can meet the other, and pg_locks shows which is which (objsubid 21075).
constexpr uint16 kLockClass = 0x5253;

LOCKTAG tag_of(const Key &key) {
  const uint64 hash = hash_of(key);
  LOCKTAG tag;
  SET_LOCKTAG_ADVISORY(tag, MyDatabaseId, static_cast<uint32>(hash >> 32), static_cast<uint32>(hash),
                       kLockClass);
  return tag;
}

}  // namespace

bool lock(const Key &key, Wait wait) {
  const LOCKTAG tag = tag_of(key);
  return pg::in_subtransaction([&] { return LockAcquire(&tag, ExclusiveLock, false, wait == Wait::kNo); }) !=
         LOCKACQUIRE_NOT_AVAIL;
}

void unlock(const Key &key) {
  const LOCKTAG tag = tag_of(key);
  pg::in_subtransaction([&] { return LockRelease(&tag, ExclusiveLock, false); });
}

bool locked_by_another(const Key &key) {
  const LOCKTAG tag = tag_of(key);
  int holders;
  GetLockConflicts(&tag, ShareLock, &holders);
  return holders > 0;
}

}  // namespace retrysafe::idempotency
