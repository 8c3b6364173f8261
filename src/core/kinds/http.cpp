#include "core/kinds/kinds.hpp"

namespace retrysafe::kinds {

namespace {

using enum OptionType;

constexpr OptionDescription options[] = {
    {.name = "url", .type = kUrl, .description = "Where events are posted to.", .required = true},
    {.name = "mode",
     .type = kEnum,
     .description =
         "CloudEvents content mode: the payload as body and attributes as headers, or one JSON envelope.",
     .default_value = "binary",
     .choices = "binary|structured"},
    {.name = "secret",
     .type = kSecret,
     .description =
         "Signing keys by Standard Webhooks, several separated by blanks: \"whsec_\" and base64, or the "
         "bytes themselves.",
     .min = 1,
     .max = 1024},
    {.name = "headers",
     .type = kHeaders,
     .description = "Request headers to add, such as Authorization.",
     .max = 8192},
    {.name = "timeout",
     .type = kDuration,
     .description = "How long one request may take.",
     .default_value = "30000",
     .min = 10,
     .max = kHour},
    {.name = "connect_timeout",
     .type = kDuration,
     .description = "How long connecting may take.",
     .default_value = "5000",
     .min = 10,
     .max = 10 * kMinute},
    {.name = "max_in_flight",
     .type = kInteger,
     .description = "Requests under way at once, per worker.",
     .default_value = "32",
     .min = 1,
     .max = 1024},
    {.name = "http2",
     .type = kBoolean,
     .description = "Whether to use HTTP/2 where the far side offers it.",
     .default_value = "true"},
    {.name = "ca_file",
     .type = kFile,
     .description = "Certificates of the authorities to trust, instead of the "
                    "system's (PEM).",
     .max = 1024},
    {.name = "response_bytes",
     .type = kInteger,
     .description = "How much of an answer is read.",
     .default_value = "65536",
     .min = 0,
     .max = 16 * 1024 * 1024},
    {.name = "source",
     .type = kString,
     .description = "CloudEvents source; by default retrysafe/DATABASE/SCOPE.",
     .min = 1,
     .max = 255},
};

}  // namespace

constinit const BuiltInKind http{.name = "http", .library = "retrysafe_http", .options = options};

}  // namespace retrysafe::kinds
