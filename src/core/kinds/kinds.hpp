// The kinds of destinations that come with the extension: what options each takes, and which library
// delivers.
//
// A kind has a file of its own here and a line in kinds.cpp, and nothing elsewhere: outbox_create_destination
// checks against its list, the view outbox_kind_options shows it, and the publisher loads its library.
#pragma once

#include <span>
#include <string_view>

#include "core/option_list.hpp"

namespace retrysafe {

struct BuiltInKind {
  std::string_view name;
  const char *library;  // of the sink; null for kinds that need none
  OptionList options;
};

// Whether a destination that says it is of kind `name` is of this one.
inline bool is_kind(std::string_view name, const BuiltInKind &kind) {
  return name == kind.name;
}

// Null for an unknown kind.
const BuiltInKind *find_built_in_kind(std::string_view name);
std::span<const BuiltInKind *const> built_in_kinds();

namespace kinds {

extern const BuiltInKind function;
extern const BuiltInKind http;
extern const BuiltInKind kafka;
extern const BuiltInKind nats;
extern const BuiltInKind postgres;
extern const BuiltInKind pull;
extern const BuiltInKind rabbitmq;
extern const BuiltInKind redis;

}  // namespace kinds
}  // namespace retrysafe
