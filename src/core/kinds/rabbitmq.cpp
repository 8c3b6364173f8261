#include "core/kinds/kinds.hpp"
#include "core/kinds/names.hpp"

namespace retrysafe::kinds {

namespace {

using enum OptionType;

constexpr OptionDescription options[] = {
    {.name = "host",
     .type = kString,
     .description = "Broker to connect to; of several, separated by commas, the first that answers.",
     .required = true,
     .min = 1,
     .max = 1024,
     .addresses = true},
    {.name = "port",
     .type = kInteger,
     .description = "Port of the broker; 5672 or, with tls, 5671 by default.",
     .min = 1,
     .max = 65535},
    {.name = "vhost",
     .type = kString,
     .description = "Virtual host.",
     .default_value = "/",
     .min = 1,
     .max = 255},
    {.name = "user", .type = kString, .description = "User name.", .required = true, .min = 1, .max = 255},
    {.name = "password",
     .type = kSecret,
     .description = "Password.",
     .required = true,
     .min = 1,
     .max = 1024},
    {.name = "tls",
     .type = kBoolean,
     .description = "Whether to connect with TLS; certificate and host name are then verified.",
     .default_value = "false"},
    {.name = "ca_file",
     .type = kFile,
     .description = "Certificates of the authorities to trust, instead of the system's (PEM).",
     .max = 1024},
    {.name = "exchange",
     .type = kTemplate,
     .description =
         "Exchange to publish to; by default the broker's default exchange, whose routing keys are names of "
         "queues.",
     .min = 1,
     .max = 1024,
     .rule = short_string_problem},
    {.name = "routing_key",
     .type = kTemplate,
     .description = "Routing key.",
     .default_value = "{type}",
     .min = 1,
     .max = 1024,
     .rule = short_string_problem},
    {.name = "mandatory",
     .type = kBoolean,
     .description = "Whether a message that no queue takes is a failure; otherwise the broker drops it.",
     .default_value = "true"},
    {.name = "mode",
     .type = kEnum,
     .description =
         "CloudEvents content mode: the payload as body and attributes as headers, or one JSON envelope.",
     .default_value = "binary",
     .choices = "binary|structured"},
    {.name = "timeout",
     .type = kDuration,
     .description = "How long the broker may take to confirm a message.",
     .default_value = "30000",
     .min = 10,
     .max = kHour},
    {.name = "connect_timeout",
     .type = kDuration,
     .description = "How long connecting to one address, with TLS and login, may take.",
     .default_value = "5000",
     .min = 10,
     .max = 10 * kMinute},
    {.name = "heartbeat",
     .type = kDuration,
     .description = "A connection that is silent for twice as long is given up; whole seconds, 0s leaves it "
                    "to the broker.",
     .default_value = "30000",
     .min = 0,
     .max = kHour},
    {.name = "max_in_flight",
     .type = kInteger,
     .description = "Messages that wait for their confirmation at once, per worker.",
     .default_value = "1000",
     .min = 1,
     .max = 65535},
    {.name = "source",
     .type = kString,
     .description = "CloudEvents source; by default retrysafe/DATABASE/SCOPE.",
     .min = 1,
     .max = 255},
};

}  // namespace

constinit const BuiltInKind rabbitmq{.name = "rabbitmq", .library = "retrysafe_rabbitmq", .options = options};

}  // namespace retrysafe::kinds
