// SHA-256 by OpenSSL, as in the server itself.
#pragma once

#include <initializer_list>
#include <string_view>

#include "core/event_id.hpp"

namespace retrysafe::pg {

// Of the parts one after the other. Jumpable; allocates nothing of the transaction.
Sha256Digest sha256(std::initializer_list<std::string_view> parts);

}  // namespace retrysafe::pg
