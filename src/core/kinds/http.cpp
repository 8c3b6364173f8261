#include "core/kinds/common_options.hpp"
#include "core/kinds/kinds.hpp"

namespace retrysafe::kinds {

namespace {

using enum OptionType;

constexpr OptionDescription options[] = {
    {.name = "url", .type = kUrl, .description = "Where events are posted to.", .required = true},
    kMode,
    {.name = "secret",
     .type = kSecret,
     .description =
         "Signing keys by Standard Webhooks, several separated by blanks: \"whsec_\" and base64, or the "
         "bytes themselves.",
     .min = 1,
     .max = 1024},
    {.name = "authorization",
     .type = kSecret,
     .description = "Value of the request header Authorization, such as \"Bearer TOKEN\".",
     .min = 1,
     .max = 8192},
    {.name = "headers", .type = kHeaders, .description = "Request headers to add.", .max = 8192},
    worded(kTimeout, "How long one request may take."),
    worded(kConnectTimeout, "How long connecting may take, with the look-up of the name and TLS."),
    max_in_flight("32", 1024),
    {.name = "http2",
     .type = kBoolean,
     .description = "Whether to use HTTP/2 where the far side offers it.",
     .default_value = "true"},
    kCaFile,
    kCertFile,
    worded(kKeyFile, "Private key of that certificate (PEM)."),
    kKeyPassword,
    {.name = "response_bytes",
     .type = kInteger,
     .description = "How much of an answer is read.",
     .default_value = "65536",
     .min = 0,
     .max = 16 * 1024 * 1024},
    kSource,
};

}  // namespace

constinit const BuiltInKind http{.name = "http", .library = "retrysafe_http", .options = options};

}  // namespace retrysafe::kinds
