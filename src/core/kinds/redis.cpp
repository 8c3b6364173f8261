#include "core/kinds/common_options.hpp"
#include "core/kinds/kinds.hpp"

namespace retrysafe::kinds {

namespace {

using enum OptionType;

constexpr OptionDescription options[] = {
    {.name = "host",
     .type = kString,
     .description = "Server to connect to, as a name or an address.",
     .required = true,
     .min = 1,
     .max = 253,
     .addresses = true},
    port("6379"),
    worded(kUser, "User to authenticate as; by default the user \"default\"."),
    worded(kPassword, "Password; without it nobody is authenticated."),
    {.name = "database",
     .type = kInteger,
     .description = "Number of the database.",
     .default_value = "0",
     .min = 0,
     .max = 1'000'000},
    {.name = "stream",
     .type = kTemplate,
     .description = "Stream that events are added to.",
     .required = true,
     .min = 1,
     .max = 1024},
    {.name = "max_length",
     .type = kInteger,
     .description = "Entries that a stream keeps, roughly; by default all. Older ones go, read or not.",
     .min = 1,
     .max = 1'000'000'000'000},
    worded(kTimeout, "How long the server may not answer."),
    kConnectTimeout,
    max_in_flight("256", 10'000),
    {.name = "replicas",
     .type = kInteger,
     .description = "Replicas that must have an event before it counts as delivered (WAIT).",
     .default_value = "0",
     .min = 0,
     .max = 100},
    kTls,
    kCaFile,
    kCertFile,
    kKeyFile,
    kSource,
};

}  // namespace

constinit const BuiltInKind redis{.name = "redis", .library = "retrysafe_redis", .options = options};

}  // namespace retrysafe::kinds
