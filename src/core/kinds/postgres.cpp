#include "core/kinds/common_options.hpp"
#include "core/kinds/kinds.hpp"

namespace retrysafe::kinds {

namespace {

using enum OptionType;

constexpr OptionDescription options[] = {
    {.name = "host",
     .type = kString,
     .description = "Server to connect to; of several, separated by commas, the first that takes writes.",
     .required = true,
     .min = 1,
     .max = 1024,
     .addresses = true},
    port("5432"),
    {.name = "dbname",
     .type = kString,
     .description = "Database to connect to.",
     .required = true,
     .min = 1,
     .max = 63},
    {.name = "user",
     .type = kString,
     .description = "Role to connect as.",
     .required = true,
     .min = 1,
     .max = 63},
    worded(kPassword, "Password; required unless a superuser made the destination."),
    {.name = "sslmode",
     .type = kEnum,
     .description = "As in libpq.",
     .default_value = "prefer",
     .choices = "disable|allow|prefer|require|verify-ca|verify-full"},
    worded(kCaFile, "Certificates of the authorities to trust (PEM)."),
    kCertFile,
    worded(kKeyFile, "Private key of that certificate (PEM)."),
    kKeyPassword,
    {.name = "inbox_table",
     .type = kString,
     .description = "Table of the far side that keeps the events; its unique event_id tells which are new.",
     .default_value = "public.retrysafe_inbox",
     .min = 1,
     .max = 255},
    {.name = "consumer",
     .type = kString,
     .description = "Name under which the inbox remembers them; by default the "
                    "destination's.",
     .min = 1,
     .max = 255},
    {.name = "inbox_function",
     .type = kString,
     .description = "Function(consumer text, event_id text) returning boolean of the far side, in place of "
                    "the table: true the "
                    "first time.",
     .needs = "function",
     .min = 1,
     .max = 255},
    {.name = "application_name",
     .type = kString,
     .description = "Name of the connection in pg_stat_activity of the far side.",
     .default_value = "retrysafe",
     .min = 1,
     .max = 63},
    {.name = "function",
     .type = kString,
     .description = "Function(event jsonb) of the far side, called once for each new event.",
     .min = 1,
     .max = 255},
    kConnectTimeout,
    {.name = "statement_timeout",
     .type = kDuration,
     .description = "How long one event may take over there.",
     .default_value = "30000",
     .min = 10,
     .max = kHour},
    kSource,
};

}  // namespace

constinit const BuiltInKind postgres{.name = "postgres", .library = "retrysafe_postgres", .options = options};

}  // namespace retrysafe::kinds
