#include "core/snapshot.hpp"

#include <algorithm>

namespace retrysafe {

bool StoredSnapshot::ended(std::uint64_t txid) const {
  if (txid < xmin) return true;
  if (txid >= xmax) return false;
  return !std::binary_search(xip, xip + xip_count, txid);
}

}  // namespace retrysafe
