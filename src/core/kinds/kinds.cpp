#include "core/kinds/kinds.hpp"

namespace retrysafe {

namespace {

constexpr const BuiltInKind *all[] = {
    &kinds::function, &kinds::http, &kinds::kafka,    &kinds::nats,
    &kinds::postgres, &kinds::pull, &kinds::rabbitmq, &kinds::redis,
};

}  // namespace

const BuiltInKind *find_built_in_kind(std::string_view name) {
  for (const BuiltInKind *kind : all)
    if (kind->name == name) return kind;
  return nullptr;
}

std::span<const BuiltInKind *const> built_in_kinds() {
  return all;
}

namespace kinds {

constinit const BuiltInKind pull{.name = "pull", .library = nullptr, .options = {}};

}  // namespace kinds
}  // namespace retrysafe
