#include "core/kinds/common_options.hpp"
#include "core/kinds/kinds.hpp"
#include "core/kinds/names.hpp"

namespace retrysafe::kinds {

namespace {

using enum OptionType;

constexpr OptionDescription options[] = {
    {.name = "servers",
     .type = kString,
     .description = "HOST:PORT, nats://HOST:PORT or tls://HOST:PORT; of several, separated by commas, the "
                    "first that answers.",
     .required = true,
     .min = 1,
     .max = 2048,
     .addresses = true},
    {.name = "subject",
     .type = kTemplate,
     .description = "Subject to publish on; a template over {type}, {ordering_key} and {header:NAME}.",
     .required = true,
     .min = 1,
     .max = 1024,
     .rule = event_subject_problem},
    {.name = "stream",
     .type = kString,
     .description = "Name of the stream that has to take the messages; by default whichever does.",
     .min = 1,
     .max = 255,
     .rule = stream_problem},
    {.name = "id_prefix",
     .type = kString,
     .description = "What stands before the event id in Nats-Msg-Id: for several destinations whose messages "
                    "come into one stream.",
     .min = 1,
     .max = 64,
     .rule = message_id_problem},
    kMode,
    kUser,
    needing(kPassword, "user"),
    {.name = "token",
     .type = kSecret,
     .description = "Token to connect with, instead of a user.",
     .min = 1,
     .max = 1024},
    {.name = "credentials",
     .type = kSecret,
     .description = "Content of a credentials file, as nsc writes it: a JWT and the seed of its key.",
     .min = 1,
     .max = 65536},
    {.name = "nkey_seed",
     .type = kSecret,
     .description = "Seed of the user's NKey; needs nkey.",
     .needs = "nkey",
     .min = 58,
     .max = 58},
    {.name = "nkey",
     .type = kString,
     .description = "Public NKey of the user.",
     .needs = "nkey_seed",
     .min = 56,
     .max = 56},
    worded(kTls, "Whether to demand TLS; it is used in any case where a server demands it."),
    worded(kCaFile, "Certificates of authorities to trust besides the system's (PEM)."),
    kCertFile,
    kKeyFile,
    {.name = "inbox_prefix",
     .type = kString,
     .description = "Beginning of the subject on which acknowledgements come back.",
     .default_value = "_INBOX",
     .min = 1,
     .max = 255,
     .rule = subject_problem},
    kConnectTimeout,
    by_default(kTimeout, "10000"),
    max_in_flight("1000", 10'000),
    kSource,
};

}  // namespace

constinit const BuiltInKind nats{.name = "nats", .library = "retrysafe_nats", .options = options};

}  // namespace retrysafe::kinds
