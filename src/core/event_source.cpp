#include "core/event_source.hpp"

#include <algorithm>

namespace retrysafe {

namespace {

bool unreserved(unsigned char c) {
  return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') || c == '-' || c == '.' ||
         c == '_' || c == '~';
}

char *put_encoded(std::string_view segment, char *out) {
  constexpr char digits[] = "0123456789ABCDEF";
  for (const char c : segment) {
    const auto byte = static_cast<unsigned char>(c);
    if (unreserved(byte)) {
      *out++ = c;
    } else {
      *out++ = '%';
      *out++ = digits[byte >> 4];
      *out++ = digits[byte & 15];
    }
  }
  return out;
}

}  // namespace

size_t event_source(std::string_view database, std::string_view scope, char *out) noexcept {
  constexpr std::string_view prefix = "retrysafe/";
  char *end = std::copy(prefix.begin(), prefix.end(), out);
  end = put_encoded(database, end);
  if (!scope.empty()) {
    *end++ = '/';
    end = put_encoded(scope, end);
  }
  return static_cast<size_t>(end - out);
}

}  // namespace retrysafe
