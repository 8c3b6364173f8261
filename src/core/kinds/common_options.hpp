// Options that several kinds take, in the same words and with the same bounds. A kind lists them among its
// own, and says so where it differs.
#pragma once

#include "core/option_list.hpp"

namespace retrysafe::kinds {

constexpr OptionDescription worded(OptionDescription option, std::string_view description) {
  option.description = description;
  return option;
}

constexpr OptionDescription by_default(OptionDescription option, std::string_view value) {
  option.default_value = value;
  return option;
}

constexpr OptionDescription required(OptionDescription option) {
  option.required = true;
  return option;
}

constexpr OptionDescription needing(OptionDescription option, std::string_view others) {
  option.needs = others;
  return option;
}

inline constexpr OptionDescription kMode{.name = "mode",
                                         .type = OptionType::kEnum,
                                         .description =
                                             "CloudEvents content mode: the payload by itself and attributes "
                                             "beside it, or everything in one JSON object.",
                                         .default_value = "binary",
                                         .choices = "binary|structured"};

inline constexpr OptionDescription kSource{
    .name = "source",
    .type = OptionType::kString,
    .description = "CloudEvents source; by default retrysafe/DATABASE/SCOPE.",
    .min = 1,
    .max = 255};

inline constexpr OptionDescription kUser{.name = "user",
                                         .type = OptionType::kString,
                                         .description = "User to log in as; with password.",
                                         .needs = "password",
                                         .min = 1,
                                         .max = 255};

inline constexpr OptionDescription kPassword{.name = "password",
                                             .type = OptionType::kSecret,
                                             .description = "Password of the user.",
                                             .min = 1,
                                             .max = 8192};

inline constexpr OptionDescription kTls{
    .name = "tls",
    .type = OptionType::kBoolean,
    .description = "Whether to connect with TLS; certificate and host name are then verified.",
    .default_value = "false"};

inline constexpr OptionDescription kCaFile{
    .name = "ca_file",
    .type = OptionType::kFile,
    .description = "Certificates of the authorities to trust, instead of the system's (PEM).",
    .min = 1,
    .max = 1024};

inline constexpr OptionDescription kCertFile{
    .name = "cert_file",
    .type = OptionType::kFile,
    .description = "Certificate to show to the far side (PEM); with key_file.",
    .needs = "key_file",
    .min = 1,
    .max = 1024};

inline constexpr OptionDescription kKeyFile{
    .name = "key_file",
    .type = OptionType::kFile,
    .description = "Private key of that certificate (PEM), not encrypted.",
    .needs = "cert_file",
    .min = 1,
    .max = 1024};

inline constexpr OptionDescription kKeyPassword{.name = "key_password",
                                                .type = OptionType::kSecret,
                                                .description = "Password of key_file.",
                                                .needs = "key_file",
                                                .min = 1,
                                                .max = 1024};

inline constexpr OptionDescription kTimeout{.name = "timeout",
                                            .type = OptionType::kDuration,
                                            .description = "How long an acknowledgement may take.",
                                            .default_value = "30000",
                                            .min = 10,
                                            .max = kHour};

inline constexpr OptionDescription kConnectTimeout{
    .name = "connect_timeout",
    .type = OptionType::kDuration,
    .description = "How long connecting to one address may take, with TLS and login.",
    .default_value = "5000",
    .min = 10,
    .max = 10 * kMinute};

constexpr OptionDescription max_in_flight(std::string_view default_value, int64_t max) {
  return {.name = "max_in_flight",
          .type = OptionType::kInteger,
          .description = "Events under way at once, for each shard.",
          .default_value = default_value,
          .min = 1,
          .max = max};
}

constexpr OptionDescription port(std::string_view default_value) {
  return {.name = "port",
          .type = OptionType::kInteger,
          .description = "Port of the server.",
          .default_value = default_value,
          .min = 1,
          .max = 65535};
}

}  // namespace retrysafe::kinds
