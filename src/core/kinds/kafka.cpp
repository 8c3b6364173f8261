#include "core/kinds/common_options.hpp"
#include "core/kinds/kinds.hpp"
#include "core/kinds/names.hpp"

namespace retrysafe::kinds {

namespace {

using enum OptionType;

constexpr OptionDescription options[] = {
    {.name = "brokers",
     .type = kString,
     .description = "Brokers to begin with, as HOST:PORT, separated by commas; the cluster names the others.",
     .required = true,
     .min = 1,
     .max = 1024,
     .addresses = true},
    {.name = "topic",
     .type = kTemplate,
     .description = "Topic, or a template of it.",
     .required = true,
     .min = 1,
     .max = 1024,
     .rule = topic_problem},
    kMode,
    {.name = "partitioner",
     .type = kEnum,
     .description = "How an ordering key chooses its partition: murmur2 as Java clients, crc32 as librdkafka "
                    "by default, fnv1a as Sarama.",
     .default_value = "murmur2",
     .choices = "murmur2|crc32|fnv1a"},
    {.name = "compression",
     .type = kEnum,
     .description = "Of what is sent.",
     .default_value = "none",
     .choices = "none|gzip|snappy|lz4|zstd"},
    needing(worded(kUser, "SASL user; with password and sasl_mechanism."), "password|sasl_mechanism"),
    needing(worded(kPassword, "SASL password."), "user"),
    {.name = "sasl_mechanism",
     .type = kEnum,
     .description = "How user and password are shown to the broker; goes with user.",
     .needs = "user",
     .choices = "plain|scram-sha-256|scram-sha-512"},
    kTls,
    kCaFile,
    kCertFile,
    worded(kKeyFile, "Private key of that certificate (PEM)."),
    kKeyPassword,
    {.name = "timeout",
     .type = kDuration,
     .description = "How long an event may wait for its acknowledgement, attempts of the library included.",
     .default_value = "30000",
     .min = kSecond,
     .max = kHour},
    worded(kConnectTimeout, "How long all brokers may be away before the destination counts as unreachable."),
    max_in_flight("1000", 100'000),
    {.name = "max_message_bytes",
     .type = kInteger,
     .description = "Larger messages are failures for good; as max.message.bytes of the topic.",
     .default_value = "1000000",
     .min = 1000,
     .max = 1'000'000'000},
    {.name = "batch_bytes",
     .type = kInteger,
     .description = "Up to this size messages for one partition go together.",
     .default_value = "65536",
     .min = 1,
     .max = 16 * 1024 * 1024},
    {.name = "linger",
     .type = kDuration,
     .description = "How long a message waits for others to go with it.",
     .default_value = "0",
     .min = 0,
     .max = 900},
    {.name = "client_id",
     .type = kString,
     .description = "Name of the client in logs and quotas of the brokers.",
     .default_value = "retrysafe",
     .min = 1,
     .max = 255},
    kSource,
};

}  // namespace

constinit const BuiltInKind kafka{.name = "kafka", .library = "retrysafe_kafka", .options = options};

}  // namespace retrysafe::kinds
