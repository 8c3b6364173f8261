// The `source` of an event unless the destination configures one: retrysafe/DATABASE, or
// retrysafe/DATABASE/SCOPE.
#pragma once

#include <cstddef>
#include <string_view>

namespace retrysafe {

// Bytes that event_source may write.
constexpr size_t event_source_capacity(std::string_view database, std::string_view scope) {
  return sizeof "retrysafe//" + 3 * (database.size() + scope.size());
}

// Writes a URI reference (bytes that have no place in one are percent-encoded) and returns its size.
// Allocates nothing, so that it can be called where an error of the server may jump.
size_t event_source(std::string_view database, std::string_view scope, char *out) noexcept;

}  // namespace retrysafe
