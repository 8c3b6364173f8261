#include "core/kinds/kinds.hpp"

namespace retrysafe::kinds {

namespace {

using enum OptionType;

constexpr OptionDescription options[] = {
    {.name = "function",
     .type = kString,
     .description = "Function(event jsonb) of this database, by name or with "
                    "its argument types.",
     .required = true,
     .min = 1,
     .max = 255},
    {.name = "statement_timeout",
     .type = kDuration,
     .description = "How long one call may take; its worker does nothing else meanwhile.",
     .default_value = "10000",
     .min = 10,
     .max = kHour},
};

}  // namespace

constinit const BuiltInKind function{.name = "function", .library = nullptr, .options = options};

}  // namespace retrysafe::kinds
