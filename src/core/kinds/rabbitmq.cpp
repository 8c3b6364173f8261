#include "core/kinds/common_options.hpp"
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
    required(kUser),
    required(kPassword),
    kTls,
    kCaFile,
    kCertFile,
    kKeyFile,
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
    kMode,
    worded(kTimeout, "How long the broker may take to confirm a message."),
    kConnectTimeout,
    {.name = "heartbeat",
     .type = kDuration,
     .description = "A connection that is silent for twice as long is given up; whole seconds, 0s leaves it "
                    "to the broker.",
     .default_value = "30000",
     .min = 0,
     .max = kHour},
    max_in_flight("1000", 65'535),
    kSource,
};

}  // namespace

constinit const BuiltInKind rabbitmq{.name = "rabbitmq", .library = "retrysafe_rabbitmq", .options = options};

}  // namespace retrysafe::kinds
