// Who a lock belongs to.
#pragma once

#include <type_traits>

#include "pg/server.hpp"

namespace retrysafe::pg {

// A lock that has to live exactly as long as what the (sub)transaction writes. Inside a cursor the current
// resource owner is the portal's, which may outlive a rolled back subtransaction or die with a later one.
template <class Body>
auto in_subtransaction(Body &&body) {
  ResourceOwner const portal = CurrentResourceOwner;
  CurrentResourceOwner = CurTransactionResourceOwner;
  if constexpr (std::is_void_v<decltype(body())>) {
    body();
    CurrentResourceOwner = portal;
  } else {
    auto result = body();
    CurrentResourceOwner = portal;
    return result;
  }
}

}  // namespace retrysafe::pg
