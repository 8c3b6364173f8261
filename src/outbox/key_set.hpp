// The ordering keys that recording a batch touches.
#pragma once

#include <cstring>

#include "pg/server.hpp"

namespace retrysafe::outbox {

// Small, as a batch is. Null, no key, is in no set.
class KeySet {
 public:
  explicit KeySet(int32 capacity)
      : keys_(static_cast<const char **>(palloc(sizeof(char *) * (capacity + 1)))) {}

  void add(const char *key) {
    if (key && !has(key)) keys_[count_++] = key;
  }
  bool has(const char *key) const {
    for (int32 i = 0; key && i < count_; ++i)
      if (strcmp(keys_[i], key) == 0) return true;
    return false;
  }
  int32 count() const { return count_; }
  const char *at(int32 i) const { return keys_[i]; }

 private:
  const char **keys_;
  int32 count_ = 0;
};

}  // namespace retrysafe::outbox
